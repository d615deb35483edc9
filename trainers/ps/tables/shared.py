"""Store a table for serving in two mapped files. One process writes versions, and any number of processes
read the version given to them while the next one is written. `kernels.shared` describes the layout and
explains why this is safe.

The files belong to the caller. The caller makes them (`TableFiles`) and removes files that the last version
no longer names.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetrun.frozen import frozen
from trainers.kernels.compiled import Keys, Words
from trainers.ps.kernels.rows import Fresh, initial_rows
from trainers.ps.kernels.shared import (
    HEAD,
    bury,
    find_shared,
    index_again,
    put_shared,
    remove_shared,
)
from trainers.ps.tables.spec import TableSpec
from trainers.storage.safetensors import bytes_of

_SMALLEST = 1024
_ROOM = 8
"""The address space of a file of records, as a multiple of its first rows. Only existing rows have disk
space.
"""


class TableFiles(Protocol):
    """The functions that make the files. Both raise LoadError if there is no space."""

    def make(self, size: int) -> tuple[str, NDArray[np.uint8]]:
        """Return the name and the writable bytes of a new sparse file of zeros."""
        ...

    def reserve(self, name: str, stop: int) -> None:
        """Allocate space for the bytes before `stop`. Without space, a write there would kill the process."""
        ...


@frozen(kw_only=True)
class SharedVersion:
    """The data that a reader needs. `number` is the number of the version, and `secret` is the secret of the
    hash.
    """

    spec: str
    index: str
    records: str
    number: int
    secret: Sequence[int]


def words_of(spec: TableSpec) -> int:
    """Return the number of 8-byte words for the values of a row."""
    return -(-spec.size * spec.rows.dtype.dtype.itemsize // 8)


class SharedTable:
    """The writing side of a table. `expected` is the expected number of rows."""

    def __init__(self, spec: TableSpec, expected: int, files: TableFiles) -> None:
        self.spec = spec
        self._files = files
        self._stride = HEAD + words_of(spec)
        self._secret = np.frombuffer(secrets.token_bytes(16), np.uint64).copy()
        self._index_name, self._index = self._new_index(expected)
        self._records_name, self._records = self._new_records(expected)
        self._reserved = 0
        self._entries = 0
        self.alive = 0
        """The number of rows of the last version."""
        self._free: Keys = np.empty(0, np.int64)
        self._used = 0
        self._latest = 0
        self._replaced: list[tuple[int, Keys]] = []
        self._removed: list[tuple[int, Keys]] = []

    @property
    def slots(self) -> int:
        """The number of slots used so far, for rows of any version."""
        return self._used

    def put(self, number: int, keys: Tensor, values: Tensor) -> None:
        """Write rows of this version, with keys (n,) int64 and values (n, dim).

        Raises LoadError if there is no space. Readers keep all their rows in that case.
        """
        count = len(keys)
        self._make_room(count)
        self._latest = number
        words = torch.zeros(count, words_of(self.spec), dtype=torch.int64)
        values = values.to(self.spec.rows.dtype.dtype)
        size = self.spec.size * values.element_size()
        words.view(torch.uint8)[:, :size] = bytes_of(values.contiguous()).view(count, size)
        slots, replaced = self._take(count), np.empty(count, np.int64)
        before, new, added = put_shared(
            *self._arrays(), number, keys.numpy(), words.view(-1).numpy(), slots, replaced
        )
        self._entries += new
        self.alive += added
        self._replaced.append((number, replaced[:before]))

    def remove(self, number: int, keys: Tensor) -> None:
        """Remove rows that this version does not have."""
        self._make_room(len(keys))
        self._latest = number
        slots, replaced = self._take(len(keys)), np.empty(len(keys), np.int64)
        count = remove_shared(*self._arrays(), number, keys.numpy(), slots, replaced)
        self.alive -= count
        self._free = np.concatenate([self._free, slots[count:]])
        self._replaced.append((number, replaced[:count]))
        self._removed.append((number, slots[:count]))

    def forget(self, number: int) -> None:
        """Free the rows of versions before this one. Call it when all readers have left these versions."""
        freed = [slots for version, slots in self._replaced if version <= number]
        self._replaced = [each for each in self._replaced if each[0] > number]
        for version, slots in self._removed:
            if version <= number:  # readers of the newest version may have read the entry a moment ago
                buried = np.empty(len(slots), np.int64)
                count = bury(*self._arrays(), slots, buried)
                self._replaced.append((self._latest + 1, buried[:count]))
        self._removed = [each for each in self._removed if each[0] > number]
        self._free = np.concatenate([self._free, *freed])

    def version(self, number: int) -> SharedVersion:
        first, second = (int(word) for word in self._secret)
        return SharedVersion(
            spec=self.spec.encode().hex(),
            index=self._index_name,
            records=self._records_name,
            number=number,
            secret=[first, second],
        )

    def _arrays(self) -> tuple[Words, Keys, Words, int]:
        return self._index, self._records, self._secret, self._stride

    def _take(self, count: int) -> Keys:
        """Return `count` slots that readers cannot reach. There must be enough of them."""
        again, self._free = self._free[:count], self._free[count:]
        fresh = np.arange(self._used, self._used + count - len(again))
        self._used += len(fresh)
        return np.concatenate([again, fresh])

    def _make_room(self, count: int) -> None:
        needed = self._used + count - len(self._free)
        moved = needed * self._stride > len(self._records)
        if moved or 2 * (self._entries + count) > len(self._index):
            # Renew the index with the records. Readers of the old index must not find slots that exist only
            # in the new records.
            name, index = self._new_index(self._entries + count)
            self._entries = index_again(*self._arrays(), index)
            self._index_name, self._index = name, index
        if moved:
            used = self._used * self._stride
            name, records = self._new_records(needed)
            self._files.reserve(name, 8 * used)
            records[:used] = self._records[:used]
            self._records_name, self._records, self._reserved = name, records, self._used
        if needed > self._reserved:
            slots = min(needed + needed // 16 + _SMALLEST, len(self._records) // self._stride)
            self._files.reserve(self._records_name, 8 * self._stride * slots)
            self._reserved = slots

    def _new_index(self, rows: int) -> tuple[str, Words]:
        """Make an index for at least twice the entries, and a quarter more."""
        size = 1 << max(_SMALLEST, 2 * rows + rows // 2).bit_length()
        name, content = self._files.make(8 * size)
        self._files.reserve(name, 8 * size)
        return name, content.view(np.uint64)

    def _new_records(self, rows: int) -> tuple[str, Keys]:
        name, content = self._files.make(8 * self._stride * _ROOM * (rows + _SMALLEST))
        return name, content.view(np.int64)


class SharedRows:
    """The reading side of one version.

    `mapped` returns a file's bytes. They are writable, although nothing is written, because kernels are
    compiled for writable arrays. `before` is the reader of another version, whose files are not mapped again.
    """

    def __init__(
        self,
        version: SharedVersion,
        mapped: Callable[[str], NDArray[Any]],
        before: SharedRows | None = None,
    ) -> None:
        self.spec = spec = TableSpec.decode(bytes.fromhex(version.spec))
        init = spec.rows.init
        self._fresh = Fresh(
            int(init.kind), np.float32(init.a), np.float32(init.b), np.uint64(init.seed), np.float32(0)
        )
        self._stride = HEAD + words_of(spec)
        self._version = version
        self._secret: Words = np.array(version.secret, np.uint64)
        if before is not None and before._version.index == version.index:
            self._index: Words = before._index
        else:
            self._index = mapped(version.index).view(np.uint64)
        if before is not None and before._version.records == version.records:
            self._records: Keys = before._records
        else:
            self._records = mapped(version.records).view(np.int64)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows (n, dim) of the table's type for ids (n,) int64. Ids without a row get initial
        values.
        """
        spec, dtype = self.spec, self.spec.rows.dtype.dtype
        keys, count = ids.contiguous().numpy(), len(ids)
        out = np.empty(count * (self._stride - HEAD), np.int64)
        missing = np.empty(count, np.int64)
        arrays = (self._index, self._records, self._secret, self._stride)
        lacking = missing[: find_shared(*arrays, self._version.number, keys, out, missing)]
        rows = torch.from_numpy(out).view(count, self._stride - HEAD).view(dtype)[:, : spec.size]
        if len(lacking):
            first = np.empty(len(lacking) * spec.size, np.float32)
            places = np.arange(len(lacking))
            initial_rows(self._fresh, keys[lacking], places, first, spec.size, int(spec.rows.dtype))
            rows[torch.from_numpy(lacking)] = torch.from_numpy(first).view(-1, spec.size).to(dtype)
        return rows
