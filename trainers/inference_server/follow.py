"""The values of a published folder, version after version, in files of the cache that workers map. For one
thread. Any folder of saves will do: a chain that continues is continued, another one is read as a whole.
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
    """A version in the cache. `number`: grows with each; `version`: its name in answers; `time`: of its cut,
    None where the folder does not say it; `dense`: flat values by parameter.
    """

    number: int
    version: str
    time: float | None
    dense: CacheFile
    tables: Mapping[str, SharedVersion]


@frozen
class _Applied:
    """The last save that has been read: its stream ("": of no published folder), id and number."""

    stream: str
    id: str
    number: int

    def is_last_of(self, manifest: Manifest) -> bool:
        """The last save of a stream gets another id when it becomes a base."""
        last = manifest.saves[-1]
        if manifest.stream:
            return (manifest.stream, last.number) == (self.stream, self.number)
        return last.id == self.id


class Follower:
    """Of one folder or URL."""

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
        """The version that is there now, if it is another one than at the last call. `oldest`: the smallest
        number of a version that a worker may be reading. Raises LoadError; then the next call tries again.
        """
        self._forget(oldest)
        manifest = current_manifest(self._where)
        if self._applied is not None and self._applied.is_last_of(manifest):
            return None
        opened = open_saves(self._where)
        number = next(self._numbers)
        todo = self._continued(opened)
        before = set(self._files)
        self._applied = None  # if it fails half-way, all is read again
        try:
            if todo is None:
                self._begin(opened)
            self._apply(opened, opened.saves if todo is None else todo, number)
            return self._followed(opened, number)
        except LoadError:
            for path in self._files.keys() - before:
                self._cache.remove(self._files.pop(path))
            raise

    def _continued(self, opened: OpenFolder) -> Sequence[OpenSave] | None:
        """The saves that follow what is here; None: it is another chain."""
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
        """Other files; those of the former tables go when no worker reads them any more."""
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
    """Of all tables; `files`: those that exist, by path."""

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
    """Raises LoadError unless the tables of a program (see `export`) are those of what it follows."""
    wanted = {str(each["name"]): each["dim"] for each in about.values()}
    found = {
        name: TableSpec.decode(bytes.fromhex(version.spec)).size for name, version in followed.tables.items()
    }
    if wanted == found:
        return
    inside = sorted(found.keys() - wanted.keys())
    if inside:
        raise LoadError(
            f"the bundle has no table {inside[0]!r} outside of its program, and {where} has: save it with "
            "fleet.save_inference_model(..., rows=False)"
        )
    raise LoadError(f"the program reads the tables {wanted} (values of a row), and {where} has {found}")
