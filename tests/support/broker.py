"""A Kafka broker in this process: librdkafka's own mock cluster, which other processes can reach too."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import Producer

PARTITIONS = 4
"""Those of a topic of the mock cluster."""


class Broker:
    """`address`: for clients. It ends when this object does."""

    def __init__(self) -> None:
        self._producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0})
        brokers = self._producer.list_topics(timeout=60).brokers.values()
        self.address = ",".join(f"{each.host}:{each.port}" for each in brokers)

    def send(self, topic: str, partition: int, messages: Sequence[str | None]) -> None:
        """They are there when this returns."""
        for each in messages:
            self._producer.produce(topic, value=None if each is None else each.encode(), partition=partition)
        assert self._producer.flush(60) == 0
