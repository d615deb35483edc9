"""A Kafka topic as a stream: messages as examples, partitions among trainers. Most tests use librdkafka's
mock broker; what it cannot do (offsets without messages, new partitions, a consumer that stops) is on a Log.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from tests.support.broker import PARTITIONS, Broker
from tests.support.waiting import eventually
from tests.trainers.data.test_stream import SLOTS, Servers, ids
from trainers.data.kafka import KafkaTopic
from trainers.data.stream import Stream, UnavailableError
from trainers.errors import DataError, UsageError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kafka() -> Broker:
    return Broker()


def lines(start: int, stop: int) -> list[str]:
    return [f"1 {number} 1 7" for number in range(start, stop)]


def made(
    kafka: Broker,
    topic: str,
    servers: Servers,
    bad: int = 0,
    config: dict[str, str] | None = None,
    **settings: object,
) -> Stream:
    source = KafkaTopic(
        topic,
        brokers=kafka.address,
        use_var=SLOTS,
        name="test",
        max_bad_lines=bad,
        timeout_s=20,
        config=config,  # type: ignore[arg-type]
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


def test_topics_that_cannot_be_read(kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"Topic 'missing' of .* cannot be read: .*Unknown topic"):
        ids(made(kafka, "missing", Servers()))
    with pytest.raises(UsageError, match=r'config of the topic .*"typo"'):
        KafkaTopic("any", brokers=kafka.address, use_var=SLOTS, config={"typo": 1}).shards()
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(UsageError, match=r"pip install 'fleetrun\[kafka\]'"):
        KafkaTopic("any", brokers=kafka.address, use_var=SLOTS)


class AwayTopic(KafkaTopic):
    """Nobody listens there."""

    _ask_s = 0.5

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            "any", brokers="127.0.0.1:1", use_var=SLOTS, config={"log_level": 0}, timeout_s=timeout_s
        )


def test_brokers_that_do_not_answer_are_waited_for() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 did not answer about topic 'any'.*refused"):
        AwayTopic(60).shards()
    with pytest.raises(DataError, match=r"did not answer about topic 'any'.*\. This lasted for 0 s"):
        AwayTopic(0).shards()


def test_records_that_were_deleted_are_refused_or_left_out(kafka: Broker) -> None:
    kafka.send("cut", 0, lines(0, 3))
    with pytest.raises(DataError, match="'cut/0' of the stream 'test' ends at 3, but was read up to 7"):
        ids(made(kafka, "cut", Servers({"cut/0": [0, 7]})))
    kafka.send("cut", 0, [line.ljust(900_000) for line in lines(3, 12)])  # the mock broker keeps 5 MB
    with pytest.raises(DataError, match=r"records \[2, \d\) of 'cut/0' in the stream 'test' were deleted"):
        ids(made(kafka, "cut", Servers({"cut/0": [0, 12]}, {"cut/0": [0, 2]})))
    servers = Servers({"cut/0": [0, 2]})
    stream = made(kafka, "cut", servers, config={"auto.offset.reset": "earliest"}, batch_size=20)
    (found,) = ids(stream)
    assert found == list(range(found[0], 12))
    assert servers.have == [{"cut/0": [0, 2, found[0], 12]}]


class Log:
    """Partitions in this process. `logs`: values by offset; None is an offset without a message. `first`:
    where all begin, unless `firsts` has it. `stops`: at these offsets a consumer says nothing any more, once.
    `errors`: what consumers say instead, once each; `error`: of the topic.
    """

    def __init__(self, *logs: list[str | None]) -> None:
        self.logs = list(logs)
        self.first = 0
        self.firsts: dict[int, int] = {}
        self.stops: set[int] = set()
        self.errors: list[int] = []
        self.error: KafkaError | None = None


class Consumer:
    """The part of confluent_kafka.Consumer that a KafkaTopic uses, of a Log. What it gave last comes again
    after `assign`.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._at: list[int] = [0, 0]
        self._left: list[Any] = []
        self._stopped = False

    def list_topics(self, topic: str, timeout: float) -> Any:
        found = SimpleNamespace(error=self._log.error, partitions=dict(enumerate(self._log.logs)))
        return SimpleNamespace(topics={topic: found})

    def get_watermark_offsets(self, where: TopicPartition, timeout: float) -> tuple[int, int]:
        number = where.partition
        return self._log.firsts.get(number, self._log.first), len(self._log.logs[number])

    def assign(self, places: Sequence[TopicPartition]) -> None:
        self._left = [self._message(self._at[1] - 1, "1 99 1 7")] if self._at[1] else []
        self._at = [places[0].partition, places[0].offset]

    def consume(self, most: int, timeout: float) -> list[Any]:
        found, self._left = self._left, []
        partition, at = self._at
        log = self._log.logs[partition]
        if self._log.errors:
            return [self._message(at, error=KafkaError(self._log.errors.pop()))]
        while len(found) < most and not self._stopped:
            if at in self._log.stops:
                self._log.stops.remove(at)
                self._stopped = True
            elif at == len(log):
                return [*found, self._message(at, error=KafkaError(KafkaError._PARTITION_EOF))]
            else:
                if (value := log[at]) is not None:
                    found.append(self._message(at, value))
                at += 1
                self._at[1] = at
        return found

    def _message(self, at: int, value: str = "", error: KafkaError | None = None) -> Any:
        said = {"error": error, "offset": at, "partition": self._at[0], "value": value.encode()}
        return SimpleNamespace(**{name: lambda each=each: each for name, each in said.items()})

    def poll(self, timeout: float) -> None: ...

    def close(self) -> None: ...


class LogTopic(KafkaTopic):
    """The topic of a Log."""

    _quiet_s = 0.01

    def __init__(self, log: Log, **settings: Any) -> None:
        self._log = log
        super().__init__("log", brokers="none", use_var=SLOTS, name="test", **settings)

    def _consumer(self) -> Any:
        return Consumer(self._log)


def streamed(log: Log, servers: Servers, **settings: Any) -> Stream:
    return Stream(LogTopic(log, **settings), lambda: servers, batch_size=4, poll_s=0.001)


def test_offsets_without_messages_count_with_the_batch_beside_them() -> None:
    one, two, three, four = lines(1, 5)
    log, servers = Log([None, one, None, two, None, None]), Servers()
    stream = streamed(log, servers)
    assert ids(stream) == [[1, 2]]
    assert servers.have == [{"log/0": [0, 6]}]
    log.logs[0] += [None, None]
    assert ids(stream) == []
    log.logs[0] += [None, three, None]
    assert ids(stream) == [[3]]
    assert servers.have == [{"log/0": [0, 11]}]
    log.logs[0] += [None]
    assert ids(stream) == []
    log.logs[0] += [four]
    log.first = 13
    with pytest.raises(DataError, match=r"records \[11, 13\) of 'log/0'"):
        ids(stream)


def test_offsets_at_the_end_of_what_one_server_lacks_are_counted_there_too() -> None:
    log, servers = Log([*lines(0, 8), "x"]), Servers({"log/0": [0, 9]}, {})
    assert ids(streamed(log, servers, max_bad_lines=1)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert servers.have == [{"log/0": [0, 9]}] * 2


@pytest.mark.parametrize("reset", ["error", "earliest"])
def test_records_that_are_deleted_while_another_partition_is_read(
    reset: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of theirs has counted yet."""
    log, servers, over = Log(lines(0, 4), []), Servers(), threading.Event()
    source = LogTopic(log, config={"auto.offset.reset": reset})
    stream = Stream(source, lambda: servers, batch_size=4, poll_s=0.001, follow=True, until=over.is_set)
    batches = iter(stream)
    assert next(batches).tensor("id").flatten().tolist() == [0, 1, 2, 3]
    log.firsts[1], log.logs[1] = 2, lines(10, 14)
    what = r"records [0, 2) of 'log/1' in the stream 'test' were deleted before all servers had them"
    if reset == "error":
        with pytest.raises(DataError, match=re.escape(f"{what}, and the shard now starts at 2. To skip")):
            next(batches)
        return
    assert next(batches).tensor("id").flatten().tolist() == [12, 13]
    over.set()
    assert not list(batches)
    assert capfd.readouterr().err.count(what) == 1


def test_settings_that_a_stream_does_not_take() -> None:
    for config, text in (
        ({"auto.offset.reset": "latest"}, "auto.offset.reset is 'latest'; for a stream it is 'earliest'"),
        ({"enable.auto.commit": True}, "enable.auto.commit, which the stream sets itself"),
    ):
        with pytest.raises(UsageError, match=re.escape(text)):
            LogTopic(Log([]), config=config)


def test_a_broken_last_message_is_counted_with_the_batch_before_it_or_the_next_one() -> None:
    log, servers = Log(["x"]), Servers()
    stream = streamed(log, servers, max_bad_lines=3)
    assert ids(stream) == []
    log.logs[0] += [*lines(1, 2), "y"]
    assert ids(stream) == [[1]]
    assert servers.have == [{"log/0": [0, 3]}]


def test_a_partition_that_comes_is_read_by_the_trainer_that_has_its_number() -> None:
    log, servers = Log(lines(0, 2), lines(10, 12)), Servers(rank=0, trainers=2)
    stream = streamed(log, servers)
    assert ids(stream) == [[0, 1]]
    log.logs += [lines(20, 22), lines(30, 32)]
    assert ids(stream) == [[20, 21]]


def test_a_consumer_that_stops_giving_what_is_there_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    log, servers = Log(lines(0, 12)), Servers()
    log.stops = {0, 6, 10}
    log.errors = [KafkaError._TRANSPORT]
    assert ids(streamed(log, servers)) == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]
    assert servers.have == [{"log/0": [0, 12]}]
    assert "the stream 'test' waits: 'log' cannot be read from offset 0" in capfd.readouterr().err


def test_brokers_that_refuse_are_not_waited_for() -> None:
    log = Log(lines(0, 2))
    log.errors = [KafkaError.TOPIC_AUTHORIZATION_FAILED]
    with pytest.raises(DataError, match=r"refuse topic 'log': .*authorization failed"):
        ids(streamed(log, Servers()))
    log.error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(DataError, match=r"refuse topic 'log'"):
        ids(streamed(log, Servers()))


def test_what_lasts_too_long_is_an_error() -> None:
    log = Log(lines(0, 2))
    topic = LogTopic(log)
    assert topic.shards() == ["log/0"]
    log.error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    with pytest.raises(UnavailableError, match="topic 'log' cannot be read"):
        topic.shards()  # a broker that has just started
    log.error = None
    log.stops = {0}
    with pytest.raises(
        DataError, match=r"no message arrived, .* up to 2\. This lasted for 0 s \(timeout_s\)"
    ):
        ids(streamed(log, Servers(), timeout_s=0))
