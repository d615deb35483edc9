"""A published directory holds versions of all tables for serving. Each version is a save of values, in a
chain of the last full version and the changes since.

    manifest.json    version 7, full: save-...-1f    version 8, incremental: save-...-2a    version 9: ...

The directory has the usual format of saves (`manifest`), so every reader of saves can read it. A reader that
has version n of the same stream continues with n + 1 if the full version is n or earlier. Otherwise, the
reader starts with the full version.

The servers write a full version if a server has lost the list of changes. Otherwise, they merge it from the
files of a full version and its incremental versions, while training and publishing continue. A merged version
has the number of the last merged version, and the same id with a suffix.

Files that the manifest no longer names are removed when the next full version exists, so that a reader of the
former manifest can finish.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fleetrun.frozen import frozen
from trainers.ps.saves.manifest import (
    BUFFER,
    MANIFEST,
    Manifest,
    PieceKind,
    Save,
    SavedPart,
    SavedTable,
    check_part,
    manifest_of,
    remove_unlisted,
)
from trainers.ps.saves.read import (
    LaterKeys,
    OpenFolder,
    ShardToRead,
    chunks,
    open_saves,
    read_shards,
)
from trainers.ps.saves.write import Packed, SaveSpec, TableCut, remove_part, write_pieces
from trainers.ps.tables.rules import Fixed
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.tables.storage import DenseCut, DenseRows
from trainers.storage.errors import LoadError, SaveError, save_error
from trainers.storage.folder import Folder, open_folder
from trainers.storage.manifest import FileRecord
from trainers.storage.publication import publish

MOST_INCREMENTS = 64
"""The most incremental versions of a full version. The manifest names each, and a reader that starts reads
all.
"""


_MERGED = "-base"


class OthersError(SaveError):
    """The directory belongs to another job, or holds saves of another kind."""


def others_text(folder: Folder) -> str:
    return (
        f"Another job changed {folder.path(MANIFEST)}, so this job stopped publishing. Set a separate "
        "ps_configs publish for each job, and start the jobs again."
    )


@frozen
class Published:
    """The content of a directory. Its manifest is None before the first version."""

    folder: Folder
    manifest: Manifest | None = None

    @classmethod
    def open(cls, where: str) -> Published:
        """Read the directory. Raises SaveError, and OthersError if it holds saves of another kind."""
        folder = open_folder(where)
        manifest = manifest_of(folder)
        if manifest is not None and not manifest.stream:
            raise OthersError(
                f"{folder.where} has tables of fleet.save_persistables(), which the first published version "
                "would replace. Set another ps_configs publish."
            )
        return cls(folder, manifest)

    @property
    def number(self) -> int:
        """The number of the last version, or 0 before the first version."""
        return 0 if self.manifest is None else self.manifest.saves[-1].number

    @property
    def ids(self) -> list[str]:
        """The ids of the saves in the manifest, in order."""
        return [] if self.manifest is None else [save.id for save in self.manifest.saves]

    @property
    def cuts(self) -> list[str]:
        """The ids of the saves in the servers' format, in order."""
        return [id.removesuffix(_MERGED) for id in self.ids]

    @property
    def row_type(self) -> str:
        """The row type of the last version."""
        return "" if self.manifest is None else self.manifest.saves[-1].row_type

    @property
    def merged_id(self) -> str:
        """The id of a full version that is merged from all versions."""
        return self.cuts[-1] + _MERGED

    @property
    def long(self) -> bool:
        """True if the incremental versions have as many bytes as the full version, or are too many."""
        if self.manifest is None:
            return False
        base, *later = self.manifest.saves
        return len(later) >= MOST_INCREMENTS or (
            len(later) > 1 and sum(save.size for save in later) >= base.size
        )

    def follow(self, save: Save, parts: Sequence[FileRecord]) -> Published:
        """Return the content with one more version, of which every server has written its part. Raises
        SaveError or OthersError, and nothing has changed then.
        """
        before = self.manifest.saves if self.manifest is not None and save.mode.changes else ()
        return self._with(before, replace(save, number=self.number + 1), parts)

    def merge(self, base: Save, parts: Sequence[FileRecord], merged: Sequence[str]) -> Published:
        """Return the content with this full version in place of the `merged` ids. Raises SaveError if they
        are no longer the first saves.
        """
        if self.manifest is None or self.ids[: len(merged)] != list(merged):
            raise SaveError(f"{self.folder.where} now has another full version")
        last, *after = self.manifest.saves[len(merged) - 1 :]
        base = replace(base, number=last.number, time=last.time, step=last.step, row_type=last.row_type)
        return self._with((), base, parts, tuple(after))

    def _with(
        self, before: tuple[Save, ...], save: Save, parts: Sequence[FileRecord], after: tuple[Save, ...] = ()
    ) -> Published:
        folder, stream = self.folder, secrets.token_hex(8)
        try:
            found = manifest_of(folder)
            if found is None and self.manifest is not None:
                raise SaveError(f"{folder.path(MANIFEST)} no longer exists")
            if found != self.manifest:
                raise OthersError(others_text(folder))
            size = sum(
                check_part(folder, save.id, record, number, len(parts)).size
                for number, record in enumerate(parts)
            )
            save = replace(save, parts=tuple(parts), size=size)
            kept = [] if self.manifest is None else [self.manifest]
            manifest = Manifest((*before, save, *after), kept[0].stream if kept else stream)
            publish(folder, MANIFEST, manifest.encode())
        except OSError as error:
            raise save_error(error, folder.path(save.id), folder.free()) from error
        if not before:
            remove_unlisted(folder, [*kept, manifest])
        return Published(folder, manifest)


# ---- Buffers: values of a served model besides its parameters, such as the means of a normalization. A
# trainer sends the buffers to server 0. Its part holds them from then on, as dense tables, so the directory
# keeps them.

Buffers = Mapping[str, torch.Tensor]
"""(n,) float32 by name."""


def buffer_cuts(buffers: Buffers) -> list[TableCut]:
    """Return the cuts of buffers for a part."""
    return [
        TableCut(
            TableSpec(kind=TableKind.DENSE, name=BUFFER + name, size=len(values), rule=Fixed()),
            DenseCut(DenseRows(values, ()), 0),
        )
        for name, values in buffers.items()
    ]


def published_buffers(where: str) -> dict[str, torch.Tensor]:
    """Return the buffers of the last version. Raises LoadError."""
    opened = open_saves(where)
    names = [name for name in opened.specs() if name.startswith(BUFFER)]
    return {
        each.spec.name.removeprefix(BUFFER): each.chunk.values.clone()
        for each in chunks(replace(opened, saves=opened.saves[-1:]), names)
        if isinstance(each.chunk, DenseRows)
    }


# ---- One server's part of a full version, merged from its parts of the full version before and of
# incremental versions.


def merge_part(
    where: str, spec: SaveSpec, merged: Sequence[str], cancelled: Callable[[], bool] = lambda: False
) -> FileRecord:
    """Write this server's part of the full version `spec.id`, with each key as in the last of the `merged`
    saves.

    One shard and the keys of the incremental versions are in memory. Raises SaveError, also after it is
    `cancelled`, and removes the written files.
    """
    folder = open_folder(where)
    try:
        opened = open_saves(where)
        if [save.id for save in opened.saves[: len(merged)]] != list(merged):
            raise SaveError(f"{where} now has another full version")
        chain = OpenFolder(folder, opened.saves[: len(merged)])
        return _merge(folder, spec, chain, cancelled)
    except (OSError, LoadError, SaveError) as error:
        remove_part(folder, spec)
        if isinstance(error, OSError):
            raise save_error(error, folder.path(spec.id), folder.free()) from error
        raise SaveError(str(error)) from error


def _merge(folder: Folder, spec: SaveSpec, chain: OpenFolder, cancelled: Callable[[], bool]) -> FileRecord:
    parts = [save.parts[spec.server] for save in chain.saves]
    last = parts[-1]
    if any(_specs(part) != _specs(last) for part in parts):
        raise SaveError(f"the versions in {folder.where} have other tables or row types")
    folder.make(spec.id)
    tables = list[SavedTable]()
    return write_pieces(folder, spec, _merged(chain, parts, tables, cancelled), tables)


def _specs(part: SavedPart) -> list[TableSpec]:
    return [table.spec for table in part.tables if not table.spec.name.startswith(BUFFER)]


def _merged(
    chain: OpenFolder,
    parts: Sequence[SavedPart],
    tables: list[SavedTable],
    cancelled: Callable[[], bool],
) -> Iterator[Packed]:
    """Yield the pieces of all tables. After a table's pieces, add its record to `tables`."""
    places = {save.id: place for place, save in enumerate(chain.saves)}
    wanted = [
        ShardToRead(save.id, part, shard)
        for save, part in reversed(list(zip(chain.saves, parts, strict=True)))
        for shard in part.shards
        if save is chain.saves[-1] or any(piece.kind is not PieceKind.DENSE for piece in shard.pieces)
    ]
    later = {table.spec.name: LaterKeys() for table in parts[-1].tables}
    rows = dict.fromkeys(later, 0)
    number = 0
    for item, tensors in read_shards(chain.folder, wanted):
        if cancelled():
            raise SaveError("the merge was abandoned")
        for piece in item.shard.pieces:
            mine = {
                name.removeprefix(piece.prefix): each
                for name, each in tensors.items()
                if name.startswith(piece.prefix)
            }
            if piece.kind is PieceKind.DENSE:
                if item.save != chain.saves[-1].id:
                    continue
                kept = {name: each.clone() for name, each in mine.items()}
            else:
                keys = mine["keys"].numpy()
                some = torch.from_numpy(later[piece.table].missing(places[item.save], keys))
                kept = {name: each[some] for name, each in mine.items()}
            if piece.kind is PieceKind.REMOVED or not len(kept["values"]):
                continue
            count = len(kept["values"])
            rows[piece.table] += count
            number += 1
            yield Packed(replace(piece, number=number, rows=count), kept)
    for table in parts[-1].tables:
        name = table.spec.name
        same = [each for part in parts for each in part.tables if each.spec.name == name]
        count = table.rows if table.spec.kind is TableKind.DENSE else rows[name]
        tables.append(replace(table, rows=count, error=max(each.error for each in same)))
