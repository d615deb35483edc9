"""Read streams of batches from sources with positions, so that each record counts once in the tables.

A batch has consecutive records of one shard. Its push names them, and each server stores them with its rows
(`positions`). A starting trainer requests these positions, and trains the records that some servers lack. It
starts with records that only some servers have, cut where the servers differ, so that a server takes whole
batches only. The sources (`stream_files`, `parquet`, `kafka`) provide the records. The servers store the
counted ones.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import Literal, NamedTuple, Protocol, Required, TypedDict

from trainers import progress
from trainers.checks import whole
from trainers.data.positions import Intervals, Piece, Records, missing, of_servers
from trainers.data.reading import HandOver
from trainers.data.slots import Batch
from trainers.errors import DataError, UsageError
from trainers.process.log import glog

_REPORT_S = 30.0


class UnavailableError(Exception):
    """A source cannot be read now. The stream waits and tries again."""


class Split(NamedTuple):
    """Positions [start, stop) of a shard for one trainer.

    `size` is the current size of the whole shard, and `first` its current start. `leaves_out` is True if
    records before `first` may be lost.
    """

    shard: str
    start: int
    stop: int
    size: int
    first: int = 0
    leaves_out: bool = False


Batches = Iterator[tuple[Batch | None, int]]
"""Batches of a shard, each with the position behind it. If only the position moves, the batch is None."""


class Source(Protocol):
    """Shards of records. `name` is the same in every start of the job.

    Its methods may raise UnavailableError until the source is available.
    """

    name: str

    def shards(self) -> Sequence[str]:
        """Return all current shards, in reading order."""

    def splits(self, shards: Sequence[str], rank: int, trainers: int) -> Iterator[Split]:
        """Yield the splits of one trainer. The splits of all trainers together cover all `shards`."""

    def read(self, shard: str, start: int, stop: int, rows: int, *, grows: bool) -> Batches:
        """Yield batches of at most `rows` records. `start` and `stop` are ends of a split or of a batch.

        With `grows`, a record at the end may be incomplete, and is then left for the next read.
        """

    @property
    def skipped_lines(self) -> int:
        """The number of broken records that were skipped."""


class Reading(NamedTuple):
    """The source that a stream was last read from, and the pass that read it."""

    source: Source
    by: weakref.ref[StreamPass]


class Trainer(Protocol):
    """The trainer that trains the batches. `streams` holds all streams that it has read, by name."""

    streams: dict[str, Reading]

    @property
    def place(self) -> tuple[int, int]:
        """Its rank, and the number of trainers."""

    @property
    def interrupted(self) -> bool:
        """True if the trainer must stop."""

    def positions(self, stream: str) -> Sequence[dict[str, list[int]]]:
        """Return each server's records of a stream, as interval ends by shard."""

    def give(self, records: Records, on: tuple[bool, ...] | None) -> None:
        """Note that the next step trains a batch with these records.

        `on` marks the servers that already have them. None means that all servers lack them.
        """

    def forget(self, records: Records) -> None:
        """Cancel the given batch with these records, unless it has been trained."""

    def flush(self) -> None:
        """Wait until every push has been applied."""


class Streaming(TypedDict, total=False):
    """The arguments for reading a source, as in `fleet.stream`."""

    batch_size: Required[int]
    follow: bool
    until: Callable[[], bool] | None
    poll_s: float
    queue_size: int


class Stream:
    """The records of a source that the servers lack, batch by batch. See `fleet.stream`.

    Only one pass can run at a time. Each pass starts with the records that the servers lack at that time.
    """

    def __init__(
        self,
        source: Source,
        trainer: Callable[[], Trainer],
        *,
        batch_size: int,
        follow: bool = False,
        until: Callable[[], bool] | None = None,
        poll_s: float = 0.5,
        queue_size: int = 64,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("queue_size", queue_size)):
            whole(name, value, 1)
        if not poll_s > 0:
            raise UsageError(f"poll_s is {poll_s!r}; it must be a number of seconds above 0")
        if until is not None and not follow:
            raise UsageError("until ends a stream that follows its source. Set follow=True too.")
        self._source, self._trainer = source, trainer
        self.batch_size, self.follow, self.until = batch_size, follow, until
        self.poll_s, self.queue_size = poll_s, queue_size

    @property
    def skipped_lines(self) -> int:
        """The number of broken records that were skipped in this process."""
        return self._source.skipped_lines

    def __iter__(self) -> Iterator[Batch]:
        trainer, name = self._trainer(), self._source.name
        former = trainer.streams.get(name)
        if former is not None:
            self._end(former)
        made = StreamPass(self, self._source, trainer)
        trainer.streams[name] = Reading(self._source, weakref.ref(made))
        return made

    def _end(self, former: Reading) -> None:
        """End the former pass. Raises UsageError if it read another source of this name, or is still
        in use.
        """
        name, current = self._source.name, former.by()
        if former.source != self._source:
            raise UsageError(
                f"Two sources have the name {name!r}, so servers cannot distinguish their records. Give one "
                "of them another name=."
            )
        if current is not None and current.stream is self:
            current.close()
        elif current is not None and not current.over:
            raise UsageError(f"Another loop reads the stream {name!r}. End that loop first.")


class _Idle(Enum):
    """Marks a source without new records."""

    IDLE = 0


Item = Batch | Literal[_Idle.IDLE]


class StreamPass(Iterator[Batch]):
    """One pass, with a thread that reads ahead. The thread ends with the pass."""

    def __init__(self, stream: Stream, source: Source, trainer: Trainer) -> None:
        self.stream, self._trainer = stream, trainer
        self._waiting = 0
        """Batches that were drawn and not yet given out."""
        self._ended = False
        reader = _Reader(stream, source, trainer)
        self._queue = reader.queue
        self._pieces = reader.pieces
        self._last: list[Records] = []
        self._reader = reader
        self.close = weakref.finalize(self, _leave, reader, trainer, self._last)
        reader.start()

    def __next__(self) -> Batch:
        batch = self.draw()
        self.give(batch)
        return batch

    @property
    def at_hand(self) -> bool:
        """True if the next batch is available."""
        return isinstance(self._queue.peek(), Batch)

    @property
    def over(self) -> bool:
        """True if the pass has given out all batches, or was closed."""
        return not self.close.alive or (self._ended and not self._waiting)

    def draw(self) -> Batch:
        """Return the next batch, before its turn. Raises StopIteration at the end, and errors of the
        source.
        """
        self._ended = True  # unless another batch follows
        item = self._queue.get()
        if item is _Idle.IDLE:
            with progress.activity("waiting for new records"):
                while item is _Idle.IDLE:
                    self._trainer.flush()
                    progress.heartbeat()
                    item = self._queue.get()
        if item is None:
            self._reader.close()  # drawn batches may still be given out
            raise StopIteration
        self._ended = False
        self._waiting += 1
        return item

    def give(self, batch: Batch) -> None:
        """Give out a drawn batch, because its turn has come."""
        assert batch.records is not None
        self._waiting -= 1
        self._trainer.give(batch.records, self._pieces.pop(batch.records[1:3], None))
        self._last[:] = [batch.records]


def _leave(reader: _Reader, trainer: Trainer, last: Sequence[Records]) -> None:
    """Leave a loop. Its last batch counts only if it was trained."""
    reader.close()
    for records in last:
        trainer.forget(records)


class _Reader:
    """The thread of a pass.

    `pieces` maps shard and start of a batch to the servers that have it. Batches that are new to all servers
    are absent.
    """

    def __init__(self, stream: Stream, source: Source, trainer: Trainer) -> None:
        self._stream, self._source, self._trainer = stream, source, trainer
        self._have = of_servers(trainer.positions(source.name))
        self._rank, self._trainers = trainer.place
        self._stop = threading.Event()
        self._found = False
        self._firsts: dict[str, int] = {}
        """The start of each shard when it was first seen."""
        self._left_out: set[tuple[str, int]] = set()
        self._passed: dict[str, tuple[int, int, tuple[bool, ...]]] = {}
        """By shard: positions without a record behind the last batch, and the servers that have them."""
        self.pieces: dict[tuple[str, int], tuple[bool, ...]] = {}
        self.queue: HandOver[Item] = HandOver(stream.queue_size, producers=1)
        self._thread = threading.Thread(target=self._run, name="reader-of-stream", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop reading, and wait for the thread."""
        self._stop.set()
        self.queue.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        stream = self._stream
        with self.queue.producer():
            going = self._look(grows=stream.follow, started=True)
            last = False
            while going and not last:
                last = not stream.follow or (stream.until is not None and stream.until())
                self._found = False
                going = self._look(grows=not last, started=False)
                if going and not last and not self._found:
                    going = self._idle()

    def _idle(self) -> bool:
        """Wait for new records. Return False if this process must stop."""
        if self._trainer.interrupted:
            return False
        if self.queue.peek() is None:
            self.queue.put(_Idle.IDLE, 0)
        return not self._stop.wait(self._stream.poll_s)

    def _look(self, *, grows: bool, started: bool) -> bool:
        """Read the available records as soon as possible. Return False if this process must stop before."""
        reported = -_REPORT_S
        while not self._stop.is_set():
            try:
                self._read_all(grows=grows, started=started)
                return not self._stop.is_set()
            except UnavailableError as problem:
                if time.monotonic() - reported >= _REPORT_S:
                    reported = time.monotonic()
                    glog(f"the stream {self._source.name!r} waits: {problem}")
            if not self._idle():
                return False
        return False

    def _read_all(self, *, grows: bool, started: bool) -> None:
        """Read the available records of this trainer.

        With `started`, read only records that some servers have, before all others. In sync training, servers
        may be one step apart, and that step must be made first.
        """
        shards = self._source.shards()
        if started:
            partly = {shard for shard, servers in self._have.items() if len(servers) > 1}
            if vanished := sorted(partly.difference(shards)):
                raise DataError(
                    f"{vanished[0]!r} of the stream {self._source.name!r} no longer exists, but some servers "
                    "have more of its records than others. Restore the file until all servers have the same "
                    "records."
                )
            shards = [shard for shard in shards if shard in partly]
        for split in self._source.splits(shards, self._rank, self._trainers):
            servers = self._have.setdefault(split.shard, [Intervals()])
            self._check(split, servers)
            for piece in list(missing(servers, split.start, split.stop)):
                if any(piece.on) or not started:
                    self._read(split, piece, servers, grows=grows and piece.stop == split.size)
                if self._stop.is_set():
                    return

    def _check(self, split: Split, servers: Sequence[Intervals]) -> None:
        read = max((each.ends[-1] for each in servers if each.ends), default=0)
        if read > split.size:
            raise DataError(
                f"{split.shard!r} of the stream {self._source.name!r} ends at {split.size}, but was read up "
                f"to {read}. It was cut short or replaced, so its positions are no longer valid. Use "
                "another name for new data."
            )
        first = self._firsts.setdefault(split.shard, split.first)
        start = min([first, *(each.ends[0] for each in servers if each.ends)])
        for piece in missing(servers, start, split.first) if start < split.first else ():
            what = (
                f"records [{piece.start}, {piece.stop}) of {split.shard!r} in the stream "
                f"{self._source.name!r} were deleted before all servers had them"
            )
            if not split.leaves_out:
                raise DataError(
                    f"{what}, and the shard now starts at {split.first}. To skip these records, set "
                    'config={"auto.offset.reset": "earliest"}.'
                )
            if (split.shard, piece.stop) not in self._left_out:
                self._left_out.add((split.shard, piece.stop))
                glog(f"{what}. The stream skips them.")

    def _read(self, split: Split, piece: Piece, servers: Sequence[Intervals], *, grows: bool) -> None:
        delivered = at = piece.start
        passed = self._passed.pop(split.shard, None)
        if passed is not None and passed[1:] == (piece.start, piece.on):
            delivered = passed[0]
        batches = self._source.read(
            split.shard, piece.start, piece.stop, self._stream.batch_size, grows=grows
        )
        try:
            for batch, behind in batches:
                if batch is not None:
                    records = Records(self._source.name, split.shard, delivered, behind)
                    if any(piece.on):
                        self.pieces[split.shard, delivered] = piece.on
                    self._found = True
                    if not self.queue.put(replace(batch, records=records)):
                        return
                    delivered = behind
                at = behind
        finally:  # also after the source became unavailable
            if delivered < at:
                self._passed[split.shard] = delivered, at, piece.on
            for each in servers if at > piece.start else ():
                each.add(piece.start, at)
