"""Read the entries of some keys without any change to the table. This makes no row, counts no use, and leaves
rows on disk.
"""

from __future__ import annotations

import numpy as np

from fleetrun.aliases import Document
from trainers.kernels.compiled import Keys
from trainers.ps.kernels.eviction import FLOORS, find_evicted
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.storage import SparseRows, Storage, split_records

Looked = Document


def look(table: SparseTable, keys: Keys) -> list[Looked]:
    """Return the entry of each key.

    An entry has the `state`, which is `row`, `row on disk`, `evicted`, `candidate` or `no row`. For a row, it
    also has the `values`, the states of its `optimizer`, and `shows`, `clicks` and `unseen_days` if the table
    has statistics.
    """
    storage, candidates, disk = table.kept
    found: list[Looked] = [{"state": "no row"} for _ in keys]
    if candidates is not None:
        slots = candidates.find(keys)
        for place in _alive(candidates, keys, slots):
            found[place] = {"state": "candidate", "pulls": float(candidates.column(0)[slots[place]])}
    row_states = table.spec.rule.row_states
    slots = storage.find(keys)
    here = np.flatnonzero(slots >= 0)
    records = storage.records(0, len(storage))[slots[here]]
    alive = set(_alive(storage, keys, slots).tolist())
    for number, place in enumerate(here.tolist()):
        rows = split_records(storage, records[number : number + 1], row_states)
        found[place] = described("row", rows) if place in alive else {"state": "evicted"}
    if disk is not None:
        for place, record in disk.look(keys):
            found[place] = described("row on disk", split_records(storage, record, row_states))
    return found


def _alive(storage: Storage, keys: Keys, slots: Keys) -> Keys:
    """Return the places of keys with a slot, without the evicted ones."""
    here = np.flatnonzero(slots >= 0)
    if not storage.evicts or not len(here):
        return here
    evicted = np.zeros(len(here), np.bool_)
    stamps = storage.records(0, len(storage))[slots[here], -1]
    find_evicted(keys[here], stamps, storage.uses.clock[FLOORS:].copy(), evicted)
    return here[~evicted]


def described(state: str, rows: SparseRows, place: int = 0) -> Looked:
    """Return the entry of one of these rows for `look`."""
    row: Looked = {"state": state, "values": rows.values[place].float().tolist()}
    if rows.state:
        row["optimizer"] = [each[place].tolist() for each in rows.state]
    statistics = [] if rows.statistics is None else rows.statistics[place].tolist()
    if len(statistics) >= 3:
        row |= dict(zip(("shows", "clicks", "unseen_days"), statistics, strict=False))
    return row
