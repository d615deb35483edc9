"""The files of a save, with sizes and checksums, and the current save of a directory.

A directory's `manifest.json` names the saves that make up its tables, which are one save or one save and its
incremental saves. Each save has one part per server. A published directory (see `publication`) has a manifest
too. A part names its files and their content.

Everything that is read is checked. It must be complete and of a known version, and every name must stay
inside the directory. The order of writing keeps one save loadable at any time: parts, then the manifest, then
the removal of files that no manifest names.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import IntEnum, StrEnum

from fleetrun.aliases import Document
from fleetrun.frozen import frozen
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.storage.errors import LoadError, SaveError, load_error, save_error
from trainers.storage.folder import Folder, Where, open_folder
from trainers.storage.manifest import FileRecord, ManifestError, is_name, opened, sealed
from trainers.storage.publication import current, listed, publish, sweep, withdraw

# ---- Modes of a save, by the numbers of Paddle's accessors (`CtrCommonAccessor::Save` in
# paddle/fluid/distributed/ps/table/ctr_accessor.cc):
#
# 0  Paddle and here: every row, with optimizer state and statistics.
# 1  Paddle: for serving, the values of rows that pass base_threshold, delta_threshold and delta_keep_days.
#    Here: an incremental save, with every row changed since the last save of mode 0, 1 or 3, its state and
#    statistics. It also has the keys of the rows removed since then. A save of mode 0 and its incremental
#    saves load as one save.
# 2  Paddle: values of rows that pass base_threshold and delta_keep_days. Here: the values of every row.
# 3  Paddle: every row, and then one more unseen day for each. Here: every row. The caller ages statistics.
# 4  Here: an incremental version in a published directory. It has the values of mode 1, since the version
#    before.


class SaveMode(IntEnum):
    """The modes, by Paddle's numbers."""

    ALL = 0
    DELTA = 1
    VALUES = 2
    AGED = 3
    INCREMENT = 4

    @property
    def changes(self) -> bool:
        """True for a save of the changes since the save before."""
        return self in (SaveMode.DELTA, SaveMode.INCREMENT)

    @property
    def values_only(self) -> bool:
        """True for a save without optimizer state, statistics and candidates."""
        return self in (SaveMode.VALUES, SaveMode.INCREMENT)


# ---- The files of a save.

VERSION = 3
"""The version of the format. In version 1, specs had fewer options. In version 2, incremental saves had no
removed keys.
"""
MANIFEST = "manifest.json"
_FORMAT = "fleetrun saved tables"
BUFFER = "buffer "
"""The prefix of the name of a dense table that servers do not train: a buffer of a trainer's model."""


class PieceKind(StrEnum):
    DENSE = "dense"
    ROWS = "rows"
    CANDIDATES = "candidates"
    REMOVED = "removed"


@frozen
class Piece:
    """A part of one table in a file. Its tensors are named `TABLE/KIND/NUMBER/` plus a name by kind:

    dense         `values`, `state.0`
    rows          `keys`, `values`, `state.0`, `statistics`
                  `scales` too if the values are codes of 8 bits, see `write.codes_of`
    candidates    `keys`, `counts`, `days`, `stamps`: keys without a row yet
    removed       `keys`
    """

    table: str
    kind: PieceKind
    number: int
    rows: int

    @property
    def prefix(self) -> str:
        return f"{self.table}/{self.kind}/{self.number}/"


@frozen
class Shard:
    file: FileRecord
    pieces: tuple[Piece, ...]


@frozen
class SavedTable:
    """A table of one server."""

    spec: TableSpec
    step: int
    """Updates so far."""
    rows: int
    """Rows in this part."""
    clock: tuple[float, ...] = ()
    """The clock of the budget of a bounded table, see `tables.budget`."""
    candidate_clock: tuple[float, ...] = ()
    error: float = 0.0
    """The largest difference between a value of the table and the saved value."""
    alive: int | None = None
    """The rows that the table of this server had, or None if that is not known. See `SparseTable.alive`."""


@frozen
class SavedPart:
    """The part of a save that one of `servers` servers wrote."""

    server: int
    servers: int
    tables: tuple[SavedTable, ...]
    shards: tuple[Shard, ...]
    blob: FileRecord | None = None
    """A file of opaque bytes."""

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(shard.file.size for shard in self.shards)

    def spec_of(self, name: str) -> TableSpec:
        """Return the spec of a table in this part."""
        return next(table.spec for table in self.tables if table.spec.name == name)

    def encode(self) -> bytes:
        tables = [
            {
                "name": table.spec.name,
                "kind": table.spec.kind.name.lower(),
                "size": table.spec.size,
                "rule": type(table.spec.rule).__name__,
                "dtype": table.spec.rows.dtype.name.lower(),
                "spec": table.spec.encode().hex(),
                "step": table.step,
                "rows": table.rows,
                "clock": table.clock,
                "candidate_clock": table.candidate_clock,
                "error": table.error,
                "alive": table.alive,
            }
            for table in self.tables
        ]
        return sealed(
            _FORMAT,
            VERSION,
            {
                "server": self.server,
                "servers": self.servers,
                "tables": tables,
                "shards": list(map(asdict, self.shards)),
                "blob": None if self.blob is None else asdict(self.blob),
            },
        )

    @classmethod
    def decode(cls, text: bytes) -> SavedPart:
        """Decode a part. Raises ManifestError."""
        return opened(text, _FORMAT, VERSION, cls._made)

    @classmethod
    def _made(cls, body: Document) -> SavedPart:
        tables, shards = tuple(map(_table, body["tables"])), tuple(map(_shard, body["shards"]))
        names = {table.spec.name for table in tables}
        stray = [piece.table for shard in shards for piece in shard.pieces if piece.table not in names]
        if stray:
            raise ManifestError(f"its files have rows of {stray[0]!r}, which is not one of its tables")
        blob = body.get("blob")
        return cls(body["server"], body["servers"], tables, shards, blob and FileRecord(**blob))


@frozen
class Save:
    """One save of all servers. The fields with defaults belong to a published version."""

    id: str
    """The directory of its files."""
    mode: SaveMode
    step: int
    parts: tuple[FileRecord, ...]
    """One part per server, in order."""
    number: int = 0
    time: float = 0.0
    """The moment that the version shows, in seconds since 1970."""
    size: int = 0
    """Bytes of its files."""
    row_type: str = ""
    """See `write.SaveSpec`."""

    def __post_init__(self) -> None:
        if not is_name(self.id):
            raise ManifestError(f"{self.id!r} is not a valid file name")


_OF_VERSIONS = ("number", "time", "size", "row_type")


@frozen
class Manifest:
    """The saves that make up the tables, in the order of application."""

    saves: tuple[Save, ...]
    stream: str = ""
    """The name of a series of versions, in a published directory."""

    def encode(self) -> bytes:
        saves = [
            {name: each for name, each in asdict(save).items() if self.stream or name not in _OF_VERSIONS}
            for save in self.saves
        ]
        return sealed(_FORMAT, VERSION, {"saves": saves} | ({"stream": self.stream} if self.stream else {}))

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        """Decode a manifest. Raises ManifestError."""
        return opened(text, _FORMAT, VERSION, cls._made)

    @classmethod
    def _made(cls, body: Document) -> Manifest:
        saves, stream = tuple(map(_save, body["saves"])), body.get("stream", "")
        modes = [save.mode for save in saves]
        first, later = (SaveMode.VALUES, SaveMode.INCREMENT) if stream else (None, SaveMode.DELTA)
        chained = all(mode is later for mode in modes[1:])
        if not modes or modes[0].changes or (first is not None and modes[0] is not first) or not chained:
            raise ManifestError(
                f"saves of modes {list(map(int, modes))} are not a full save followed by incremental ones"
            )
        numbers = [save.number for save in saves]
        if stream and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise ManifestError(f"its versions are {numbers}, which are not consecutive")
        return cls(saves, stream)


@frozen(kw_only=True)
class Loaded:
    """The save with which a server starts."""

    where: str
    source: str
    """Its directory and saves, and which part of them."""
    tables: frozenset[str]
    """The tables of this server that have values of the save."""
    rows: Mapping[str, int]
    """See `read.OpenFolder`."""
    others: Sequence[str]
    """The other names in the save."""
    named: bool
    """True if the script named what to load."""

    def encode(self) -> bytes:
        """Return the fields that a trainer needs, as JSON."""
        kept = {name: getattr(self, name) for name in ("where", "rows", "others", "named")}
        return json.dumps(kept).encode()


def _table(entry: Document) -> SavedTable:
    return SavedTable(
        TableSpec.decode(bytes.fromhex(entry["spec"])),
        entry["step"],
        entry["rows"],
        tuple(entry.get("clock", ())),
        tuple(entry.get("candidate_clock", ())),
        entry.get("error", 0.0),
        entry.get("alive"),
    )


def _shard(entry: Document) -> Shard:
    pieces = [Piece(**piece | {"kind": PieceKind(piece["kind"])}) for piece in entry["pieces"]]
    return Shard(FileRecord(**entry["file"]), tuple(pieces))


def _save(entry: Document) -> Save:
    parts = tuple(FileRecord(**part) for part in entry["parts"])
    return Save(**entry | {"mode": SaveMode(entry["mode"]), "parts": parts})


# ---- The current save of a directory.

_PREFIX = "save-"


def new_id(step: int) -> str:
    """Return a unique name for a save."""
    return f"{_PREFIX}{step:012d}-{secrets.token_hex(4)}"


def current_manifest(where: Where) -> Manifest:
    """Return the manifest of the directory. Raises LoadError. Without a manifest, its message lists the
    content of the directory.
    """
    folder = open_folder(where)
    try:
        text = current(folder, MANIFEST)
        if text is None:
            raise LoadError(_no_manifest(folder, folder.names()))
        return Manifest.decode(text)
    except OSError as error:
        raise load_error(error, folder.path(MANIFEST)) from error
    except ManifestError as error:
        raise LoadError(f"{folder.path(MANIFEST)} cannot be used: {error}") from error


def check_target(where: Where, mode: SaveMode) -> list[str]:
    """Check a directory before writing a save of this mode into it. Return the ids of the saves that the new
    save follows: the current ones for mode 1, else none. Raises SaveError if such a save must not be written
    there.
    """
    return [save.id for save in _saves_to_keep(open_folder(where), mode)]


def commit_save(
    where: Where,
    id: str,
    mode: SaveMode,
    step: int,
    parts: Sequence[FileRecord],
    *,
    after: str | None = None,
) -> bool:
    """Make a save the current one after every server has written its part. `parts` are in the order of
    servers.

    Return True if the save is durable, as `publish` does. Otherwise, the former save stays too. Raises
    SaveError and leaves the former save current if parts are missing, or if an incremental save does not
    follow the directory's last save.
    """
    folder = open_folder(where)
    former = _saves_to_keep(folder, mode)
    if mode is SaveMode.DELTA and former[-1].id != after:
        raise SaveError(
            f"Mode 1 saved the rows changed since {after}, but the last save in {folder.where} is now "
            f"{former[-1].id}, because another trainer saved meanwhile. Save again."
        )
    save = Save(id, mode, step, tuple(parts))
    try:
        for number, record in enumerate(parts):
            check_part(folder, id, record, number, len(parts))
        manifest = Manifest((*former, save))
        durable = publish(folder, MANIFEST, manifest.encode())
    except OSError as error:
        raise save_error(error, folder.path(id), folder.free()) from error
    if durable:  # only now, because the former files were the only complete save until here
        remove_unlisted(folder, [manifest])
    return durable


def abandon_save(where: Where, id: str) -> None:
    """Remove a save unless it was committed. The next save removes any files that cannot be removed now."""
    withdraw(open_folder(where), MANIFEST, [id])


def _saves_to_keep(folder: Folder, mode: SaveMode) -> tuple[Save, ...]:
    """Return the saves that stay current together with a new save of this mode."""
    manifest = manifest_of(folder)
    former = () if manifest is None else manifest.saves
    if manifest is not None and manifest.stream:
        raise SaveError(
            f"{folder.where} has versions that servers publish (ps_configs publish). Choose another "
            "directory for saved tables."
        )
    if mode is SaveMode.DELTA:
        if not former or former[0].mode is SaveMode.VALUES:
            there = "only a save of values (mode 2)" if former else "no save"
            raise SaveError(
                f"Mode 1 saves the rows changed since the last save of mode 0, 1 or 3, but {folder.where} "
                f"has {there}. Save with mode 0 there first."
            )
        return former
    training = bool(former) and former[0].mode is not SaveMode.VALUES
    if mode is SaveMode.VALUES and training:
        raise SaveError(
            f"{folder.where} has tables from which training can continue (mode {int(former[0].mode)}). A "
            "save of values only (mode 2) would replace them. Choose another directory."
        )
    return ()


def check_part(folder: Folder, id: str, record: FileRecord, server: int, servers: int) -> SavedPart:
    """Return the part that a server has written, checked against the server's record. Raises SaveError and
    OSError.
    """
    content = folder.read(f"{id}/{record.name}").numpy().tobytes()
    if record != FileRecord.of(f"server-{server}.json", [content]):
        raise SaveError(f"{folder.path(id)}/{record.name} differs from the file that server {server} wrote")
    part = SavedPart.decode(content)
    if (part.server, part.servers) != (server, servers):
        raise SaveError(
            f"{folder.path(id)}/{record.name} is the part of server {part.server} of {part.servers}, but "
            f"server {server} of {servers} should have written it, so not every server has saved"
        )
    return part


def manifest_of(folder: Folder) -> Manifest | None:
    """Return the manifest, or None if none exists. Raises SaveError."""
    try:
        text = current(folder, MANIFEST)
        return None if text is None else Manifest.decode(text)
    except OSError as error:
        raise save_error(error, folder.where, folder.free()) from error
    except ManifestError as error:
        raise SaveError(
            f"{folder.path(MANIFEST)} cannot be used: {error}. Choose another directory, or remove this one."
        ) from error


def remove_unlisted(folder: Folder, manifests: Sequence[Manifest]) -> None:
    """Remove the saves that no manifest names."""
    named = {save.id for manifest in manifests for save in manifest.saves}
    sweep(folder, lambda name: name.startswith(_PREFIX), named)


def _no_manifest(folder: Folder, names: Sequence[str]) -> str:
    if not names:
        return f"{folder.where} has no saved tables: it is empty or does not exist"
    unfinished = [name for name in names if name.startswith(_PREFIX)]
    why = f" The save {unfinished[-1]} was interrupted." if unfinished else ""
    return (
        f"{folder.where} has no {MANIFEST}, so it has no complete saved tables.{why} It has: {listed(names)}"
    )


# ---- A dense block is saved under its name, `parameter[start:stop]`.

_BLOCK = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


@frozen
class ParameterRange:
    """Elements `[start, stop)` of a dense parameter."""

    parameter: str
    start: int
    stop: int


def name_of(spec: TableSpec) -> str:
    """Return the name of a sparse table, or of the parameter of a dense table."""
    return spec.name if spec.kind is TableKind.SPARSE else range_of(spec).parameter


def range_of(spec: TableSpec) -> ParameterRange:
    """Return the range of a dense table. A table without a range in its name is a whole parameter, or a
    buffer.
    """
    found = _BLOCK.fullmatch(spec.name)
    if found and int(found[3]) - int(found[2]) == spec.size:
        return ParameterRange(found[1], int(found[2]), int(found[3]))
    return ParameterRange(spec.name.removeprefix(BUFFER), 0, spec.size)
