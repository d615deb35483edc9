"""Load saved parts of any number of servers into the tables of one server, or as plain tensors without
servers.

Before any row is loaded, files are checked against the manifest, and the saved tables against the tables of
the model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import xxhash
from torch import Tensor

from fleetrun.aliases import Integers
from fleetrun.frozen import frozen
from trainers import progress
from trainers.kernels.compiled import Keys, Mask
from trainers.ps.kernels.batch import owners
from trainers.ps.saves.manifest import (
    ParameterRange,
    Piece,
    PieceKind,
    SavedPart,
    SavedTable,
    SaveMode,
    Shard,
    current_manifest,
    name_of,
    range_of,
)
from trainers.ps.saves.write import Chunk, Removed, SparseTarget, Target, decoded
from trainers.ps.tables.budget import later
from trainers.ps.tables.rules import AnyRule, Fixed, same_state, state_widths
from trainers.ps.tables.spec import SLICE_ABOVE, TableKind, TableSpec, holders
from trainers.ps.tables.storage import Candidates, DenseRows, SparseRows
from trainers.storage.errors import LoadError, load_error
from trainers.storage.folder import Folder, Where, open_folder
from trainers.storage.manifest import FileRecord, ManifestError
from trainers.storage.safetensors import SafetensorsError, Tensors, unpack

# ---- Parts and shards, checked against the manifest.


@frozen
class OpenSave:
    """One save and its parts, in the order of servers. `number` and `time`: see `manifest.Save`."""

    id: str
    mode: SaveMode
    step: int
    parts: tuple[SavedPart, ...]
    number: int
    time: float


@frozen
class OpenFolder:
    """The saves that make up the tables of a directory, in the order of application."""

    folder: Folder
    saves: tuple[OpenSave, ...]
    stream: str = ""

    @property
    def values_only(self) -> bool:
        return self.saves[0].mode is SaveMode.VALUES

    def specs(self) -> dict[str, TableSpec]:
        """Return every table by name, from the last save that has it. Sparse tables: its first server's."""
        found: dict[str, TableSpec] = {}
        for save in reversed(self.saves):
            for part in save.parts:
                for table in part.tables:
                    found.setdefault(table.spec.name, table.spec)
        return found

    def rows(self) -> dict[str, int]:
        """Return the name of every sparse table with its rows, and of every dense parameter with 0. A row in
        several saves counts several times.
        """
        found: dict[str, int] = {}
        for table in (table for save in self.saves for part in save.parts for table in part.tables):
            rows = table.rows if table.spec.kind is TableKind.SPARSE else 0
            found[name_of(table.spec)] = found.get(name_of(table.spec), 0) + rows
        return found

    def check_alive(self, found: Mapping[str, int | None]) -> None:
        """Compare the rows that these tables have after the last save with the rows that its servers had.
        Raises LoadError.
        """
        for name, rows in found.items():
            saved = [
                each.alive for part in self.saves[-1].parts for each in part.tables if each.spec.name == name
            ]
            known = sum(filter(None, saved))
            if saved and None not in saved and rows not in (None, known):
                raise LoadError(
                    f"Table {name!r} of {self.folder.where} has {rows} rows after {self.saves[-1].id}, but "
                    f"had {known} when this was saved, so some saves are wrong. Load an older save."
                )

    def only(self, names: Sequence[str]) -> OpenFolder:
        """Return only these tables and parameters. Raises LoadError for a missing name."""
        if missing := sorted(set(names) - self.rows().keys()):
            raise LoadError(
                f"The saved tables in {self.folder.where} do not include {_listed(missing)}. They include "
                f"{_listed(sorted(self.rows()))}."
            )
        saves = (
            replace(save, parts=tuple(_part_with(part, names) for part in save.parts)) for save in self.saves
        )
        return replace(self, saves=tuple(saves))


@frozen
class ShardToRead:
    """A shard of a part in a save's directory."""

    save: str
    part: SavedPart
    shard: Shard


def open_saves(where: Where) -> OpenFolder:
    """Read the manifest and every part that it names. Raises LoadError."""
    manifest = current_manifest(where)
    folder = open_folder(where)
    saves = []
    for save in manifest.saves:
        parts = tuple(_part(folder, save.id, record) for record in save.parts)
        complete = [part.server for part in parts] == list(range(len(parts)))
        if not parts or not complete or any(part.servers != len(parts) for part in parts):
            servers = [f"{part.server} of {part.servers}" for part in parts]
            raise LoadError(
                f"{folder.path(save.id)} has the parts of servers {servers}. Some parts are missing, or "
                "belong to another job."
            )
        saves.append(OpenSave(save.id, save.mode, save.step, parts, save.number, save.time))
    return OpenFolder(folder, tuple(saves), manifest.stream)


def read_file(
    folder: Folder, save: str, record: FileRecord, *, verify: bool = True, into: Tensor | None = None
) -> Tensor:
    """Read a file, (size,) uint8. With `verify`, compare the checksum besides the size. `into`: see
    Folder.read. Raises LoadError.
    """
    path = folder.path(f"{save}/{record.name}")
    try:
        content = folder.read(f"{save}/{record.name}", into)
    except OSError as error:
        raise load_error(error, path) from error
    if len(content) != record.size:
        raise LoadError(_wrong_size(path, len(content), record.size))
    if verify:
        digest = xxhash.xxh3_64_hexdigest(content.numpy().data)
        if digest != record.xxh3_64:
            raise LoadError(
                f"{path} is damaged: its checksum (xxh3-64) is {digest}, but the manifest lists "
                f"{record.xxh3_64}. Copy it again from its origin, or load other saved tables."
            )
    return content


def read_shards(
    folder: Folder, wanted: Sequence[ShardToRead], *, verify: bool = True
) -> Iterator[tuple[ShardToRead, Tensors]]:
    """Yield the tensors of each shard in turn, and read the next shard meanwhile. Tensors are valid until the
    next shard is requested. Two buffers serve all shards, because fresh memory costs more than reading into
    old memory. Raises LoadError. For missing files and wrong sizes, it does so before the first shard.
    """
    # Cheap, so done before rows are loaded.
    for item in wanted:
        name = f"{item.save}/{item.shard.file.name}"
        try:
            size = folder.size(name)
        except OSError as error:
            raise load_error(error, folder.path(name)) from error
        if size != item.shard.file.size:
            raise LoadError(_wrong_size(folder.path(name), size, item.shard.file.size))
    largest = max((item.shard.file.size for item in wanted), default=0)
    buffers = [torch.from_numpy(np.empty(largest, np.uint8)) for _ in wanted[:2]]
    with ThreadPoolExecutor(1, "load") as reader:
        upcoming = deque(reader.submit(_tensors, folder, item, verify, buffers[0]) for item in wanted[:1])
        for number, item in enumerate(wanted, 1):
            for later in wanted[number : number + 1]:
                upcoming.append(reader.submit(_tensors, folder, later, verify, buffers[number % 2]))
            yield item, upcoming.popleft().result()


def chunk_of(folder: Folder, item: ShardToRead, piece: Piece, tensors: Tensors) -> Chunk:
    """Return a piece, checked against its table's spec. Raises LoadError with the file's name."""
    spec = item.part.spec_of(piece.table)
    found = {name: tensors[piece.prefix + name] for name in _names(spec) if piece.prefix + name in tensors}
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}
    wanted = _tensor_shapes(spec, piece)
    if piece.kind is PieceKind.ROWS and (scales := tensors.get(piece.prefix + "scales")) is not None:
        coded = {**wanted, "values": (wanted["values"][0], torch.uint8)}
        if scales.shape == (piece.rows, 2) and shapes == {name: coded[name] for name in ("keys", "values")}:
            return SparseRows(found["keys"], decoded(found["values"], scales), ())
    # A save of values lacks other tensors. Earlier versions lack days, or stamps. State is complete or
    # absent.
    some = {name: wanted[name] for name in ("keys", "values", "counts") if name in wanted}
    without_stamps = {name: shape for name, shape in wanted.items() if name != "stamps"}
    if shapes not in (wanted, some, without_stamps):
        path = folder.path(f"{item.save}/{item.shard.file.name}")
        raise LoadError(f"{path} lacks the tensors of table {piece.table!r} that its part lists: {shapes}")
    if piece.kind is PieceKind.REMOVED:
        return Removed(found["keys"])
    if piece.kind is PieceKind.CANDIDATES:
        days = found.get("days", torch.zeros(piece.rows))
        return Candidates(found["keys"], found["counts"], days, found.get("stamps"))
    state = tuple(found[name] for name in found if name.startswith("state."))
    if piece.kind is PieceKind.DENSE:
        return DenseRows(found["values"], state)
    return SparseRows(found["keys"], found["values"], state, found.get("statistics"))


@frozen
class Found:
    """A piece of a table, valid until the next is read. `save`: position of its save in the chain."""

    save: int
    part: SavedPart
    spec: TableSpec
    chunk: Chunk


def chunks(
    opened: OpenFolder,
    names: Collection[str] | None = None,
    *,
    servers: Sequence[Collection[int]] | None = None,
    backwards: bool = False,
    verify: bool = True,
) -> Iterator[Found]:
    """Yield the pieces of these tables (None: of all), from the first save on, or `backwards`. `servers`
    selects the servers whose parts are read, for each save. `verify`: see `read_file`. Raises LoadError.
    """
    places = {save.id: place for place, save in enumerate(opened.saves)}
    wanted = [
        ShardToRead(save.id, part, shard)
        for save in (reversed(opened.saves) if backwards else opened.saves)
        for part in save.parts
        if servers is None or part.server in servers[places[save.id]]
        for shard in part.shards
        if names is None or any(piece.table in names for piece in shard.pieces)
    ]
    for item, tensors in read_shards(opened.folder, wanted, verify=verify):
        for piece in item.shard.pieces:
            if names is None or piece.table in names:
                chunk = chunk_of(opened.folder, item, piece, tensors)
                yield Found(places[item.save], item.part, item.part.spec_of(piece.table), chunk)


class LaterKeys:
    """The keys of a table that later saves have, while its pieces are read from the last save to the first.
    The rows that an earlier save has for these keys do not count.
    """

    def __init__(self) -> None:
        self._save: int | None = None
        self._known = np.empty(0, np.int64)
        self._seen: list[Keys] = []

    def missing(self, save: int, keys: Keys, wanted: Mask | None = None) -> Mask:
        """Mark the keys of a piece that later saves lack, as (n,) bool. `save` is the position of the piece's
        save in the chain. `wanted` restricts the keys.
        """
        if save != self._save:
            self._known, self._save = np.unique(np.concatenate([self._known, *self._seen])), save
            self._seen = []
        kept = np.ones(len(keys), np.bool_) if wanted is None else wanted
        if len(known := self._known):
            kept &= known[np.searchsorted(known, keys).clip(max=len(known) - 1)] != keys
        if save:
            self._seen.append(keys[kept].copy())
        return kept


def _names(spec: TableSpec) -> list[str]:
    states = [f"state.{number}" for number, _ in enumerate(state_widths(spec.rule, spec.size))]
    return ["keys", "values", *states, "statistics", "counts", "days", "stamps"]


def _tensor_shapes(spec: TableSpec, piece: Piece) -> dict[str, tuple[Integers, torch.dtype]]:
    keys: dict[str, tuple[Integers, torch.dtype]] = {"keys": ((piece.rows,), torch.int64)}
    if piece.kind is PieceKind.REMOVED:
        return keys
    if piece.kind is PieceKind.CANDIDATES:
        columns = ("counts", "days") if spec.rows.bound is None else ("counts", "days", "stamps")
        return {**keys, **dict.fromkeys(columns, ((piece.rows,), torch.float32))}
    dense = piece.kind is PieceKind.DENSE
    rows: Integers = () if dense else (piece.rows,)
    shapes = {} if dense else keys
    shapes["values"] = ((*rows, spec.size), spec.rows.dtype.dtype)
    for number, width in enumerate(state_widths(spec.rule, spec.size)):
        shapes[f"state.{number}"] = ((*rows, width), torch.float32)
    if spec.statistics:
        shapes["statistics"] = ((piece.rows, spec.statistics), torch.float32)
    return shapes


def _part(folder: Folder, save: str, record: FileRecord) -> SavedPart:
    content = read_file(folder, save, record)
    try:
        return SavedPart.decode(content.numpy().tobytes())
    except ManifestError as error:
        raise LoadError(f"{folder.path(f'{save}/{record.name}')} cannot be used: {error}") from error


def _tensors(folder: Folder, item: ShardToRead, verify: bool, into: Tensor) -> Tensors:
    content = read_file(folder, item.save, item.shard.file, verify=verify, into=into)
    try:
        return unpack(content)
    except SafetensorsError as error:
        path = folder.path(f"{item.save}/{item.shard.file.name}")
        raise LoadError(f"{path} is not a safetensors file as fleetrun writes it: {error}") from error


def _wrong_size(path: str, size: int, wanted: int) -> str:
    return (
        f"{path} has {size} bytes, but the manifest lists {wanted}. It was cut short or replaced. Copy it "
        "again."
    )


# ---- Do saved tables match the tables of a model? Another number of servers divides a dense parameter into
# other blocks, named `parameter[start:stop]`, so dense tables are compared by parameter.

_WARM_START = " fleet.init_server(dirname, var_names=[...]) loads only the tables that you name."


def _part_with(part: SavedPart, names: Sequence[str]) -> SavedPart:
    """Return a part with only the tables that have these names."""
    tables = tuple(table for table in part.tables if name_of(table.spec) in names)
    kept = {table.spec.name for table in tables}
    pieces = ((shard, tuple(each for each in shard.pieces if each.table in kept)) for shard in part.shards)
    shards = tuple(replace(shard, pieces=some) for shard, some in pieces if some)
    return replace(part, tables=tables, shards=shards)


def check_fit(
    saved: Iterable[TableSpec], model: Iterable[TableSpec], where: str, *, values_only: bool
) -> None:
    """Raise LoadError if rows of `saved` cannot be rows of `model`, because names, row lengths, sizes or
    rules differ. `model` has the tables of one server: all sparse tables and some dense blocks. With
    `values_only`, rules may differ, because their state is reset.

    A rule's options may differ, for example the weight decay. The model's options apply from then on.
    """
    theirs, ours = _table_shapes(saved), _table_shapes(model)
    missing = sorted(ours.keys() - theirs.keys())
    extra = sorted(name for name in theirs.keys() - ours.keys() if theirs[name].sparse)
    if missing or extra:
        raise LoadError(
            f"{where} has the tables of another model: {_listed(theirs)}. This model has {_listed(ours)}. "
            f"Missing in the saved tables: {_listed(missing)}. Missing in this model: "
            f"{_listed(extra)}.{_WARM_START}"
        )
    for name, mine in ours.items():
        kept = theirs[name]
        same_size = kept.size == mine.size if mine.sparse else kept.size >= mine.size
        if kept.sparse != mine.sparse or not same_size:
            raise _other_size(name, where, kept, mine)
        if not values_only and not same_state(kept.rule, mine.rule):
            raise LoadError(
                f"Table {name!r} of {where} was trained with {kept.rule}, but this model has {mine.rule}, "
                "which needs other optimizer state. Use the saved rule, or load values (a save of mode 2)."
            )


def check_small(saved: Iterable[TableSpec], model: Iterable[TableSpec], where: str) -> None:
    """Raise LoadError for a small dense parameter of another size. Small ones are never sliced, so one server
    can compare them.
    """
    theirs = _table_shapes(saved)
    for name, mine in _table_shapes(model).items():
        kept = theirs.get(name, mine)
        if not mine.sparse and mine.size < SLICE_ABOVE and kept.size != mine.size:
            raise _other_size(name, where, kept, mine)


def _other_size(name: str, where: str, kept: _Shape, mine: _Shape) -> LoadError:
    return LoadError(
        f"Table {name!r} of {where} is {kept.description}, but in this model it is {mine.description}."
        f"{_WARM_START}"
    )


@frozen
class _Shape:
    sparse: bool
    size: int
    rule: AnyRule

    @property
    def description(self) -> str:
        return f"sparse with rows of {self.size}" if self.sparse else f"dense with {self.size} elements"


def _table_shapes(specs: Iterable[TableSpec]) -> dict[str, _Shape]:
    shapes: dict[str, _Shape] = {}
    for spec in specs:
        if spec.kind is TableKind.SPARSE:
            shapes[spec.name] = _Shape(True, spec.size, spec.rule)
            continue
        block = range_of(spec)
        size = max(block.stop, shapes[block.parameter].size) if block.parameter in shapes else block.stop
        shapes[block.parameter] = _Shape(False, size, spec.rule)
    return shapes


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


@dataclass(slots=True)
class _PartialBlock:
    """A block whose elements arrive in any order, some of them more than once."""

    values: Tensor
    seen: Tensor
    state: list[Tensor]

    @classmethod
    def empty(cls, size: int, states: int) -> _PartialBlock:
        seen = torch.zeros(size, dtype=torch.bool)
        return cls(torch.empty(size), seen, [torch.empty(size) for _ in range(states)])


class BlockAssembler:
    """Assembles the dense blocks of one server from saved blocks."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self._by_parameter: dict[str, list[tuple[TableSpec, ParameterRange]]] = {}
        self._partial: dict[str, _PartialBlock] = {}
        for spec in specs:
            block = range_of(spec)
            self._by_parameter.setdefault(block.parameter, []).append((spec, block))

    def overlap(self, saved: TableSpec) -> bool:
        """Return True if a saved block has elements of any of these blocks."""
        return any(True for _ in self._overlapping(range_of(saved)))

    def add(self, saved: TableSpec, rows: DenseRows) -> None:
        """Copy the overlapping elements of a saved block. A later block overwrites an earlier one."""
        source = range_of(saved)
        for spec, block in self._overlapping(source):
            partial = self._partial.setdefault(spec.name, _PartialBlock.empty(spec.size, len(rows.state)))
            start, stop = max(block.start, source.start), min(block.stop, source.stop)
            into = slice(start - block.start, stop - block.start)
            out_of = slice(start - source.start, stop - source.start)
            partial.values[into] = rows.values[out_of]
            partial.seen[into] = True
            for mine, theirs in zip(partial.state, rows.state, strict=True):
                mine[into] = theirs[out_of]

    def whole(self, where: str) -> Iterator[tuple[str, DenseRows]]:
        """Yield (table name, block) for each block. Raises LoadError if elements are missing."""
        for pieces in self._by_parameter.values():
            for spec, block in pieces:
                partial = self._partial.get(spec.name)
                if partial is None or not bool(partial.seen.all()):
                    raise LoadError(
                        f"The saved tables in {where} lack elements of parameter {block.parameter!r} "
                        f"between {block.start} and {block.stop}. Its size has changed, or parts are "
                        "missing."
                    )
                yield spec.name, DenseRows(partial.values, tuple(partial.state))

    def _overlapping(self, source: ParameterRange) -> Iterator[tuple[TableSpec, ParameterRange]]:
        for spec, block in self._by_parameter.get(source.parameter, []):
            if block.start < source.stop and source.start < block.stop:
                yield spec, block


# ---- Loading into the tables of one server.


@frozen
class RowOwner:
    """Decides which rows of a save server `server` of `servers` owns. `saved` and `mine` are the specs of a
    table in a part and here. They define which servers shared the rows, and which servers share them now.
    """

    server: int
    servers: int

    def may_own_of(self, part: SavedPart, saved: TableSpec, mine: TableSpec) -> bool:
        """Return True if a part can have rows of a table for this server. A key's holder is its hash modulo
        the holders, so both numbers are equal modulo the greatest common divisor of the numbers of holders.
        """
        theirs, ours = holders(saved, part.servers), holders(mine, self.servers)
        if part.server not in theirs or self.server not in ours:
            return False
        apart = theirs.index(part.server) - ours.index(self.server)
        return apart % math.gcd(len(theirs), len(ours)) == 0

    def share_of(self, part: SavedPart, saved: TableSpec, mine: TableSpec) -> float:
        """Return the approximate share of a part's rows of a table that this server owns."""
        if not self.may_own_of(part, saved, mine):
            return 0.0
        theirs, ours = holders(saved, part.servers), holders(mine, self.servers)
        return math.gcd(len(theirs), len(ours)) / len(ours)

    def owned(
        self, part: SavedPart, saved: TableSpec, mine: TableSpec, chunk: SparseRows | Candidates | Removed
    ) -> SparseRows | Candidates | Removed:
        """Return the rows that this server owns, of a part that passes `may_own_of`."""
        ours = holders(mine, self.servers)
        if len(holders(saved, part.servers)) % len(ours) == 0:
            return chunk  # the whole part then belongs to one server
        return _rows_at(chunk, owners(chunk.keys, np.array(ours)) == self.server)


def _rows_at(chunk: SparseRows | Candidates | Removed, mine: Tensor) -> SparseRows | Candidates | Removed:
    if isinstance(chunk, Candidates):
        return chunk.at(mine)
    if isinstance(chunk, Removed):
        return Removed(chunk.keys[mine])
    statistics = None if chunk.statistics is None else chunk.statistics[mine]
    state = tuple(tensor[mine] for tensor in chunk.state)
    return SparseRows(chunk.keys[mine], chunk.values[mine], state, statistics)


def load_tables(
    where: Where | OpenFolder,
    tables: Sequence[Target],
    owner: RowOwner,
) -> int:
    """Load the rows and blocks that this server owns into its tables, which must be empty. Return the step.

    A chain of incremental saves is loaded save after save. A save of mode 2 resets optimizer state and
    statistics.

    Raises LoadError. For another model, missing files and wrong sizes, no table has changed then. For a wrong
    checksum, tables may have changed and must not be used.
    """
    opened = where if isinstance(where, OpenFolder) else open_saves(where)
    specs = [table.spec for table in tables]
    by_name = {table.spec.name: table for table in tables}
    expected = _expected(opened, specs, owner)
    for table in tables:
        if isinstance(table, SparseTarget):
            saved = list(_sources(opened, table.spec, owner))
            clocks = [each.clock for each in saved], [each.candidate_clock for each in saved]
            table.restore_clocks(*(list(filter(None, some)) for some in clocks))
    for name, chunk in owned_chunks(opened, specs, owner):
        table = by_name[name]
        if isinstance(table, SparseTarget) and name in expected:
            table.expect(expected.pop(name))
        if isinstance(chunk, SparseRows | DenseRows):
            table.load(chunk)
        elif isinstance(table, SparseTarget):
            if isinstance(chunk, Removed):
                table.remove(chunk.keys)
            else:
                table.load_candidates(chunk)
    if not opened.values_only:
        for table in tables:
            table.step = max((each.step for each in _sources(opened, table.spec, owner)), default=0)
    return opened.saves[-1].step


def owned_chunks(
    opened: OpenFolder, specs: Sequence[TableSpec], owner: RowOwner
) -> Iterator[tuple[str, Chunk]]:
    """Yield (table name, content) for these tables, valid until the next. Raises LoadError."""
    check_fit(opened.specs().values(), specs, opened.folder.where, values_only=opened.values_only)
    by_name = {spec.name: spec for spec in specs}
    blocks = BlockAssembler([spec for spec in specs if spec.kind is TableKind.DENSE])
    wanted = list(_wanted(opened, by_name, blocks, owner))
    last = opened.saves[-1].id
    with progress.activity("loading tables", of=len(wanted)) as loading:
        for item, tensors in read_shards(opened.folder, wanted):
            for piece in item.shard.pieces:
                chunk, spec = chunk_of(opened.folder, item, piece, tensors), item.part.spec_of(piece.table)
                if isinstance(chunk, DenseRows):
                    blocks.add(spec, chunk)
                    continue
                mine = by_name[piece.table]
                # A candidate of an earlier save has a row now, or is a candidate in the last save too.
                wanted_here = not isinstance(chunk, Candidates) or item.save == last
                if wanted_here and owner.may_own_of(item.part, spec, mine):
                    behind = partial(_behind, opened, item.part, mine, owner)
                    owned = owner.owned(item.part, spec, mine, chunk)
                    yield piece.table, _completed(owned, spec, mine, behind)
            loading.advance()
    for name, block in blocks.whole(opened.folder.where):
        yield name, _completed(block, by_name[name], by_name[name], lambda clock: 0.0)


def _expected(opened: OpenFolder, specs: Sequence[TableSpec], owner: RowOwner) -> dict[str, int]:
    """Return about how many rows each sparse table has here, by the first save. Later ones have as many."""
    rows = {spec.name: 0.0 for spec in specs if spec.kind is TableKind.SPARSE}
    mine = {spec.name: spec for spec in specs}
    for part in opened.saves[0].parts:
        for table in part.tables:
            if (name := table.spec.name) in rows:
                rows[name] += table.rows * owner.share_of(part, table.spec, mine[name])
    return {name: int(number) for name, number in rows.items()}


def _wanted(
    opened: OpenFolder, mine: Mapping[str, TableSpec], blocks: BlockAssembler, owner: RowOwner
) -> Iterator[ShardToRead]:
    """Yield the shards with content for this server."""
    for save in opened.saves:
        for part in save.parts:
            for shard in part.shards:
                found = [part.spec_of(piece.table) for piece in shard.pieces]
                if any(
                    owner.may_own_of(part, spec, mine[spec.name])
                    if spec.kind is TableKind.SPARSE
                    else blocks.overlap(spec)
                    for spec in found
                ):
                    yield ShardToRead(save.id, part, shard)


def _sources(opened: OpenFolder, spec: TableSpec, owner: RowOwner) -> Iterator[SavedTable]:
    """Yield the saved tables that hold rows of this server's table."""
    dense = spec.kind is TableKind.DENSE
    blocks = BlockAssembler([spec] if dense else [])
    for part in opened.saves[-1].parts:
        for table in part.tables:
            saved = table.spec
            if (
                saved.kind is TableKind.DENSE and blocks.overlap(saved)
                if dense
                else saved.name == spec.name and owner.may_own_of(part, saved, spec)
            ):
                yield table


def _behind(opened: OpenFolder, part: SavedPart, spec: TableSpec, owner: RowOwner, clock: str) -> float:
    """Return how far this clock of a part's table is behind the last clock of the loaded tables."""
    own = [each for each in opened.saves[-1].parts[part.server].tables if each.spec.name == spec.name]
    times = [getattr(each, clock)[:1] for each in (*own, *_sources(opened, spec, owner))]
    return float(max(times)[0] - times[0][0]) if times[0] else 0.0


def _completed(chunk: Chunk, saved: TableSpec, spec: TableSpec, behind: Callable[[str], float]) -> Chunk:
    """Add fresh state and statistics that the save lacks, and drop statistics that the table lacks. Stamps
    are converted to the last clock. `behind`: see `_behind`.
    """
    if isinstance(chunk, Candidates) and chunk.stamps is not None:
        stamps = later(chunk.stamps.numpy(), behind("candidate_clock"))
        return Candidates(chunk.keys, chunk.counts, chunk.days, torch.from_numpy(stamps).float())
    if isinstance(chunk, Candidates | Removed):
        return chunk
    state, widths = chunk.state, state_widths(spec.rule, spec.size)
    if len(state) != len(widths):
        state = tuple(
            torch.full((*chunk.values.shape[:-1], width), spec.rule.initial_state) for width in widths
        )
    if isinstance(chunk, DenseRows):
        return DenseRows(chunk.values, state)
    if not spec.statistics:
        return SparseRows(chunk.keys, chunk.values, state)
    statistics = torch.zeros(len(chunk.keys), spec.statistics)
    if chunk.statistics is not None:
        seen = min(saved.seen, spec.seen)
        statistics[:, :seen] = chunk.statistics[:, :seen]
        if saved.rows.bound is not None and spec.rows.bound is not None:
            stamps = chunk.statistics[:, -1].numpy()
            statistics[:, -1] = torch.from_numpy(later(stamps, behind("clock")))
    return SparseRows(chunk.keys, chunk.values, state, statistics)


# ---- A save as plain tensors, without servers.


@frozen(eq=False)
class SparseValues:
    """keys (n,) int64 ascending, values (n, dim) float32."""

    keys: Tensor
    values: Tensor


@frozen(eq=False)
class ModelValues:
    """`dense`: (elements,) float32 by parameter name, flat, as saves have no shapes. `sparse`: by table."""

    dense: dict[str, Tensor]
    sparse: dict[str, SparseValues]


def read_values(where: Where | OpenFolder, *, verify: bool = True) -> ModelValues:
    """Read every value of a save of any mode, from all servers, in one call. Raises LoadError."""
    opened = where if isinstance(where, OpenFolder) else open_saves(where)
    specs = opened.specs()
    blocks = BlockAssembler(_whole_parameters(specs.values()))
    sparse = {
        name: ([torch.empty(0, dtype=torch.int64)], [torch.empty(0, spec.size)], LaterKeys())
        for name, spec in specs.items()
        if spec.kind is TableKind.SPARSE
    }
    for each in chunks(opened, backwards=True, verify=verify):
        chunk = each.chunk
        if isinstance(chunk, DenseRows) and each.save == len(opened.saves) - 1:
            blocks.add(each.spec, chunk)
        elif isinstance(chunk, SparseRows | Removed):
            keys, values, later = sparse[each.spec.name]
            kept = torch.from_numpy(later.missing(each.save, chunk.keys.numpy()))
            if isinstance(chunk, SparseRows):
                keys.append(chunk.keys[kept])
                values.append(chunk.values[kept].float())
    dense = {name: rows.values for name, rows in blocks.whole(opened.folder.where)}
    return ModelValues(dense, {name: _sorted(*pieces) for name, (*pieces, _) in sparse.items()})


def _sorted(keys: Sequence[Tensor], values: Sequence[Tensor]) -> SparseValues:
    ascending, order = torch.sort(torch.cat(list(keys)))
    return SparseValues(ascending, torch.cat(list(values))[order])


def _whole_parameters(specs: Iterable[TableSpec]) -> list[TableSpec]:
    """Return one block per dense parameter, over all of its saved blocks."""
    stops: dict[str, int] = {}
    for block in (range_of(spec) for spec in specs if spec.kind is TableKind.DENSE):
        stops[block.parameter] = max(block.stop, stops.get(block.parameter, 0))
    return [
        TableSpec(kind=TableKind.DENSE, name=name, size=size, rule=Fixed()) for name, size in stops.items()
    ]
