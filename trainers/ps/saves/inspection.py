"""Inspect saved tables without servers. `python -m trainers.ps.saves.inspection COMMAND ...` prints a JSON
document for `fleetrun tables`. Shards are read one after the other, so that no whole table is in memory.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from fleetrun.aliases import Document, Integers
from trainers.checks import nearest
from trainers.errors import FleetError, UsageError
from trainers.kernels.compiled import Floats, Keys, Mask
from trainers.ps.kernels.batch import owners
from trainers.ps.saves.manifest import SavedTable
from trainers.ps.saves.read import LaterKeys, OpenFolder, OpenSave, chunks, open_saves
from trainers.ps.saves.write import Removed
from trainers.ps.tables.looking import described
from trainers.ps.tables.spec import TableKind, TableSpec, holders
from trainers.ps.tables.storage import Candidates, DenseRows, SparseRows

Rows = tuple[Keys, Floats]
"""Keys (n,), and values (n, dim)."""

AT_ONCE = 1 << 28
"""The approximate bytes of rows that a comparison holds in memory."""


def saved_as(save: OpenSave, name: str) -> list[SavedTable]:
    """Return the records of a table in the parts of a save. Servers without rows of the table have a record
    too.
    """
    return [table for part in save.parts for table in part.tables if table.spec.name == name]


def sparse_spec(opened: OpenFolder, name: str) -> TableSpec:
    """Return the spec of a sparse table. Raises UsageError unless the save has a sparse table of
    this name.
    """
    specs = opened.specs()
    sparse = [each.name for each in specs.values() if each.kind is TableKind.SPARSE]
    if name not in sparse:
        what = "is dense" if name in specs else "does not exist"
        others = nearest(name, sparse) if sparse else "; the saved tables include no sparse table"
        raise UsageError(f"Table {name!r} {what} in {opened.folder.where}{others}")
    return specs[name]


# ---- Commands. Each returns the document to print.


def listed(where: str) -> Document:
    """List the tables of a save, with their rows in the first save and in the incremental saves. For a
    published directory, also return the version and its time in seconds since 1970.
    """
    opened = open_saves(where)
    tables = []
    for spec in sorted(opened.specs().values(), key=lambda spec: (spec.kind is TableKind.DENSE, spec.name)):
        saved = [saved_as(save, spec.name) for save in opened.saves]
        rows = [sum(each.rows for each in some) for some in saved]
        sparse = spec.kind is TableKind.SPARSE
        tables.append(
            {
                "table": spec.name,
                "kind": spec.kind.name.lower(),
                "rows": rows[0] if sparse else None,
                "changed": rows[1:] if sparse else [],
                "values": spec.size,
                "type": spec.rows.dtype.name.lower(),
                "rule": type(spec.rule).__name__,
                "updates": max(each.step for some in saved for each in some),
                "servers": len(holders(spec, len(opened.saves[-1].parts))) if sparse else 1,
            }
        )
    files = [shard.file.size for save in opened.saves for part in save.parts for shard in part.shards]
    last = opened.saves[-1]
    return {
        "save": opened.folder.where,
        "step": last.step,
        "mode": opened.saves[0].mode.name.lower(),
        "deltas": len(opened.saves) - 1,
        **({"version": last.number, "time": last.time} if opened.stream else {}),
        "servers": len(last.parts),
        "bytes": sum(files),
        "tables": tables,
    }


def shown(where: str, name: str, *words: str) -> Document:
    """Return rows by key, from the last save that has them: values, optimizer state and statistics."""
    opened = open_saves(where)
    sparse_spec(opened, name)
    keys = np.array([key_of(word) for word in words], np.int64)
    places = [np.array(_places(save, name), np.int64) for save in opened.saves]
    servers = [set(owners(torch.from_numpy(keys), some).tolist()) if len(some) else set() for some in places]
    found: dict[int, Document] = {int(key): {"state": "no row"} for key in keys}
    for each in chunks(opened, [name], servers=servers):
        chunk = each.chunk
        if isinstance(chunk, DenseRows) or (isinstance(chunk, Candidates) and each.save < len(servers) - 1):
            continue  # a candidate of an earlier save has a row now, or is in the last save too
        for place in np.flatnonzero(np.isin(chunk.keys.numpy(), keys)).tolist():
            found[int(chunk.keys[place])] = _row(chunk, place)
    return {"table": name, "rows": [{"key": key, **row} for key, row in found.items()]}


def key_of(word: str) -> int:
    """Return the key. Raises UsageError unless the word is a whole number of 64 bits."""
    try:
        key = int(word)
    except ValueError:
        raise UsageError(f"Key {word!r} is not a whole number") from None
    if not -(2**63) <= key < 2**63:
        raise UsageError(f"Key {word} does not fit into 64 bits")
    return key


def _row(chunk: SparseRows | Removed | Candidates, place: int) -> Document:
    if isinstance(chunk, Removed):
        return {"state": "removed"}
    if isinstance(chunk, Candidates):
        return {"state": "candidate", "pulls": float(chunk.counts[place])}
    return described("row", chunk, place)


def compared(where: str, other: str, *names: str) -> Document:
    """Compare each sparse table that both saves have. Return how many rows only one save has, how many rows
    differ, and the difference. `names` selects tables.
    """
    both = open_saves(where), open_saves(other)
    for name in names:
        for each in both:
            sparse_spec(each, name)
    mine, theirs = (
        {name: spec for name, spec in each.specs().items() if spec.kind is TableKind.SPARSE} for each in both
    )
    tables = []
    for name in sorted(names or mine.keys() | theirs.keys()):
        if name not in mine or name not in theirs:
            tables.append({"table": name, "difference": f"not in {where if name not in mine else other}"})
        elif mine[name].size != theirs[name].size:
            tables.append({"table": name, "difference": f"rows of {mine[name].size} and {theirs[name].size}"})
        else:
            tables.append(_compared(both, name))
    return {"tables": tables}


def _compared(both: tuple[OpenFolder, OpenFolder], name: str) -> Document:
    result = dict.fromkeys(("rows", "other", "only", "only_other", "changed", "not_finite"), 0)
    largest, total, count = 0.0, 0.0, 0
    for (keys, values), (others, theirs) in _in_parts(both, name):
        _, here, there = np.intersect1d(keys, others, assume_unique=True, return_indices=True)
        first, second = values[here], theirs[there]
        differ = (first != second) & ~(np.isnan(first) & np.isnan(second))
        finite = np.isfinite(first) & np.isfinite(second)
        apart = np.subtract(first, second, where=finite, out=np.zeros(first.shape))
        np.abs(apart, out=apart)
        result["rows"] += len(keys)
        result["other"] += len(others)
        result["only"] += len(keys) - len(here)
        result["only_other"] += len(others) - len(there)
        result["changed"] += int(differ.any(axis=1).sum())
        result["not_finite"] += int((~finite).any(axis=1).sum())
        largest, total = max(largest, float(apart.max(initial=0.0))), total + float(apart.sum())
        count += int(finite.sum())
    return {"table": name, **result, "largest": largest, "mean": total / count if count else 0.0}


def _in_parts(both: tuple[OpenFolder, OpenFolder], name: str) -> Iterator[tuple[Rows, Rows]]:
    """Yield the rows of a table in both saves, part by part. If the same servers wrote both saves, a part
    holds the rows of one server. The rows of a server with many rows are divided by a hash of the key.
    """
    spec = both[0].specs()[name]
    places = {_places(save, name) for opened in both for save in opened.saves}
    servers: Sequence[int | None] = places.pop() if len(places) == 1 else (None,)
    for server in servers:
        rows = max(
            sum(each.rows for save in opened.saves for each in saved_as(save, name)) for opened in both
        )
        rows //= len(servers)
        passes = max(1, math.ceil(2 * rows * (8 + 4 * spec.size) / AT_ONCE))
        for number in range(passes):
            mine, theirs = (_rows(each, spec, server, (number, passes)) for each in both)
            yield mine, theirs


def _places(save: OpenSave, name: str) -> Integers:
    """Return the servers that share the rows of a table, or none if the save lacks the table."""
    saved = saved_as(save, name)
    return holders(saved[0].spec, len(save.parts)) if saved else ()


def _rows(opened: OpenFolder, spec: TableSpec, server: int | None, part: tuple[int, int]) -> Rows:
    """Return the keys and values of part (number, parts) of a table, divided by a hash of the key."""
    number, parts = part
    keys, values = [np.empty(0, np.int64)], [np.empty((0, spec.size), np.float32)]
    for some, rows in newest(opened, spec.name, server, lambda keys: _part_of(keys, parts) == number):
        keys.append(some)
        values.append(rows)
    return np.concatenate(keys), np.concatenate(values)


def _part_of(keys: Keys, passes: int) -> Keys:
    """Return each key's part. The hash differs from the hash by which servers share keys, so the keys of one
    server are in all parts.
    """
    found: Keys = owners(torch.from_numpy(~keys), np.arange(passes)).numpy()
    return found


def newest(
    opened: OpenFolder,
    name: str,
    server: int | None = None,
    wanted: Callable[[Keys], Mask] | None = None,
) -> Iterator[Rows]:
    """Yield the keys and values of a table, or of one server, each key once, as in the last save that has it.
    With incremental saves, the keys that were read stay in memory.
    """
    later = LaterKeys()
    servers = None if server is None else [{server}] * len(opened.saves)
    for each in chunks(opened, [name], servers=servers, backwards=True):
        chunk = each.chunk
        if isinstance(chunk, DenseRows | Candidates):
            continue
        keys = chunk.keys.numpy()
        kept = later.missing(each.save, keys, None if wanted is None else wanted(keys))
        if isinstance(chunk, SparseRows) and kept.any():
            yield keys[kept], chunk.values[torch.from_numpy(kept)].float().numpy()


def _write_csv(path: Path, size: int, rows: Iterable[Rows]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["key", *(f"v{number}" for number in range(size))])
        for keys, values in rows:
            writer.writerows([key, *map(str, row)] for key, row in zip(keys.tolist(), values, strict=True))


def _write_parquet(path: Path, size: int, rows: Iterable[Rows]) -> None:
    """Write a file with `key` int64, and `values` as lists of float32 of fixed length."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.list_(pa.float32(), size)
    schema = pa.schema([("key", pa.int64()), ("values", kind)])
    with pq.ParquetWriter(path, schema) as writer:
        for keys, values in rows:
            lists = pa.FixedSizeListArray.from_arrays(values.reshape(-1), type=kind)
            writer.write_table(pa.table([keys, lists], schema=schema))


_FORMATS = {".csv": _write_csv, ".parquet": _write_parquet}


def exported(where: str, name: str, file: str) -> Document:
    """Write the keys and values of a table. The suffix of the file's name selects the format. The file
    appears when it is complete.
    """
    opened = open_saves(where)
    spec, path = sparse_spec(opened, name), Path(file)
    write = _FORMATS.get(path.suffix)
    if write is None:
        raise UsageError(f"{file} has no known format; its name must end in one of {', '.join(_FORMATS)}")
    part, counts = path.with_name(f".{path.name}.part"), list[int]()

    def counted() -> Iterator[Rows]:
        for keys, values in newest(opened, name):
            counts.append(len(keys))
            yield keys, values

    try:
        write(part, spec.size, counted())
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return {"table": name, "file": file, "rows": sum(counts), "bytes": path.stat().st_size}


def checked(where: str) -> Document:
    """Read all files, and compare them with the manifest. Find rows on a wrong server, repeated keys, and
    values that are not finite. The keys of one part are in memory at a time.
    """
    opened = open_saves(where)
    shards = [shard for save in opened.saves for part in save.parts for shard in part.shards]
    problems: list[str] = []
    rows = 0
    for (save, server), some in groupby(chunks(opened), key=lambda each: (each.save, each.part.server)):
        keys: dict[str, list[Keys]] = {}
        bad, strays = Counter[str](), Counter[str]()
        for each in some:
            chunk, name = each.chunk, each.spec.name
            if isinstance(chunk, SparseRows | DenseRows):
                bad[name] += int((~chunk.values.isfinite()).sum())
            if isinstance(chunk, SparseRows | Removed):
                places = np.array(holders(each.spec, each.part.servers))
                strays[name] += int((owners(chunk.keys, places) != server).sum())
            if isinstance(chunk, SparseRows):
                rows += len(chunk.keys)
                keys.setdefault(name, []).append(chunk.keys.numpy().copy())
        twice = {
            name: sum(map(len, each)) - len(np.unique(np.concatenate(each))) for name, each in keys.items()
        }
        for counts, what in (
            (bad, "values that are not finite"), (strays, "keys of other servers"), (twice, "duplicate keys")
        ):  # fmt: skip
            problems += [
                f"table {name!r} has {count} {what} in the part of server {server} of {opened.saves[save].id}"
                for name, count in counts.items()
                if count
            ]
    sizes = sum(shard.file.size for shard in shards)
    return {
        "save": opened.folder.where, "files": len(shards), "bytes": sizes, "rows": rows, "problems": problems
    }  # fmt: skip


COMMANDS: dict[str, Callable[..., Document]] = {
    "list": listed,
    "show": shown,
    "diff": compared,
    "export": exported,
    "check": checked,
}


def main(argv: Sequence[str]) -> int:
    command, *words = argv
    return print_document(lambda: COMMANDS[command](*words))


def print_document(make: Callable[[], Document]) -> int:
    """Print the document that `make` returns, and return 0. On a FleetError, print `{"error": ..., "usage":
    ...}` and return 1. `usage` is true if the command line was wrong.
    """
    try:
        document = make()
    except FleetError as error:
        document = {"error": str(error), "usage": isinstance(error, UsageError)}
    sys.stdout.write(json.dumps(document) + "\n")
    return 1 if "error" in document else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
