"""Storage: the memory of sparse rows and of their index, and its growth. Knows arrays and kernels; leaves
what the numbers mean to the table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainers.ps.kernels.index import (
    DEEPEST,
    DEPTH,
    NEEDS_DIRECTORY,
    SEGMENT,
    SEGMENTS,
    Index,
    laid_out,
)
from trainers.ps.kernels.initial import Fresh
from trainers.ps.kernels.mixing import SECRET
from trainers.ps.kernels.rows import COUNT, Rows, insert
from trainers.ps.tables.arena import Arena, reservation
from trainers.ps.tables.errors import FullError

Keys = NDArray[np.int64]

_MOST = (1 << 32) - 2  # rows: an entry of the index has 32 bits for slot + 1
_WORD = 8
_NO_IMAGES = np.empty(0, np.int64), np.empty(0, np.uint32), np.zeros(4, np.int64)


class Storage:
    """Records of `dim` values, `states` floats of optimizer state and `statistics` floats, by key. Slots
    are numbered from 0 without gaps, in the order of insertion. `rows` and `index` are what kernels take.
    """

    rows: Rows
    index: Index
    dim: int
    statistics: int
    stride: int
    """8-byte words of a record."""

    def __init__(self, dim: int, states: int, statistics: int, reserve: int | None = None) -> None:
        reserve = reservation() if reserve is None else reserve
        self.dim, self.statistics = dim, statistics
        self.stride = 1 + (dim + states + statistics + 1) // 2
        self._records = Arena(reserve)
        self._flags = Arena(reserve // (_WORD * self.stride))
        self._entries = Arena(min(reserve, _WORD * SEGMENT << DEEPEST))
        numbers = np.array([0, self.stride, dim, states, statistics], np.int64)
        self._view_rows(numbers, *_NO_IMAGES)
        self.index = Index(
            entries=self._entries.words.view(np.uint64),
            directory=np.zeros(1, np.uint32),
            fill=np.zeros(16, np.int32),
            depths=np.zeros(16, np.int32),
            numbers=np.array([0, 1], np.int64),
            secret=SECRET,
        )

    def __len__(self) -> int:
        return int(self.rows.numbers[COUNT])

    def insert(self, keys: Keys, fresh: Fresh) -> Keys:
        """The slots of `keys`, (n,); a key without a row gets one. Raises FullError; rows made before that
        stay.
        """
        self._make_room(len(self) + len(keys))
        slots = np.empty(len(keys), np.int64)
        done = 0
        while done < len(keys):
            done, needs = insert(self.index, self.rows, fresh, keys, done, slots)
            if needs == NEEDS_DIRECTORY:
                self._double_directory()
            elif needs:
                self._more_segments()
        return slots

    def expect(self, rows: int) -> None:
        """So many rows in all are about to be there: gets memory for them in the background and, if there
        are none yet, lays out the index so that nothing needs to be split meanwhile.
        """
        rows = min(rows, _MOST)
        if not len(self):
            self.index = laid_out(self.index, rows)
            self._entries.grow(int(self.index.numbers[SEGMENTS]) * SEGMENT * _WORD)
            self.index = self.index._replace(entries=self._entries.words.view(np.uint64))
        self._make_room(rows)

    def begin_cut(self, images: NDArray[np.int64], image_of: NDArray[np.uint32]) -> None:
        """From now on rows keep their images before they change."""
        cut = np.array([1, len(self), 0, 0], np.int64)
        self._view_rows(self.rows.numbers, images, image_of, cut)

    def end_cut(self) -> None:
        """No images any more; those that there are go when nobody reads them."""
        self._view_rows(self.rows.numbers, *_NO_IMAGES)

    def give_back(self) -> None:
        """Return memory behind the last row to the system."""
        self._records.give_back(len(self) * self.stride * _WORD)
        self._flags.give_back(len(self))

    def _view_rows(
        self,
        numbers: NDArray[np.int64],
        images: NDArray[np.int64],
        image_of: NDArray[np.uint32],
        cut: NDArray[np.int64],
    ) -> None:
        self.rows = Rows(
            words=self._records.words,
            floats=self._records.words.view(np.float32),
            flags=self._flags.words.view(np.uint8),
            numbers=numbers,
            images=images,
            image_of=image_of,
            cut=cut,
        )

    def _make_room(self, rows: int) -> None:
        if rows > _MOST:
            raise FullError(f"{rows} rows; one server keeps at most {_MOST} of a table; start more servers")
        size = rows * self.stride * _WORD
        if size > self._records.size or rows > self._flags.size:
            self._records.grow(size)
            self._flags.grow(rows)
            self._view_rows(self.rows.numbers, self.rows.images, self.rows.image_of, self.rows.cut)
        self._entries.expect(int(self.index.numbers[SEGMENTS]) * SEGMENT * _WORD)
        self._records.expect(size)

    def _double_directory(self) -> None:
        depth = int(self.index.numbers[DEPTH])
        if depth == DEEPEST:
            raise FullError(f"{len(self)} rows are as many as one server can find; start more servers")
        self.index = self.index._replace(directory=np.repeat(self.index.directory, 2))
        self.index.numbers[DEPTH] = depth + 1

    def _more_segments(self) -> None:
        segments = int(self.index.numbers[SEGMENTS])
        self._entries.grow((segments + 1) * SEGMENT * _WORD)
        fill, depths = self.index.fill, self.index.depths
        if segments == len(fill):
            fill, depths = np.append(fill, np.zeros_like(fill)), np.append(depths, np.zeros_like(depths))
        entries = self._entries.words.view(np.uint64)
        self.index = self.index._replace(entries=entries, fill=fill, depths=depths)
