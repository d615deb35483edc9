"""Save the state that a server leaves for its next process, and continue with other trainers.

The state is members, step and pending pushes, in snapshots and a write-ahead log as the job's settings
require. `durable` handles the files.

    blob   I length of the JSON | JSON | for each message: I frames | length, bytes of each frame

The length of a frame is an I. From 4 GB on, it is an I of ones and a Q. A server must be able to store every
request that it acknowledged, so messages here and in the write-ahead log may exceed the limits of sent
messages.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from fleetrun.aliases import Callback, Document
from trainers.process.log import glog
from trainers.ps.configs import PsConfigs
from trainers.ps.durable.durable import DurableFolder
from trainers.ps.durable.journal import DurabilityError, FolderError, Fsync, JournalFullError
from trainers.ps.kernels.eviction import TOTAL
from trainers.ps.server.members import Member, Members, Refusal, SequenceSet
from trainers.ps.server.positions import Positions
from trainers.ps.server.pushes import Gradient, StepPushes
from trainers.ps.server.service import Service
from trainers.ps.server.steps import Steps, SyncSteps
from trainers.ps.server.store import Overlay, Store
from trainers.ps.tables.run import Spans
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import FullError, torch_memory
from trainers.ps.wire import (
    Buffer,
    Code,
    Field,
    Kind,
    Message,
    Part,
    WireError,
    decode,
    encode,
    route_of,
    text_part,
)

# ---- Convert members, step and pending pushes to bytes and back.

_LENGTH = struct.Struct("<I")
_LONG = struct.Struct("<IQ")
_LONG_FROM = 0xFFFFFFFF
_VERSION = 3
_SUMMARY_EVERY = 1024
"""The number of records of a write-ahead log from one summary of the tables to the next."""
_PLAIN = ("rank", "incarnation", "restart_count", "step", "resumed", "barrier", "finished", "left")


class StateError(ValueError):
    """An error for bytes that are not a state of this version."""


def dump_state(members: Members, store: Store, steps: Steps) -> bytes:
    """Return everything that `restore_state` needs."""
    header = {
        "version": _VERSION,
        "ready": store.ready,
        "skipped": store.skipped,
        "step": steps.step,
        "tables": {number: table.spec.name for number, table in store.tables.items()},
        "start": members.start,
        "positions": members.positions.dump(),
        "members": [_dump_member(member) for member in members],
    }
    text = json.dumps(header).encode()
    messages = _dump_sync(steps) if isinstance(steps, SyncSteps) else []
    pieces: list[Buffer] = [_LENGTH.pack(len(text)), text]
    for message in messages:
        frames = encode(message, stored=True)
        pieces.append(_LENGTH.pack(len(frames)))
        for frame in frames:
            pieces += [_packed_length(len(frame)), frame]
    return b"".join(pieces)


def table_names(blob: bytes) -> dict[int, str]:
    """Return the name of each table by its number. Raises StateError."""
    return {int(number): str(name) for number, name in _header(blob)["tables"].items()}


def restore_state(blob: bytes, members: Members, store: Store, steps: Steps) -> None:
    """Restore the result of `dump_state`. Tables are loaded separately. Raises StateError."""
    header = _header(blob)
    try:
        members.restore([_load_member(each) for each in header["members"]], header["start"])
        members.positions = Positions.load(header["positions"])
        store.ready, store.skipped, steps.step = header["ready"], header["skipped"], header["step"]
        (length,) = _LENGTH.unpack_from(blob)
        messages = list(_unpacked(blob[_LENGTH.size + length :]))
        if isinstance(steps, SyncSteps):
            before, *pending = messages
            gradients = _gradients(before.parts)
            steps.before = Overlay(
                {each.table: each.values for each in gradients if each.keys is None},
                [each for each in gradients if each.keys is not None],
            )
            steps.pushes = StepPushes()
            for message in pending:
                overflowed = message.code is Code.NOT_FINITE
                steps.pushes.add(message.rank, None if overflowed else _gradients(message.parts))
    except (struct.error, KeyError, TypeError, ValueError, WireError) as error:
        raise StateError(f"the state cannot be read: {error!r}") from error


def _header(blob: bytes) -> Document:
    try:
        (length,) = _LENGTH.unpack_from(blob)
        header: Document = json.loads(blob[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, ValueError) as error:
        raise StateError(f"the state cannot be read: {error!r}") from error
    if header.get("version") != _VERSION:
        raise StateError(f"the state has version {header.get('version')}; this fleetrun reads {_VERSION}")
    return header


def _dump_member(member: Member) -> Document:
    plain = {name: getattr(member, name) for name in _PLAIN}
    return {**plain, "applied": _dump_numbers(member.applied), "counted": _dump_numbers(member.counted)}


def _dump_numbers(applied: SequenceSet) -> list[object]:
    return [applied.floor, sorted(applied.numbers)]


def _load_numbers(content: list[Any]) -> SequenceSet:
    floor, numbers = content
    return SequenceSet(set(numbers), floor)


def _load_member(content: Document) -> Member:
    plain = {name: content[name] for name in _PLAIN if name != "rank"}
    rank, incarnation = content["rank"], content["incarnation"]
    return dataclasses.replace(
        Member(rank, b"" if incarnation is None else route_of(f"trainer {rank}", incarnation)),
        applied=_load_numbers(content["applied"]),
        counted=_load_numbers(content["counted"]),
        **plain,
    )


def _dump_sync(steps: SyncSteps) -> list[Message]:
    """Return the values before the last step, followed by each pending push."""
    before = [Part(table, Field.VALUES, values) for table, values in steps.before.dense.items()]
    for each in steps.before.rows:
        before += _parts(each)
    pending = [
        Message(
            kind=Kind.PUSH,
            rank=rank,
            code=Code.NOT_FINITE if rank in steps.pushes.overflowed else Code.NONE,
            parts=tuple(part for each in push for part in _parts(each)),
        )
        for rank, push in steps.pushes.by_rank.items()
    ]
    return [Message(kind=Kind.DATA, parts=tuple(before)), *pending]


def _parts(gradient: Gradient) -> list[Part]:
    if gradient.keys is None:
        field = Field.WRITTEN if gradient.written else Field.VALUES
        return [Part(each.table, field, each.values, each.lr) for each in gradient.blocks()]
    spans = gradient.spans
    parts = [
        *([] if spans is None else [Part(gradient.table, Field.SPANS, torch.from_numpy(spans))]),
        Part(gradient.table, Field.KEYS, gradient.keys),
        Part(gradient.table, Field.ROWS, gradient.values, gradient.lr),
    ]
    return parts if gradient.stats is None else [*parts, Part(gradient.table, Field.STATS, gradient.stats)]


def _gradients(parts: Sequence[Part]) -> list[Gradient]:
    """Reverse `_parts`, which makes a VALUES or WRITTEN part of each block."""
    found: list[Gradient] = []
    spans: Spans | None = None
    keys: Part | None = None
    for part in parts:
        if part.field is Field.VALUES or part.field is Field.WRITTEN:
            written = part.field is Field.WRITTEN
            found.append(Gradient(part.table, part.data, None, part.lr, written=written))
        elif part.field is Field.SPANS:
            spans = part.data.numpy()
        elif part.field is Field.KEYS:
            keys = part
        elif part.field is Field.ROWS and keys is not None:
            found.append(Gradient(part.table, part.data, keys.data, part.lr, spans=spans))
            spans = None
        elif part.field is Field.STATS and found:
            found[-1] = found[-1]._replace(stats=part.data)
    return found


def _packed_length(length: int) -> bytes:
    return _LENGTH.pack(length) if length < _LONG_FROM else _LONG.pack(_LONG_FROM, length)


def _length_at(content: bytes, at: int) -> tuple[int, int]:
    """Return a length, and the position after it."""
    (length,) = _LENGTH.unpack_from(content, at)
    if length < _LONG_FROM:
        return length, at + _LENGTH.size
    return _LONG.unpack_from(content, at)[1], at + _LONG.size


def _unpacked(content: bytes) -> Iterator[Message]:
    at = 0
    while at < len(content):
        count, at = _length_at(content, at)
        frames = []
        for _ in range(count):
            length, at = _length_at(content, at)
            frames.append(content[at : at + length])
            at += length
        yield decode(frames, stored=True)


# ---- Continue the job with other trainers.
#
# A server that kept its tables may restart in a job with more, fewer or the same number of trainers. The
# tables stay. The former trainers are forgotten, so their late messages do not count. The same number of
# trainers continues rank by rank. With another number, every trainer starts at
#
#     (steps of all former trainers that are in the tables) / (new trainers), rounded down,
#
# and a step of sync training that only some trainers had pushed is dropped.
#
# Each server counts by itself. If all servers are killed, one may have more steps in its tables than another.
# Trainers start with the smallest count, and a server ignores pushes of steps before its own.


def new_trainers_record(count: int, start: str) -> Message:
    """Return a record for the write-ahead log. From this record on, there are `count` trainers of this start
    of the job.
    """
    return Message(kind=Kind.TRAINERS, number=count, parts=(text_part(start),))


def apply_new_trainers(record: Message, members: Members, steps: Steps) -> None:
    """Replace all members by the trainers of the record."""
    count = record.number
    if count == len(members):
        members.replace([member.step for member in members], record.text)
        return
    step = sum(steps.done(member) for member in members) // count
    members.positions.take_back(steps.pending())
    steps.restart_at(step)
    members.replace([step] * count, record.text)


def summary_of(store: Store, steps: Steps) -> str:
    """Describe the tables, as a server that applies the same requests again must find them."""
    every = store.tables.values()
    free = sum(len(each) for each in every if isinstance(each, SparseTable) and each.budget is None)
    bounded = sum(int(each.uses.clock[TOTAL]) for each in store.budgets if not each.on_disk)
    updates = sum(each.step for each in every)
    return f"step {steps.step}, {updates} updates, {free} rows, and bounded rows of cost {bounded}"


class StateSaver:
    """Save the state of one server in a directory, and recover it.

    `wake` is called in another thread when a snapshot has been written.
    """

    def __init__(self, folder: Path, configs: PsConfigs, *, job: str, server: int, wake: Callback) -> None:
        fsync = cast(Fsync, configs.log_fsync) if configs.durability == "log" else None
        self._folder = folder / f"server-{server}"
        self._durable = DurableFolder(folder, job=job, server=server, fsync=fsync)
        self._interval = configs.snapshot_interval_s
        self._wake = wake
        self._due: float | None = None
        # New members must then be in a snapshot, or they are unknown after a restart.
        self._only_snapshots = fsync is None
        self._incarnations: list[int | None] = []
        self.recovered = False
        """True if there was a state to recover."""
        self._summary: Callable[[], str] = str
        self._unsummarized = 0
        self._cut_at: float | None = None
        self._snapshot_at: float | None = None

    def numbers(self) -> dict[str, float]:
        """Return the bytes of the write-ahead log, and the time of the last snapshot that this process has
        made, in seconds since the epoch.
        """
        numbers: dict[str, float] = {} if self._only_snapshots else {"log_bytes": self._durable.log_bytes}
        return numbers if self._snapshot_at is None else {**numbers, "snapshot_time": self._snapshot_at}

    def recover(
        self, service: Service, members: Members, store: Store, steps: Steps, *, trainers: int, start: str
    ) -> None:
        """Restore the service from the directory, and continue with this number of trainers of this start of
        the job.

        Raises FolderError if the directory cannot be used, or FullError if memory is too small.
        """
        self._replay(service, members, store, steps)
        self._summary = lambda: "" if store.shrinking else summary_of(store, steps)
        if self._only_snapshots and self.recovered:
            steps.lose_pushes([member.rank for member in members])
        former = len(members)
        if (former, members.start) == (trainers, start):
            return
        # Write one record, so a server that is killed here restarts either before or after it. Without a
        # write-ahead log, the next snapshot contains the new trainers, and a server that restarts earlier
        # does the same again.
        record = new_trainers_record(trainers, start)
        self._durable.append(encode(record, stored=True))
        apply_new_trainers(record, members, steps)
        if former != trainers:
            step = next(iter(members)).step
            glog(f"the job had {former} trainers and now has {trainers}. They start at step {step}")

    def _replay(self, service: Service, members: Members, store: Store, steps: Steps) -> None:
        started, records = time.monotonic(), 0
        snapshot = self._durable.snapshot
        try:
            if snapshot is not None:
                specs, names = snapshot.specs, table_names(snapshot.blob)
                store.make({number: specs[name] for number, name in names.items()})
                snapshot.load(list(store.tables.values()))
                restore_state(snapshot.blob, members, store, steps)
            for frames in self._durable.records():
                record = decode(frames, stored=True)
                if record.kind is Kind.TRAINERS:
                    apply_new_trainers(record, members, steps)
                elif record.kind is Kind.SUMMARY:
                    if record.text != (found := summary_of(store, steps)):
                        raise StateError(
                            f"after {records} records of the write-ahead log, the tables have {found}, but "
                            f"they had {record.text} when it was written"
                        )
                else:
                    service.replay(record)
                records += 1
        except (StateError, WireError, Refusal, FullError) as error:
            raise self._unusable(error) from error
        self.recovered = snapshot is not None or records > 0
        if self.recovered:
            took = time.monotonic() - started
            glog(
                f"recovered {len(store.tables)} tables at step {steps.step}: {records} records, {took:.1f} s"
            )

    def _unusable(self, error: Exception) -> Exception:
        if isinstance(error, FullError) or (isinstance(error, Refusal) and error.code is Code.NO_MEMORY):
            return FullError(f"{error}. The saved state in {self._folder} is intact.")
        return FolderError(
            f"The saved state of this server cannot be used: {error}. Remove {self._folder} to start over."
        )

    def record(self, request: Message) -> None:
        """Append a request that changes the state to the write-ahead log. After the call, the server may
        acknowledge the request. A summary precedes some pushes. All earlier records are applied then.
        Raises Refusal if the disk is full.
        """
        self._unsummarized += 1
        try:
            due = self._unsummarized > _SUMMARY_EVERY and request.kind is Kind.PUSH
            if due and (text := self._summary()):
                summary = Message(kind=Kind.SUMMARY, parts=(text_part(text),))
                self._durable.append(encode(summary, stored=True))
                self._unsummarized = 0
            self._durable.append(encode(request, stored=True))
        except JournalFullError as error:
            raise Refusal(Code.FAILED, str(error)) from error

    def update(self, members: Members, store: Store, steps: Steps, *, may_cut: bool) -> None:
        """End a snapshot that is written, and start a snapshot that is due.

        The first snapshot is due as soon as the tables have their initial values.
        """
        self._end_snapshot()
        if not store.ready or self._durable.snapshotting or not may_cut:
            return
        incarnations = [member.incarnation for member in members]
        joined = self._only_snapshots and incarnations != self._incarnations
        self._incarnations = incarnations
        if self._due is None or joined or time.monotonic() >= self._due:
            self._due, self._cut_at = time.monotonic() + self._interval, round(time.time(), 3)
            try:
                with torch_memory():
                    blob = dump_state(members, store, steps)
                    self._durable.begin_snapshot(
                        steps.step, store.tables.values(), blob, done=lambda task: self._wake()
                    )
            except (JournalFullError, FullError, MemoryError, OSError) as error:  # the old file stays in use
                self._log_failure(error)

    @property
    def busy(self) -> bool:
        """True while a snapshot reads the tables."""
        return self._durable.snapshotting

    def close(self, *, over: bool) -> None:
        """Release the directory, or remove it when the job has ended.

        Raises DurabilityError if the last records could not be made durable. After the end of the job, they
        are not needed.
        """
        if not over:
            self._durable.close()
            return
        try:
            self._durable.discard()
        except DurabilityError as error:
            glog(f"The job has ended, but its saved state remains: {error}. Remove {self._folder}.")

    def _end_snapshot(self) -> None:
        task = self._durable.end_snapshot()
        if task is None:
            return
        try:
            task.result()
            self._snapshot_at = self._cut_at
        # SaveError, or no memory for a thread. The former snapshot and the write-ahead log still hold
        # everything.
        except RuntimeError as error:
            self._log_failure(error)

    def _log_failure(self, error: Exception) -> None:
        glog(f"A snapshot failed: {error}. The next attempt is in {self._interval:g} s.")
