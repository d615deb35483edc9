"""A Kafka topic as a stream: a line of MultiSlot text in each message, partitions divided among trainers.

confluent-kafka (`pip install 'fleetrun[kafka]'`) talks to the brokers. Its consumer groups and commits are
not used: the parameter servers know what was read (`stream`).
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainers.data.multislot import BrokenLines, Parser
from trainers.data.slots import Batch, Layout, UseVar
from trainers.data.sources import FileSource
from trainers.data.stream import Split
from trainers.data.warm import warm_up
from trainers.errors import DataError, UsageError

if TYPE_CHECKING:
    import confluent_kafka as ck

_LOOK_S = 0.2
Config = dict[str, str | int | float | bool]


class KafkaTopic:
    """The messages of a topic: a Source. Positions are offsets; each partition is read by one trainer.

    `brokers`: "host:port,host:port". `config`: other settings of librdkafka, such as those of security; by
    "auto.offset.reset" "earliest", records that were deleted before they could be trained are left out,
    otherwise they are an error. `name`: of the stream on the parameter servers, by default the topic.
    `max_bad_lines`: broken messages that this process passes over before one is an error. `timeout_s`:
    brokers that do not answer for so long are an error.
    """

    def __init__(
        self,
        topic: str,
        *,
        brokers: str,
        use_var: UseVar,
        config: Config | None = None,
        name: str = "",
        max_bad_lines: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        try:
            import confluent_kafka
        except ImportError as error:
            raise UsageError(
                "KafkaTopic needs confluent-kafka, which is not installed; pip install 'fleetrun[kafka]'"
            ) from error
        self._kafka = confluent_kafka
        self._topic = topic
        self._layout = Layout.of(use_var)
        self._broken = BrokenLines(max_bad_lines)
        self._timeout = timeout_s
        self.name = name or topic
        given = dict(config or {})
        self._leaves_out = given.pop("auto.offset.reset", "error") == "earliest"
        self._config: Config = {
            "bootstrap.servers": brokers,
            "group.id": self.name,
            "queued.max.messages.kbytes": 16_384,
            **given,
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
        self._partitions: dict[int, _Partition] = {}
        self._any: ck.Consumer | None = None
        """For questions about the topic."""

    @property
    def skipped_lines(self) -> int:
        return self._broken.count

    def shards(self) -> list[str]:
        try:
            found = self._asking().list_topics(self._topic, timeout=self._timeout).topics[self._topic]
        except self._kafka.KafkaException as problem:
            raise DataError(f"the brokers of topic {self._topic!r} do not answer: {problem}") from problem
        if found.error is not None:
            raise DataError(f"topic {self._topic!r} cannot be read: {found.error}")
        return [f"{self._topic}/{number}" for number in sorted(found.partitions)]

    def splits(self, shards: Sequence[str], rank: int, trainers: int) -> Iterator[Split]:
        for shard in shards:
            number = _number(shard)
            if number % trainers == rank:
                where = self._kafka.TopicPartition(self._topic, number)
                try:
                    first, behind = self._asking().get_watermark_offsets(where, timeout=self._timeout)
                except self._kafka.KafkaException as problem:
                    raise DataError(f"{shard} cannot be read: {problem}") from problem
                yield Split(shard, first, behind, behind, first, self._leaves_out)

    def read(
        self, shard: str, start: int, stop: int, rows: int, *, grows: bool
    ) -> Iterator[tuple[Batch | None, int]]:
        warm_up()
        number = _number(shard)
        if number not in self._partitions:
            self._partitions[number] = _Partition(self._config, self._topic, number, self._timeout)
        at = start
        while at < stop:
            values, behind = self._partitions[number].take(at, stop, rows, grows=grows)
            if behind == at:
                return
            yield self._batch(f"{shard} from offset {at}", values), behind
            at = behind

    def _batch(self, name: str, values: Sequence[bytes]) -> Batch | None:
        """None: all of them are broken, or there are none."""
        parser = Parser(self._layout, max(1, len(values)), self._broken, most=1)
        text = b"".join(value.rstrip(b"\r\n").replace(b"\n", b"|") + b"\n" for value in values)
        found = [each for each in parser.read(FileSource(name, io.BytesIO(text))) if len(each)]
        columns = found[0] if found else parser.rest()
        return columns.batch() if len(columns) else None

    def _asking(self) -> ck.Consumer:
        if self._any is None:
            self._any = self._kafka.Consumer(self._config)
        return self._any


class _Partition:
    """A consumer of one partition, and the offset that it gives next, if that is known."""

    def __init__(self, config: Config, topic: str, number: int, timeout: float) -> None:
        import confluent_kafka

        self._kafka = confluent_kafka
        self._consumer = confluent_kafka.Consumer(config)
        self._topic, self._number, self._timeout = topic, number, timeout
        self._next: int | None = None

    def take(self, start: int, stop: int, most: int, *, grows: bool) -> tuple[list[bytes], int]:
        """The values of at most so many messages from `start` on and before `stop`, and the offset behind
        them. With `grows` it may be fewer than there are.
        """
        if self._next != start:
            self._consumer.assign([self._kafka.TopicPartition(self._topic, self._number, start)])
        self._next = None
        values: list[bytes] = []
        at, deadline = start, time.monotonic() + self._timeout
        while at < stop and len(values) < most:
            messages = self._consumer.consume(min(most - len(values), stop - at), timeout=_LOOK_S)
            if not messages and time.monotonic() > deadline:
                raise DataError(
                    f"nothing came from partition {self._number} of {self._topic!r} for {self._timeout:g} s, "
                    f"which has records up to {stop}, from {at} on"
                )
            for message in messages:
                error, offset = message.error(), message.offset()
                ends = error is not None and error.code() == self._kafka.KafkaError._PARTITION_EOF
                if offset is not None and offset >= stop and (ends or error is None):
                    return values, stop  # the last offsets before it have no messages
                if ends and grows and offset == at:
                    return values, at
                if error is None:
                    values.append(message.value() or b"")
                    at = int(offset or 0) + 1
                    deadline = time.monotonic() + self._timeout
                elif not ends and not error.retriable():
                    raise DataError(f"partition {self._number} of {self._topic!r} cannot be read: {error}")
        self._next = at
        return values, at


def _number(shard: str) -> int:
    return int(shard.rpartition("/")[2])
