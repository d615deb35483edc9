"""Follow a published directory, and write its values, version after version, to cache files that workers map.

Use it from one thread. Any directory of saved tables works. The follower continues a chain that it has
started, and reads any other chain as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fleetrun.frozen import frozen, frozen_by_name
from trainers.inference_server.files import Cache, CacheFile
from trainers.ps.saves.manifest import Manifest, current_manifest, range_of
from trainers.ps.saves.read import OpenFolder, OpenSave, chunks, open_saves
from trainers.ps.saves.write import Removed
from trainers.ps.tables.shared import SharedTable, SharedVersion
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.tables.storage import DenseRows, SparseRows
from trainers.serving.weights import safetensors
from trainers.storage.errors import LoadError


@frozen_by_name
class Followed:
    """A version in the cache.

    `number` grows with each version. `version` is its name in answers. `time` is the time of its cut, or None
    if the directory does not contain it. `dense` holds flat values by parameter.
    """

    number: int
    version: str
    time: float | None
    dense: CacheFile
    tables: Mapping[str, SharedVersion]


@frozen
class _Applied:
    """The last saved version that was read, with its stream ("" without a published directory), id and
    number.
    """

    stream: str
    id: str
    number: int

    def is_last_of(self, manifest: Manifest) -> bool:
        """Return True if this is the last version of the manifest.

        In a stream the number decides, because the last version gets another id when it becomes a full
        version.
        """
        last = manifest.saves[-1]
        if manifest.stream:
            return (manifest.stream, last.number) == (self.stream, self.number)
        return last.id == self.id


class Follower:
    """Follows one directory or URL."""

    def __init__(self, where: str, cache: Cache) -> None:
        self._where = where
        self._cache = cache
        self._numbers = itertools.count(1)
        self._names = itertools.count(1)
        self._applied: _Applied | None = None
        self._tables: dict[str, SharedTable] = {}
        self._dense: dict[str, torch.Tensor] = {}
        self._files: dict[str, CacheFile] = {}
        self._unused: list[tuple[int, str]] = []

    def look(self, oldest: int) -> Followed | None:
        """Return the current version if it differs from the last call, else None.

        `oldest` is the smallest number of a version that a worker may be reading. Raises LoadError. The next
        call then tries again.
        """
        self._forget(oldest)
        manifest = current_manifest(self._where)
        if self._applied is not None and self._applied.is_last_of(manifest):
            return None
        opened = open_saves(self._where)
        number = next(self._numbers)
        todo = self._continued(opened)
        before = set(self._files)
        self._applied = None  # after a failure half-way, the next call reads all again
        try:
            if todo is None:
                self._begin(opened)
            self._apply(opened, opened.saves if todo is None else todo, number)
            opened.check_alive({name: table.alive for name, table in self._tables.items()})
            return self._followed(opened, number)
        except LoadError:
            for path in self._files.keys() - before:
                self._cache.remove(self._files.pop(path))
            raise

    def _continued(self, opened: OpenFolder) -> Sequence[OpenSave] | None:
        """Return the saved versions that follow the applied one, or None for another chain."""
        if self._applied is None or self._specs(opened) != {
            name: table.spec for name, table in self._tables.items()
        }:
            return None
        done = self._applied
        if opened.stream:
            follows = opened.stream == done.stream and opened.saves[0].number <= done.number
            return [save for save in opened.saves if save.number > done.number] if follows else None
        ids = [save.id for save in opened.saves]
        return opened.saves[ids.index(done.id) + 1 :] if done.id in ids else None

    def _begin(self, opened: OpenFolder) -> None:
        """Start new files. The former tables' files are removed when the last worker stops reading them."""
        self._dense = {}
        self._tables = {}
        files = _TableFiles(self._cache, self._files, self._names)
        rows = dict.fromkeys(self._specs(opened), 0)
        for part in opened.saves[0].parts:
            for table in part.tables:
                if table.spec.name in rows:
                    rows[table.spec.name] += table.rows
        for name, spec in self._specs(opened).items():
            self._tables[name] = SharedTable(spec, rows[name], files)

    def _apply(self, opened: OpenFolder, todo: Sequence[OpenSave], number: int) -> None:
        for each in chunks(replace(opened, saves=tuple(todo))):
            chunk, name = each.chunk, each.spec.name
            if isinstance(chunk, DenseRows):
                self._put_dense(each.spec, chunk.values)
            elif isinstance(chunk, SparseRows):
                self._tables[name].put(number, chunk.keys, chunk.values)
            elif isinstance(chunk, Removed):
                self._tables[name].remove(number, chunk.keys)

    def _put_dense(self, spec: TableSpec, values: torch.Tensor) -> None:
        block = range_of(spec)
        whole = self._dense.get(block.parameter, torch.empty(0))
        if len(whole) < block.stop:
            whole = torch.cat([whole, torch.zeros(block.stop - len(whole))])
            self._dense[block.parameter] = whole
        whole[block.start : block.stop] = values

    def _followed(self, opened: OpenFolder, number: int) -> Followed:
        last = opened.saves[-1]
        dense = self._cache.write(f"dense-{number}.safetensors", safetensors(self._dense)[1])
        self._files[dense.path] = dense
        tables = {name: table.version(number) for name, table in self._tables.items()}
        named = {dense.path, *(path for each in tables.values() for path in (each.index, each.records))}
        known = {path for _, path in self._unused}
        self._unused += [(number, path) for path in self._files if path not in named | known]
        self._applied = _Applied(opened.stream, last.id, last.number)
        return Followed(
            number=number,
            version=f"{opened.stream}-{last.number}" if opened.stream else last.id,
            time=last.time or None,
            dense=dense,
            tables=tables,
        )

    def _forget(self, oldest: int) -> None:
        for table in self._tables.values():
            table.forget(oldest)
        for number, path in self._unused:
            if number <= oldest:
                self._cache.remove(self._files.pop(path))
        self._unused = [each for each in self._unused if each[0] > oldest]

    def _specs(self, opened: OpenFolder) -> dict[str, TableSpec]:
        return {name: spec for name, spec in opened.specs().items() if spec.kind is TableKind.SPARSE}


class _TableFiles:
    """The files of all tables. `files` maps the existing ones by path."""

    def __init__(self, cache: Cache, files: dict[str, CacheFile], names: Iterator[int]) -> None:
        self._cache = cache
        self._files = files
        self._names = names

    def make(self, size: int) -> tuple[str, NDArray[np.uint8]]:
        file = self._cache.make(f"table-{next(self._names)}", size, reserve=False)
        self._files[file.path] = file
        return file.path, file.mapped()

    def reserve(self, name: str, stop: int) -> None:
        self._cache.reserve(self._files[name], stop)


def check_tables(about: Mapping[str, Mapping[str, object]], followed: Followed, where: str) -> None:
    """Raise LoadError unless the tables of a program (see `export`) match the followed tables."""
    wanted = {str(each["name"]): each["dim"] for each in about.values()}
    found = {
        name: TableSpec.decode(bytes.fromhex(version.spec)).size for name, version in followed.tables.items()
    }
    if wanted == found:
        return
    inside = sorted(found.keys() - wanted.keys())
    if inside:
        raise LoadError(
            f"{where} has the table {inside[0]!r}, but the program of the bundle contains its own rows of "
            "this table. Save the bundle with fleet.save_inference_model(..., rows=False)"
        )
    raise LoadError(f"the program reads the tables {wanted} (with values per row), but {where} has {found}")
