"""Read a Kafka topic as a stream, with a line of MultiSlot text in each message.

The partitions are divided among trainers. confluent-kafka (`pip install 'fleetrun[kafka]'`) connects to the
brokers. Its consumer groups and commits are not used, because the parameter servers store the read positions
(`stream`).
"""

from __future__ import annotations

import io
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from trainers.data.multislot import BrokenLines, Parser
from trainers.data.slots import Batch, Layout, UseVar
from trainers.data.sources import FileSource
from trainers.data.stream import Batches, Split, UnavailableError
from trainers.data.warm import warm_up
from trainers.errors import DataError, UsageError

if TYPE_CHECKING:
    import confluent_kafka as ck

_LOOK_S = 0.2
_PATIENCE_S = 2.0
_LONGEST_QUIET_S = 60.0
_MOST = 10_000
"""Messages at a time."""

Config = dict[str, str | int | float | bool]
Answer = TypeVar("Answer")


class KafkaTopic:
    """The messages of a topic, as a Source.

    Positions are offsets. One trainer reads each partition, including partitions added later.

    `brokers` is "host:port,host:port". `config` holds other settings of librdkafka, such as security
    settings. With "auto.offset.reset" set to "earliest", records that were deleted before training are
    skipped. Otherwise they raise an error. `name` is the name of the stream on the parameter servers, by
    default the topic. Use another name for a topic that you delete and create again. `max_bad_lines` is the
    number of broken messages that this process skips before it fails. `timeout_s` is how long to wait for
    brokers that do not answer.
    """

    _ask_s = 5.0
    _quiet_s = 10.0

    def __init__(
        self,
        topic: str,
        *,
        brokers: str,
        use_var: UseVar,
        config: Config | None = None,
        name: str = "",
        max_bad_lines: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        try:
            import confluent_kafka
        except ImportError as error:
            raise UsageError(
                "KafkaTopic needs confluent-kafka, which is not installed. Run: pip install 'fleetrun[kafka]'"
            ) from error
        self._kafka = confluent_kafka
        self._topic, self._brokers = topic, brokers
        self._layout = Layout.of(use_var)
        self._broken = BrokenLines(max_bad_lines)
        self.name = name or topic
        given = dict(config or {})
        reset = given.pop("auto.offset.reset", "error")
        self._leaves_out = reset in ("earliest", "smallest", "beginning")
        if not self._leaves_out and reset != "error":
            raise UsageError(f"auto.offset.reset is {reset!r}; for a stream it is 'earliest' or 'error'")
        if kept := sorted({"enable.auto.commit", "enable.partition.eof"}.intersection(given)):
            raise UsageError(
                f"config of the topic {topic!r} has {kept[0]}, which the stream sets itself. Remove it."
            )
        self._config: Config = {
            "bootstrap.servers": brokers,
            "group.id": self.name,
            "queued.max.messages.kbytes": 16_384,
            "fetch.wait.max.ms": 100,  # the next partition is read after this wait
            **given,
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
        self._trouble = ""
        self._asking: ck.Consumer | None = None
        self._silence = _Silence(timeout_s)
        self._silences: defaultdict[int, _Silence] = defaultdict(lambda: _Silence(timeout_s))
        """By partition, for requests of its ends."""
        self._messages = _Messages(topic, self._consumer, self._refused, _Silence(timeout_s), self._quiet_s)
        self._seen = False

    def __eq__(self, other: object) -> bool:
        mine = self._topic, self._brokers
        return isinstance(other, KafkaTopic) and mine == (other._topic, other._brokers)

    @property
    def skipped_lines(self) -> int:
        return self._broken.count

    def shards(self) -> list[str]:
        answer = self._ask(lambda asking: asking.list_topics(self._topic, timeout=self._ask_s), self._silence)
        found = answer.topics[self._topic]
        if found.error is not None:
            if refused := self._refused(found.error):
                raise refused
            if self._seen or found.error.code() == self._kafka.KafkaError.LEADER_NOT_AVAILABLE:
                raise self._silence.error(f"topic {self._topic!r} cannot be read: {found.error.str()}")
            raise DataError(
                f"Topic {self._topic!r} of {self._brokers} cannot be read: {found.error.str()}. Create it "
                "before the job starts."
            )
        self._seen = True
        self._silence.ends()
        return [f"{self._topic}/{number}" for number in sorted(found.partitions)]

    def splits(self, shards: Sequence[str], rank: int, trainers: int) -> Iterator[Split]:
        mine = {number: shard for shard in shards if (number := _number(shard)) % trainers == rank}
        # all ends first, because reading one partition may take long
        found = {number: self._watermarks(number) for number in mine}
        for number, shard in mine.items():
            first, behind = found[number]
            yield Split(shard, first, behind, behind, first, self._leaves_out)

    def read(self, shard: str, start: int, stop: int, rows: int, *, grows: bool) -> Batches:
        """Yield batches with the position behind each.

        Messages without examples are counted with a neighbouring batch.
        """
        warm_up()
        number, at, last, behind = _number(shard), start, None, start
        try:
            while at < stop:
                name = f"{shard} from offset {at}"
                values, at = self._messages.take(number, at, stop, rows)
                batch = self._batch(name, values)
                if batch is not None:
                    if last is not None:
                        yield last, behind
                    last, behind = batch, at
        except UnavailableError:
            if last is not None:
                yield last, behind
            raise
        yield last, stop

    def _batch(self, name: str, values: Sequence[bytes]) -> Batch | None:
        """Return a batch, or None if the values have no examples."""
        parser = Parser(self._layout, max(1, len(values)), self._broken, most=1)
        text = b"".join(value.rstrip(b"\r\n").replace(b"\n", b"|") + b"\n" for value in values)
        found = [each for each in parser.read(FileSource(name, io.BytesIO(text))) if len(each)]
        columns = found[0] if found else parser.rest()
        return columns.batch() if len(columns) else None

    def _watermarks(self, number: int) -> tuple[int, int]:
        where = self._kafka.TopicPartition(self._topic, number)
        silence = self._silences[number]
        found = self._ask(lambda asking: asking.get_watermark_offsets(where, timeout=self._ask_s), silence)
        silence.ends()
        return found

    def _ask(self, question: Callable[[ck.Consumer], Answer], silence: _Silence) -> Answer:
        if self._asking is None:
            self._asking = self._consumer()
        self._trouble = ""
        try:
            return question(self._asking)
        except self._kafka.KafkaException as problem:
            error = problem.args[0]
            self._asking.poll(0)  # calls `_note_error` with the reason
            raise self._refused(error) or silence.error(
                f"{self._brokers} did not answer about topic {self._topic!r}: {self._trouble or error.str()}"
            ) from problem
        finally:
            self._asking.poll(0)

    def _consumer(self) -> ck.Consumer:
        try:
            return self._kafka.Consumer({**self._config, "error_cb": self._note_error})
        except (self._kafka.KafkaException, ValueError, TypeError) as problem:
            raise UsageError(f"The config of the topic {self._topic!r} is invalid: {problem}") from problem

    def _note_error(self, error: ck.KafkaError) -> None:
        self._trouble = error.str()

    def _refused(self, error: ck.KafkaError) -> DataError | None:
        """Return an error that waiting cannot fix, or None."""
        kinds = self._kafka.KafkaError
        if error.code() in (
            kinds.TOPIC_AUTHORIZATION_FAILED,
            kinds.GROUP_AUTHORIZATION_FAILED,
            kinds.CLUSTER_AUTHORIZATION_FAILED,
        ):
            return DataError(f"{self._brokers} refuse topic {self._topic!r}: {error.str()}")
        return None


class _Silence:
    """Tracks since when brokers do not answer, and allows this for `timeout` seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._since: float | None = None

    def ends(self) -> None:
        self._since = None

    def error(self, what: str) -> UnavailableError | DataError:
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since < self._timeout:
            return UnavailableError(what)
        return DataError(f"{what}. This lasted for {self._timeout:g} s (timeout_s).")


class _Messages:
    """A consumer that reads one partition at a time, and the next position, if known.

    A consumer that misses available messages for `quiet_s` seconds is replaced. The next consumer has twice
    as long.
    """

    def __init__(
        self,
        topic: str,
        make: Callable[[], ck.Consumer],
        refused: Callable[[ck.KafkaError], DataError | None],
        silence: _Silence,
        quiet_s: float,
    ) -> None:
        import confluent_kafka

        self._kafka = confluent_kafka
        self._topic, self._make, self._refused = topic, make, refused
        self._consumer: ck.Consumer | None = None
        self._next: tuple[int, int] | None = None
        self._silence = silence
        self._quiet_s = quiet_s
        self._quiet = quiet_s
        self._given: dict[int, int] = {}
        """By partition: the offset behind the messages returned last."""
        self._waited: dict[int, tuple[int, float]] = {}
        """By partition: the awaited offset, and since when."""

    def take(self, number: int, start: int, stop: int, most: int) -> tuple[list[bytes], int]:
        """Return at most `most` message values of a partition from offset `start` on, and the offset behind
        them.

        The messages lie before `stop`, which the brokers reported as available. Offsets may lack a message,
        for example offsets of transaction markers and of compacted messages. Raises UnavailableError if
        messages do not arrive.
        """
        consumer = self._at(number, start)
        values: list[bytes] = []
        at, began = start, time.monotonic()
        self._waits(number, start, began)
        while at < stop and len(values) < most:
            for message in consumer.consume(min(most - len(values), stop - at, _MOST), timeout=_LOOK_S):
                error, offset = message.error(), message.offset()
                if error is not None and error.code() != self._kafka.KafkaError._PARTITION_EOF:
                    return self._broke_off(values, at, error.str(), self._refused(error))
                if message.partition() != number or offset is None or offset < at:
                    continue  # a message read before
                if offset >= stop:
                    self._good(number, stop)
                    return values, stop  # the last offsets before it lack messages
                if error is None:
                    values.append(message.value() or b"")
                    at, began = offset + 1, time.monotonic()
                    self._waits(number, at, began)
            if at < stop and time.monotonic() - began > min(_PATIENCE_S, self._quiet):
                return self._later(number, values, at, stop)
        self._next = number, at
        self._good(number, at)
        return values, at

    def _waits(self, number: int, at: int, now: float) -> None:
        """Note that the message of this partition and offset is awaited, since now or earlier."""
        if self._waited.get(number, (-1, 0.0))[0] != at:
            self._waited[number] = at, now

    def _later(self, number: int, values: list[bytes], at: int, stop: int) -> tuple[list[bytes], int]:
        """Return the messages so far, because the caller may have other work. Raises UnavailableError without
        any.
        """
        why = f"no message arrived, although the partition continues up to {stop}"
        if time.monotonic() - self._waited[number][1] > self._quiet:
            self._quiet = min(2 * self._quiet, _LONGEST_QUIET_S)
            del self._waited[number]
            return self._broke_off(values, at, why)
        self._next = number, at
        self._given[number] = at
        if values:
            return values, at
        raise UnavailableError(f"{self._topic!r} cannot be read from offset {at}: {why}")

    def _at(self, number: int, start: int) -> ck.Consumer:
        if self._consumer is not None and start < self._given.get(number, 0):
            self._consumer.close()  # reading goes back, and the consumer may have fetched later messages
            self._consumer = None
        if self._consumer is None:
            self._consumer, self._next = self._make(), None
        if self._next != (number, start):
            self._consumer.assign([self._kafka.TopicPartition(self._topic, number, start)])
        self._next = None
        return self._consumer

    def _good(self, number: int, at: int) -> None:
        self._given[number] = at
        self._silence.ends()
        self._quiet = self._quiet_s

    def _broke_off(
        self, values: list[bytes], at: int, why: str, refused: DataError | None = None
    ) -> tuple[list[bytes], int]:
        """Close the consumer and return the earlier values. Raises the error without any."""
        if self._consumer is not None:
            self._consumer.close()
        self._consumer = None
        if values:
            return values, at
        raise refused or self._silence.error(f"{self._topic!r} cannot be read from offset {at}: {why}")


def _number(shard: str) -> int:
    return int(shard.rpartition("/")[2])
