"""Keep rows of a bounded table in a file on a local disk if memory has no room for them. Rows come back when
they are used.

The file is a ring of records in the format of `Storage`. Rows are written one after another and never
changed. A row that comes back leaves its record behind. Once half of the records are abandoned, the oldest
used records are written again at the end, and their place is returned to the file system. Writing is
therefore sequential, but reading is not. Memory holds the key and the place of each row (28 bytes).

A server that is killed loses the file with its memory, and recovers both from its saved state (see
`durable`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trainers.errors import UsageError
from trainers.kernels.compiled import Floats, Keys, Mask
from trainers.process.log import glog
from trainers.ps.kernels.eviction import EVICTED, FLOORS, REMOVAL, evicted_slots, find_evicted
from trainers.ps.kernels.rows import (
    VALUES,
    pull,
    read_records,
    remove_keys,
    settle_flags,
)
from trainers.ps.tables.budget import Budget
from trainers.ps.tables.removal import BoundedRows, all_will_change
from trainers.ps.tables.spec import FullError, TableError
from trainers.ps.tables.storage import (
    NOTHING_NEW,
    Cut,
    SparseCut,
    SparseRows,
    Storage,
    keys_of,
    split_records,
)

FilePlaces = NDArray[np.uint32]
"""The numbers of records in the file."""

_PLACE, _PAGE = 4, 4096  # bytes
_UNREADABLE = "rows in disk_dir can no longer be read"
_LONGEST = 1 << 43
"""The bytes of the largest file, most of which are returned to the file system. It is less than the limit of
any file system.
"""
_SPARE = 65_536
_AT_ONCE = 4096
"""The number of abandoned records before any is returned, and the number of records that are then examined
together.
"""
_FALLOC_FL_PUNCH_HOLE, _FALLOC_FL_KEEP_SIZE = 2, 1
_COMPLAIN_S = 60.0

_libc = ctypes.CDLL(None, use_errno=True)


def checked_folder(path: str) -> Path:
    """Return the directory. Raises UsageError if files cannot be made there, or if their beginning cannot be
    freed.
    """
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            os.posix_fallocate(file.fileno(), 0, 2 * _PAGE)
            _give_back(file.fileno(), 0, _PAGE)
    except OSError as error:
        raise UsageError(
            f"ps_configs disk_dir is {path!r}: {error.strerror}. Use a directory on a local disk of each "
            "server's node. Its file system must support punching holes (ext4, xfs, btrfs)"
        ) from error
    return Path(path)


def _give_back(file: int, start: int, size: int) -> None:
    """Return bytes of a file to the file system. Afterwards they read as zeros."""
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if _libc.fallocate(file, mode, ctypes.c_int64(start), ctypes.c_int64(size)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class RowsOnDisk(BoundedRows):
    """Rows that a budget evicts from a storage to a file in `folder`.

    A key has its row either on disk or in memory.
    """

    def __init__(self, storage: Storage, budget: Budget, folder: Path) -> None:
        super().__init__(storage, budget, lambda keys: None)
        self.most = (budget.bound.rows or budget.bound.bytes) // self.row_cost
        """The most rows in memory."""
        self._size = _PLACE * storage.stride
        self._ring = min(1 << 32, _LONGEST // self._size)
        """The number of places in the file. Record number n is at place n modulo this number."""
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (as long as the table)
        weakref.finalize(self, self._file.close)
        self._head = self._tail = 0
        self.places = Storage(1, 0, 0)
        """The place of each key, in the bits of a float."""
        self._cut: Cut | None = None
        self._complained = -_COMPLAIN_S

    @property
    def away(self) -> int:
        """The number of rows on disk."""
        return len(self.places)

    def _leave(self, before: int, work: int) -> tuple[int, int]:
        """Move evicted rows to the disk if the disk has room. See BoundedRows."""
        storage, found = self._storage, np.empty(min(work // REMOVAL + 1, before), np.int64)
        then, count = evicted_slots(storage.rows, storage.uses, before, work, found)
        records = storage.records(0, before)[found[:count]]
        evicted = keys_of(records)
        try:
            self._set(evicted, self._write(records))
        except OSError as error:
            self._complain(error.strerror)
            return before, 0
        except FullError as error:
            remove_keys(*self.places.arrays, evicted)
            self._complain(error)
            return before, 0
        remove_keys(*storage.arrays, evicted)
        self._clean(4 * count)
        return then, count

    def before_use(self, keys: Keys) -> None:
        """Bring the rows of these keys into memory. Coming from the disk counts as a use.

        Raises FullError if memory is full, or OSError if the disk cannot be read. The rows then stay where
        they are.
        """
        storage, (here, places) = self._storage, self._look_up(keys)
        if not here.any():
            return
        mine, first = np.unique(keys[here], return_index=True)
        records = self._read(places[here][first], mine)
        try:
            slots = storage.insert(mine, NOTHING_NEW)
        except FullError:
            remove_keys(*storage.arrays, mine)
            raise
        storage.records(0, len(storage))[slots, VALUES:] = records[:, VALUES:]
        remove_keys(*self.places.arrays, mine)
        self._count(mine)

    def look(self, keys: Keys) -> list[tuple[int, Floats]]:
        """Return the place and the record (1, stride) of each key whose row is on disk."""
        here, places = self._look_up(keys)
        some = np.flatnonzero(here)
        records = self._read(places[some], keys[some])
        return [(place, records[number : number + 1]) for number, place in enumerate(some.tolist())]

    def uncount(self, keys: Keys) -> None:
        """Stop counting these rows. See BoundedRows."""
        self.before_use(keys)
        super().uncount(keys)

    def count_loaded(self, slots: Keys) -> None:
        """Count loaded rows. See BoundedRows. Rows below a floor leave for the disk immediately."""
        super().count_loaded(slots)
        self.begin_sweep()
        self._unswept, _ = self._leave(len(self), (1 + REMOVAL) * len(slots))

    def restart(self, units: float) -> None:
        """Restart the clock. See BoundedRows. The records on disk keep their stamps, see `_read`."""
        super().restart(units)
        for _ in all_will_change(self.places):
            pass

    def cut(self, memory: Cut, row_states: int, changed: int, mark: int) -> TieredCut:
        """Return a cut with the rows on disk after the rows in memory. Close the cut of memory on failure."""

        def ended(saved: bool) -> None:
            settle_flags(self.places.rows.flags[: len(self.places)], mark if saved else 0)
            self.places.end_cut()
            self._cut = None

        try:
            self._cut = Cut(self.places, 0, 0, 0, changed, np.empty(0, np.int64), ended)
        except (TableError, MemoryError):
            memory.close(saved=False)
            raise
        return TieredCut(self._storage, memory, self._cut, self._read, row_states)

    def _set(self, keys: Keys, places: FilePlaces) -> None:
        slots = self.places.insert(keys, NOTHING_NEW)  # before `column`, because this may grow the storage
        self.places.column(0).view(np.uint32)[slots] = places

    def _read(self, places: FilePlaces, keys: Keys) -> Floats:
        """Return the records (n, stride) at these places, which belong to these keys.

        This may run in any thread, because places are not returned while there is a cut.
        """
        records = np.empty((len(places), self._storage.stride), np.float32)
        order, target = np.argsort(places, kind="stable"), records.ctypes.data
        done = read_records(self._file.fileno(), places.astype(np.int64), order, self._size, target)
        if done < len(order) or not np.array_equal(keys_of(records), keys):
            raise OSError(_UNREADABLE)
        stamps, evicted = records[:, -1].copy(), np.empty(len(keys), np.bool_)
        find_evicted(keys, stamps, self.budget.uses.clock[FLOORS:], evicted)
        # Such a stamp is from before the clock restarted, because all rows here are below the floor.
        records[~evicted, -1] = EVICTED
        return records

    def _write(self, records: Floats) -> FilePlaces:
        """Write records after the last ones, and return their places."""
        count, start = len(records), self._tail % self._ring
        if self._tail + count - self._head > self._ring:
            raise OSError(errno.EFBIG, "the file is full")
        before_end = min(count, self._ring - start)
        for some, place in ((records[:before_end], start), (records[before_end:], 0)):
            content = some.reshape(-1).data.cast("B") if len(some) else memoryview(b"")
            at = place * self._size
            while len(content):
                written = os.pwrite(self._file.fileno(), content, at)
                content, at = content[written:], at + written
        self._tail += count
        return ((start + np.arange(count)) % self._ring).astype(np.uint32)

    def _clean(self, records: int) -> None:
        """If most records are abandoned, examine so many of the oldest, and write the used ones again."""
        while records > 0 and self._cut is None and self._tail - self._head > 2 * self.away + _SPARE:
            start = self._head % self._ring
            count = min(records, _AT_ONCE, self._tail - self._head, self._ring - start)
            looked = np.empty((count, self._storage.stride), np.float32)
            places, target = np.arange(start, start + count), looked.ctypes.data
            if read_records(self._file.fileno(), places, places - start, self._size, target) < count:
                raise OSError(_UNREADABLE)
            if not self._write_again(looked, places):
                return
            self._head += count
            first, last = start * self._size // _PAGE, (start + count) * self._size // _PAGE
            if last > first:  # the kernel refuses an empty range
                _give_back(self._file.fileno(), _PAGE * first, _PAGE * (last - first))
            records -= count

    def _write_again(self, records: Floats, places: Keys) -> bool:
        """Write the used records again. Return False if the disk is full."""
        keys = keys_of(records)
        used, current = self._look_up(keys)
        used &= current == places
        try:
            again = self._write(records[used])
        except OSError as error:
            self._complain(error.strerror)
            return False
        self._set(keys[used], again)
        return True

    def _look_up(self, keys: Keys) -> tuple[Mask, FilePlaces]:
        """Return a mask of the keys that are here, and their places."""
        storage, here = self.places, np.ones(len(keys), np.bool_)
        found, missing = np.zeros((len(keys), 1), np.float32), np.empty(len(keys), np.int64)
        here[missing[: pull(*storage.arrays, keys, found, missing)]] = False
        return here, found[:, 0].view(np.uint32)

    def _complain(self, why: object) -> None:
        if time.monotonic() - self._complained >= _COMPLAIN_S:
            self._complained = time.monotonic()
            glog(f"Rows cannot move to disk_dir ({why}), so they stay in memory.")


class TieredCut(SparseCut):
    """A cut of a table with rows in memory and on disk. Slots on disk come after slots in memory."""

    def __init__(
        self,
        storage: Storage,
        memory: Cut,
        disk: Cut,
        read: Callable[[FilePlaces, Keys], Floats],
        row_states: int,
    ) -> None:
        self._storage, self._memory, self._disk = storage, memory, disk
        self._read, self._row_states = read, row_states
        self.rows, self.step, self.removed = memory.rows + disk.rows, memory.step, memory.removed

    def read(self, start: int, stop: int) -> SparseRows:
        """Read slots. See Cut.read."""
        border = self._memory.rows
        if stop <= border:
            return self._memory.read(start, stop)
        places = self._disk.read(max(start, border) - border, stop - border)
        keys = places.keys.numpy()
        records = self._read(places.values.numpy()[:, 0].view(np.uint32), keys)
        on_disk = split_records(self._storage, records, self._row_states)
        return on_disk if start >= border else _joined(self._memory.read(start, border), on_disk)

    def close(self, *, saved: bool = True) -> None:
        """Close both cuts. See Cut.close."""
        self._memory.close(saved=saved)
        self._disk.close(saved=saved)


def _joined(one: SparseRows, other: SparseRows) -> SparseRows:
    assert one.statistics is not None
    assert other.statistics is not None
    return SparseRows(
        torch.cat([one.keys, other.keys]),
        torch.cat([one.values, other.values]),
        tuple(torch.cat(pair) for pair in zip(one.state, other.state, strict=True)),
        torch.cat([one.statistics, other.statistics]),
    )
