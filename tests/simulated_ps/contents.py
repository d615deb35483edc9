"""What is in the tables of a simulated server, read without a message, and checks that need nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from trainers.kernels.compiled import Floats, Keys
from trainers.ps.kernels.eviction import FLOORS, NO_USES, TOTAL, find_evicted
from trainers.ps.kernels.rows import VALUES
from trainers.ps.server.members import Members
from trainers.ps.server.state import dump_state
from trainers.ps.server.steps import Steps
from trainers.ps.server.store import Store
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.storage import Storage, keys_of

Rows = dict[int, bytes]
"""Records by key."""


def alive(storage: Storage) -> tuple[Keys, Floats]:
    """Return the keys and records of rows that are not evicted."""
    records = storage.records(0, len(storage))
    keys = keys_of(records)
    if storage.uses is not NO_USES:
        evicted = np.zeros(len(keys), np.bool_)
        find_evicted(keys, records[:, -1].copy(), storage.uses.clock[FLOORS:], evicted)
        keys, records = keys[~evicted], records[~evicted]
    return keys, records


def rows_of(table: SparseTable) -> Rows:
    """Return all rows of a table. Rows that may be on a disk are without their stamps."""
    storage, _, disk = table.kept
    if disk is None:
        keys, records = alive(storage)
        return {key: record.tobytes() for key, record in zip(keys.tolist(), records, strict=True)}
    records = storage.records(0, len(storage))
    found = list(zip(keys_of(records).tolist(), records, strict=True))
    if len(disk.places):
        away = disk.places.keys(0, len(disk.places))
        places = disk.places.column(0).view(np.uint32).copy()
        found += zip(away.tolist(), disk._read(places, away), strict=True)
    return {key: record[:-1].tobytes() for key, record in found}


def values_of(table: SparseTable) -> dict[int, bytes]:
    """Return the values of all rows of a table, in the type of its rows."""
    width = table.spec.size * table.spec.rows.dtype.dtype.itemsize
    start = 4 * VALUES
    return {key: record[start : start + width] for key, record in rows_of(table).items()}


def state_of(members: Members, store: Store, steps: Steps) -> dict[str, Any]:
    """Return everything that a server with a write-ahead log must recover."""
    blob = dump_state(members, store, steps)
    start, stop = 4, 4 + int.from_bytes(blob[:4], "little")
    header = json.loads(blob[start:stop])
    found: dict[str, Any] = {f"member {each['rank']}": each for each in header.pop("members")}
    for each in found.values():
        del each["applied"]  # pushes of steps that the server has already need no record
    found |= {"header": header, "messages": blob[stop:]}
    for number, table in store.tables.items():
        if isinstance(table, DenseTable):
            continue
        found[f"step {number}"] = table.step
        found[f"rows {number}"] = rows_of(table)
        _, candidates, disk = table.kept
        if candidates is not None:
            keys, records = alive(candidates)
            pairs = zip(keys.tolist(), records, strict=True)
            found[f"candidates {number}"] = {key: record.tobytes() for key, record in pairs}
        if disk is None:
            found[f"clocks {number}"] = [[*map(float, clock)] for clock in table.clocks()]
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Describe how two states differ."""
    lines = []
    for name in sorted(one.keys() | other.keys()):
        mine, theirs = one.get(name), other.get(name)
        if mine == theirs:
            continue
        if isinstance(mine, dict) and isinstance(theirs, dict):
            keys = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
            shown = [(key, _shown(mine.get(key)), _shown(theirs.get(key))) for key in keys[:4]]
            lines.append(f"{name}: {len(keys)} keys of {len(mine)} and {len(theirs)}: {shown}")
        else:
            lines.append(f"{name}: {mine!r:.600} != {theirs!r:.600}")
    return lines


def _shown(value: object) -> object:
    return np.frombuffer(value, np.float32).tolist() if isinstance(value, bytes) else value


def budget_errors(store: Store) -> list[str]:
    """Return how the counts of budgets differ from their rows."""
    wrong = []
    for budget in store.budgets:
        total, cells = budget.uses.clock[TOTAL], budget.uses.cells.sum()
        if total != cells:
            wrong.append(f"a budget of {budget.bound} counts {total:g}, and its cells {cells}")
        if not budget.on_disk:
            rows = sum(each.row_cost * len(alive(each._storage)[0]) for each in budget._tables)  # type: ignore[attr-defined]
            if total != rows:
                wrong.append(f"a budget of {budget.bound} counts {total:g}, and its rows cost {rows}")
    return wrong
