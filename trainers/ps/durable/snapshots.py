"""Snapshots: a server's whole state at one moment, in a durable folder. Knows their names, which one counts
and when an older one may go; leaves the files to `saved`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainers.ps.durable.errors import DamagedError
from trainers.ps.saved.descriptors import sync_folder
from trainers.ps.saved.errors import LoadError
from trainers.ps.saved.loading import Place, load_tables
from trainers.ps.saved.manifest import MANIFEST, FileRecord
from trainers.ps.saved.modes import SaveMode
from trainers.ps.saved.reading import OpenFolder, open_saves, read_file
from trainers.ps.saved.saves import commit, new_id
from trainers.ps.saved.source import TableCut, Target
from trainers.ps.saved.task import SaveTask
from trainers.ps.saved.writing import SHARD_BYTES, SaveOrder
from trainers.ps.tables.spec import TableSpec

_PREFIX = "snapshot-"
_ALONE = Place(0, 1)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot. `number`: of the first journal record that is not in it. `blob`: what the
    service gave for itself.
    """

    number: int
    step: int
    blob: bytes
    _opened: OpenFolder

    @property
    def specs(self) -> list[TableSpec]:
        return [table.spec for table in self._opened.tables().values()]

    def load(self, tables: Sequence[Target]) -> None:
        """Load everything into empty tables of the snapshot's specs. Raises DamagedError."""
        try:
            load_tables(self._opened, tables, _ALONE)
        except LoadError as error:
            raise DamagedError(_damaged(error)) from error


def newest(folder: Path) -> Snapshot | None:
    """The last complete snapshot. Raises DamagedError when its files are not as they were written."""
    complete = [number for number, path in _paths(folder) if (path / MANIFEST).exists()]
    if not complete:
        return None
    try:
        opened = open_saves(_path(folder, complete[-1]))
        save = opened.saves[-1]
        blob = save.parts[0].blob
        content = b"" if blob is None else read_file(opened.folder, save.id, blob).numpy().tobytes()
    except LoadError as error:
        raise DamagedError(_damaged(error)) from error
    return Snapshot(complete[-1], save.step, content, opened)


def begin(
    folder: Path,
    number: int,
    step: int,
    cuts: Sequence[TableCut],
    blob: bytes,
    *,
    then: Callable[[], None],
    done: Callable[[SaveTask], None] | None,
    shard_bytes: int = SHARD_BYTES,
) -> SaveTask:
    """Write a snapshot of the moment before journal record `number` in the background. When it counts,
    `then` is called in the writing thread.
    """
    where = _path(folder, number)
    where.mkdir(mode=0o700, exist_ok=True)
    order = SaveOrder(
        id=new_id(step), mode=SaveMode.ALL, step=step, server=0, servers=1, shard_bytes=shard_bytes
    )

    def finish(part: FileRecord) -> None:
        commit(where, order.id, order.mode, step, [part])
        sync_folder(folder)  # before anything older goes: the snapshot must be found after a power failure
        then()

    return SaveTask(where, order, cuts, blob=blob, then=finish, done=done)


def remove_before(folder: Path, number: int) -> None:
    """Remove the snapshots before that of `number`, and unfinished ones, but for one that is being written.
    Raises OSError.
    """
    for found, path in _paths(folder):
        if found < number:
            # The manifest first: what is left of a removal must not pass for a snapshot.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)


def remove_unfinished(folder: Path) -> None:
    """Remove what crashes left behind. Raises OSError."""
    for _, path in _paths(folder):
        if not (path / MANIFEST).exists():
            shutil.rmtree(path)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{_PREFIX}{number:020d}"


def _paths(folder: Path) -> list[tuple[int, Path]]:
    found = [(path.name.removeprefix(_PREFIX), path) for path in folder.glob(f"{_PREFIX}*")]
    return sorted((int(digits), path) for digits, path in found if digits.isdigit())


def _damaged(error: LoadError) -> str:
    return f"the snapshot cannot be used: {error} Or remove the folder and begin anew from the last save."
