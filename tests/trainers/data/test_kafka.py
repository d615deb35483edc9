"""A Kafka topic as a stream: messages as examples, partitions among trainers."""

from __future__ import annotations

import re
import threading

import pytest

from tests.support.broker import PARTITIONS, Broker
from tests.support.waiting import eventually
from tests.trainers.data.test_stream import SLOTS, Servers, ids
from trainers.data.kafka import KafkaTopic
from trainers.data.stream import Stream
from trainers.errors import DataError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kafka() -> Broker:
    return Broker()


def lines(start: int, stop: int) -> list[str]:
    return [f"1 {number} 1 7" for number in range(start, stop)]


def made(kafka: Broker, topic: str, servers: Servers, bad: int = 0, **settings: object) -> Stream:
    source = KafkaTopic(
        topic, brokers=kafka.address, use_var=SLOTS, name="test", max_bad_lines=bad, timeout_s=20
    )
    return Stream(source, lambda: servers, **{"batch_size": 4, "poll_s": 0.001, **settings})  # type: ignore[arg-type]


def test_what_the_servers_lack_is_read_in_the_pieces_in_which_they_differ(kafka: Broker) -> None:
    kafka.send("one", 0, lines(0, 10))
    kafka.send("one", 2, lines(20, 23))
    servers = Servers({"one/0": [0, 2]}, {"one/0": [0, 3]})
    stream = made(kafka, "one", servers)
    assert ids(stream) == [[2], [3, 4, 5, 6], [7, 8, 9], [20, 21, 22]]
    assert servers.have == [{"one/0": [0, 10], "one/2": [0, 3]}] * 2
    assert ids(stream) == []
    kafka.send("one", 0, lines(10, 12))
    assert ids(stream) == [[10, 11]]


def test_partitions_are_divided(kafka: Broker) -> None:
    for partition in range(PARTITIONS):
        kafka.send("several", partition, lines(10 * partition, 10 * partition + 5))
    shares = [ids(made(kafka, "several", Servers(rank=rank, trainers=3))) for rank in range(3)]
    assert [sorted(number for batch in share for number in batch) for share in shares] == [
        [*range(5), *range(30, 35)],
        [*range(10, 15)],
        [*range(20, 25)],
    ]


def test_a_stream_follows_a_topic(kafka: Broker) -> None:
    kafka.send("follow", 1, lines(0, 2))
    servers, over = Servers(), threading.Event()
    found: list[int] = []

    def read() -> None:
        found.extend(
            number
            for batch in ids(made(kafka, "follow", servers, follow=True, until=over.is_set))
            for number in batch
        )

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(2, 8):
        eventually(lambda number=number: sum(stop - start for *_, start, stop in servers.given) == number)
        kafka.send("follow", number % PARTITIONS, lines(number, number + 1))
    over.set()
    thread.join(60)
    assert sorted(found) == list(range(8))


def test_messages_that_are_not_examples(kafka: Broker) -> None:
    kafka.send("broken", 0, ["1 0 1 7\n", "x", None, "1 1 1 7\n1 2 1 7", "1 3 1 7"])
    servers = Servers()
    stream = made(kafka, "broken", servers, bad=3)
    assert ids(stream) == [[0], [3]]
    assert stream.skipped_lines == 3
    assert servers.have == [{"broken/0": [0, 5]}]
    with pytest.raises(DataError, match=re.escape("broken/0 from offset 0:2: expected")):
        ids(made(kafka, "broken", Servers()))


def test_topics_whose_records_are_not_there(kafka: Broker) -> None:
    kafka.send("cut", 0, lines(0, 3))
    with pytest.raises(DataError, match="'cut/0' of the stream 'test' ends at 3, and was read up to 7"):
        ids(made(kafka, "cut", Servers({"cut/0": [0, 7]})))
    source = KafkaTopic("cut", brokers="127.0.0.1:1", use_var=SLOTS, timeout_s=1, config={"log_level": 0})
    with pytest.raises(DataError, match="the brokers of topic 'cut' do not answer"):
        source.shards()
