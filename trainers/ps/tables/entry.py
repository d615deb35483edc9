"""Entry filters: which keys get a row. Knows keys and counts; leaves the rows to the table."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainers.ps.kernels.initial import UNIFORM, Fresh
from trainers.ps.kernels.seen import count_up, drawn, remove_keys
from trainers.ps.tables.spec import EntryKind, RowOptions
from trainers.ps.tables.storage import Storage

Keys = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Filter(Protocol):
    """Asked about keys that have no row. `pulled`: to be read in training; `pushed`: to be updated."""

    def pulled(self, keys: Keys) -> Mask | None: ...

    def pushed(self, keys: Keys) -> Mask | None: ...


class Everyone:
    """None stands for all: nobody needs a mask of ones."""

    def pulled(self, keys: Keys) -> Mask | None:
        return None

    def pushed(self, keys: Keys) -> Mask | None:
        return None


class Lottery:
    """A key is admitted or not for good, by a pure function of seed and key."""

    def __init__(self, chance: float, seed: int) -> None:
        self._chance, self._seed = float(chance), np.uint64(seed)

    def pulled(self, keys: Keys) -> Mask | None:
        admitted = np.empty(len(keys), np.bool_)
        drawn(keys, self._seed, self._chance, admitted)
        return admitted

    def pushed(self, keys: Keys) -> Mask | None:
        return self.pulled(keys)


class Candidates:
    """A key is admitted when it was pulled in training `needed` times; until then it is counted here, at
    about 30 bytes. A push admits nobody.
    """

    def __init__(self, needed: float) -> None:
        self._needed = np.float32(needed)
        self._storage = Storage(1, 0, 0)

    def __len__(self) -> int:
        return len(self._storage)

    def pulled(self, keys: Keys) -> Mask | None:
        admitted = np.empty(len(keys), np.bool_)
        slots = self._storage.insert(keys, _NOTHING)  # before `rows`: it may grow
        count_up(self._storage.rows, slots, self._needed, admitted)
        if admitted.any():
            remove_keys(self._storage.index, self._storage.rows, keys[admitted])
        return admitted

    def pushed(self, keys: Keys) -> Mask | None:
        return np.zeros(len(keys), np.bool_)

    def counts(self) -> tuple[Keys, NDArray[np.float32]]:
        """The candidates (n,) int64 and how often each was pulled, (n,) float32: copies."""
        rows, size, stride = self._storage.rows, len(self), self._storage.stride
        keys = rows.words[: size * stride : stride].copy()
        return keys, rows.floats[2 : 2 + 2 * size * stride : 2 * stride].copy()

    def load(self, keys: Keys, counts: NDArray[np.float32]) -> None:
        """Candidates and their counts, as `counts` gave them."""
        slots = self._storage.insert(keys, _NOTHING)
        self._storage.rows.floats[slots * (2 * self._storage.stride) + 2] = counts


_NOTHING = Fresh(UNIFORM, np.float32(0), np.float32(0), np.uint64(0), np.float32(0))


def filter_of(options: RowOptions) -> Filter:
    match options.entry.kind:
        case EntryKind.PROBABILITY:
            return Lottery(options.entry.a, options.init.seed)
        case EntryKind.COUNT:
            return Candidates(options.entry.a)
        case _:
            return Everyone()
