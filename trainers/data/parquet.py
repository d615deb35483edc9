"""Read Parquet files of a stream, with slots from columns and row groups divided among trainers.

pyarrow (`pip install 'fleetrun[parquet]'`) reads and decodes only the columns of the slots. `stream_files`
assigns files to trainers, and `stream` tracks the read positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleetrun.aliases import Texts
from trainers.data.slots import Bag, Batch, Kind, Layout, Slot, UseVar
from trainers.data.stream import Batches, Split
from trainers.data.stream_files import Folder
from trainers.errors import DataError, UsageError
from trainers.storage.folder import Where

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_CHUNK_ROWS = 16_384
"""Rows decoded at a time. Fewer rows cost more each, and more rows leave the cache."""

Values = NDArray[Any]


class ParquetFiles:
    """Columns of Parquet files, as a Source.

    Positions are rows. The row groups of a file are divided among the trainers.

    `where` is a directory, a file, or several files. A file must be complete when it appears, so write it
    under a name that starts with a dot, and rename it. `use_var` holds the slots. A slot of length 1 is a
    column of numbers, and any other slot a column of lists. Ids are whole numbers, and float32 slots accept
    any numbers. `columns` maps a slot to its column, if the names differ. `name` is the name of the stream on
    the servers, by default the path. Keep the name as long as each record must count once.
    """

    skipped_lines = 0
    """Always 0, because a value that does not fit its slot is an error."""

    def __init__(
        self,
        where: Where | Sequence[Where],
        *,
        use_var: UseVar,
        columns: Texts | None = None,
        name: str = "",
    ) -> None:
        try:
            import pyarrow.parquet as pq
        except ImportError as error:
            raise UsageError(
                "ParquetFiles needs pyarrow, which is not installed. Run: pip install 'fleetrun[parquet]'"
            ) from error
        self._parquet = pq
        self._folder = Folder(where)
        self._layout = Layout.of(use_var)
        names = {slot.name for slot in self._layout.slots}
        if unknown := sorted(set(columns or {}) - names):
            raise UsageError(
                f"columns contains {unknown[0]!r}, which is not one of the slots {sorted(names)}"
            )
        self._columns = {slot.name: (columns or {}).get(slot.name, slot.name) for slot in self._layout.slots}
        self.name = name or self._folder.name
        self._starts: dict[str, list[int]] = {}
        """By file: the first rows of row groups, and the total number of rows."""
        self._open: tuple[str, pq.ParquetFile] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParquetFiles) and self._folder == other._folder

    def shards(self) -> list[str]:
        return self._folder.names()

    def splits(self, shards: Sequence[str], rank: int, trainers: int) -> Iterator[Split]:
        for name in shards:
            try:
                starts = self._starts.get(name) or self._look(name)
            except FileNotFoundError:
                continue  # it has just been removed
            first = self._folder.number(name)
            for number, (start, stop) in enumerate(pairwise(starts)):
                if (first + number) % trainers == rank:
                    yield Split(name, start, stop, starts[-1])

    def read(self, shard: str, start: int, stop: int, rows: int, *, grows: bool) -> Batches:
        starts = self._starts[shard]
        group = bisect_right(starts, start) - 1
        at, chunk = starts[group], -(-_CHUNK_ROWS // rows) * rows
        path = self._folder.path(shard)
        wanted = list(dict.fromkeys(self._columns.values()))
        try:
            if (found_rows := self._file(shard).metadata.num_rows) != starts[-1]:
                raise DataError(
                    f"{path} now has {found_rows} rows, but had {starts[-1]}. It was replaced, so its "
                    "positions are no longer valid. Use new names for new files."
                )
            for found in self._file(shard).iter_batches(
                batch_size=chunk, row_groups=[group], columns=wanted, use_threads=False
            ):
                low, high = max(start - at, 0), min(stop - at, len(found))
                if low < high:
                    columns = _Chunk(self._layout, self._columns, found, f"{path}, row group {group}")
                    for first in range(low, high, rows):
                        behind = min(first + rows, high)
                        yield columns.batch(first, behind), at + behind
                at += len(found)
                if at >= stop:
                    return
            raise DataError(f"{path} became shorter: it had {starts[-1]} rows, and now has {at}")
        except (OSError, ValueError) as problem:  # ArrowInvalid is a ValueError
            raise DataError(f"{path} cannot be read: {problem}") from problem

    def _file(self, name: str) -> pq.ParquetFile:
        if self._open is None or self._open[0] != name:
            path = self._folder.path(name)
            try:
                self._open = name, self._parquet.ParquetFile(path)
            except FileNotFoundError:
                raise
            except (OSError, ValueError) as problem:
                raise DataError(
                    f"{path} is not a complete Parquet file: {problem}. Start the name of an incomplete "
                    "file with a dot or an underscore."
                ) from problem
        return self._open[1]

    def _look(self, name: str) -> list[int]:
        """Return the starts of a file's row groups.

        Raises DataError if a column is missing, or if its type does not fit its slot.
        """
        file, path = self._file(name), self._folder.path(name)
        schema = file.schema_arrow
        if twice := {column for column in self._columns.values() if schema.names.count(column) > 1}:
            raise DataError(f"{path} has several columns {min(twice)!r}. Rename all but one.")
        for slot in self._layout.slots:
            column = self._columns[slot.name]
            if column not in schema.names:
                raise DataError(f"{path} has no column {column!r}; it has {', '.join(schema.names)}")
            _check_type(slot, schema.field(column).type, f"column {column!r} of {path}")
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        self._starts[name] = [0, *np.cumsum(sizes).tolist()]
        return self._starts[name]


def _check_type(slot: Slot, found: pa.DataType, where: str) -> None:
    import pyarrow.types as types

    lists = types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found)
    inner = found.value_type if lists else found
    whole = types.is_integer(inner)
    floats = slot.kind in (Kind.DENSE, Kind.WEIGHTS)
    good = whole or (types.is_floating(inner) and floats)
    if lists is (slot.length == 1) or not good:
        numbers = "numbers" if floats else "whole numbers"
        wanted = numbers if slot.length == 1 else f"lists of {numbers}"
        raise DataError(f"{where} has the type {found}, but slot {slot.name!r} needs {wanted}")


class _Chunk:
    """Some decoded rows of a row group.

    `fixed` has the matrix (n, width) of each kind of fixed length. `any` has the values and offsets of each
    slot of any length.
    """

    def __init__(self, layout: Layout, columns: Texts, found: pa.RecordBatch, where: str) -> None:
        self._layout = layout
        self._fixed: dict[Kind, Values] = {
            Kind.DENSE: np.empty((len(found), layout.widths[Kind.DENSE]), dtype=np.float32),
            Kind.IDS: np.empty((len(found), layout.widths[Kind.IDS]), dtype=np.int64),
        }
        self._any: dict[Kind, list[tuple[Values, Values]]] = {Kind.BAG: [], Kind.WEIGHTS: []}
        for slot in layout.slots:
            column = columns[slot.name]
            self._take(slot, found.column(column), f"column {column!r} of {where}")

    def _take(self, slot: Slot, found: pa.Array, where: str) -> None:
        import pyarrow.types as types

        if found.null_count:
            raise DataError(f"{where} has {found.null_count} nulls, but slot {slot.name!r} needs values")
        place = self._layout.places[slot.name]
        if slot.length == 1:
            self._fixed[place.kind][:, place.start] = _numbers(found, where)
            return
        if types.is_fixed_size_list(found.type):
            offsets = np.arange(len(found) + 1) * found.type.list_size
        else:
            offsets = found.offsets.to_numpy().astype(np.int64)
            offsets -= offsets[0]
        values = _numbers(found.flatten(), where)
        if slot.length is None:
            dtype = np.int64 if slot.kind is Kind.BAG else np.float32
            self._any[place.kind].append((values.astype(dtype, copy=False), offsets))
            return
        if len(wrong := np.flatnonzero(np.diff(offsets) != slot.length)):
            count = int(offsets[wrong[0] + 1] - offsets[wrong[0]])
            raise DataError(
                f"{where} has a list of {count} values, but slot {slot.name!r} has length {slot.length}"
            )
        self._fixed[place.kind][:, place.start : place.stop] = values.reshape(-1, slot.length)

    def batch(self, start: int, stop: int) -> Batch:
        dense, ids = (torch.from_numpy(self._fixed[kind][start:stop]) for kind in (Kind.DENSE, Kind.IDS))
        return Batch(
            self._layout, dense, ids, self._bags(Kind.BAG, start, stop), self._bags(Kind.WEIGHTS, start, stop)
        )

    def _bags(self, kind: Kind, start: int, stop: int) -> Bag | None:
        """Return the slots of this kind, one after the other."""
        slots = self._any[kind]
        if not slots:
            return None
        values, offsets, before = [], [np.zeros(1, dtype=np.int64)], 0
        for every, at in slots:
            first, last = int(at[start]), int(at[stop])
            values.append(every[first:last])
            offsets.append(at[start + 1 : stop + 1] + (before - first))
            before += last - first
        return Bag(torch.from_numpy(np.concatenate(values)), torch.from_numpy(np.concatenate(offsets)))


def _numbers(found: pa.Array, where: str) -> Values:
    """Return the numbers of a column, without a copy. Raises DataError for nulls and infinite numbers."""
    if found.null_count:
        raise DataError(f"{where} has lists with {found.null_count} nulls, but a slot needs numbers")
    values: Values = found.to_numpy(zero_copy_only=True)
    if values.dtype.kind == "f" and not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise DataError(f"{where} has numbers that are not finite as float32")
    return values
