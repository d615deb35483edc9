"""Warm up kernels by calls on a few rows, so that they are compiled before a request needs them.

One process compiles a kernel that is not cached on this node, while other processes continue with the next
(see `kernels.compiled`). The order here therefore distributes the work of a first start. A server starts with
new rows, and a trainer starts with batches and then its own tables. Kernels that few jobs need are compiled
at their first call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import torch

from fleetrun.aliases import Callback
from trainers.ps.kernels.bags import are_bounds, find_bounds, pool_bags, scatter_bags, weigh_bags
from trainers.ps.kernels.batch import (
    all_finite,
    arrange_run,
    distinct_run,
    find_run,
    gather_calls,
    merge_runs,
    scatter_calls,
)
from trainers.ps.kernels.index import SECRET
from trainers.ps.kernels.memory import touch_pages
from trainers.ps.kernels.rows import without_row
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.looking import look
from trainers.ps.tables.rules import (
    FTRL,
    RULES,
    SGD,
    Adagrad,
    Adam,
    AnyRule,
    Fixed,
)
from trainers.ps.tables.run import Lines
from trainers.ps.tables.sparse import SparseTable, make_table
from trainers.ps.tables.spec import (
    Bound,
    Entry,
    EntryKind,
    RowOptions,
    ShrinkPolicy,
    TableKind,
    TableSpec,
)
from trainers.ps.tables.storage import Storage

_KEYS = torch.arange(3)
_ROWS = torch.ones(3, 1)
_ONE_TABLE = np.array([3])


def warm_up_server() -> None:
    """Compile the kernels that every server needs. The tables are not known yet."""
    use_rows()
    use_batches()


def warm_up_trainer(specs: Iterable[TableSpec], *, geo: bool, bags: bool) -> None:
    """Compile the kernels of a trainer, and the kernels with which servers on this node will train its
    tables.

    With `geo`, also compile kernels for the trainer's own rows. With `bags`, compile kernels for
    EmbeddingBags.
    """
    use_batches()
    if bags:
        use_bags()
    use_tables(specs, _KEYS[:0])  # servers warm up new rows
    if geo:
        use_saves()


def use_batches() -> None:
    """Compile the kernels of a trainer's batch."""
    merge_runs([(np.array([len(_KEYS)]), _KEYS, _ROWS)])
    all_finite(_ROWS)
    ids, none, one = _KEYS.numpy(), np.empty(0, np.int64), np.full(1, -1)
    ends, spans, each = np.array([0, 0]), np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
    distinct_run(none, each, np.zeros(2, np.int64), SECRET, none, none, none, none, ends)
    arrange_run(ids, ends, one, none, each, ids.copy(), spans, ids.copy())
    find_run(none, ends, one, np.zeros(1, np.bool_), one, one.copy(), one.copy())
    gather_calls(_ROWS.numpy(), none, none, none, none, none, none)
    scatter_calls(none, none, none, none, none, none, none, _ROWS.numpy().copy())


def use_bags() -> None:
    """Compile the kernels of an EmbeddingBag in a trainer."""
    rows, none, weights = _ROWS.numpy().copy(), np.empty(0, np.int64), np.empty(0, np.float32)
    features, bounds = np.empty((0, 6), np.int64), np.zeros(1, np.int64)
    find_bounds(none, True, bounds)
    are_bounds(none, True, bounds)
    pool_bags(rows, none, none, features, bounds, weights, rows)
    scatter_bags(rows, none, none, features, bounds, weights, rows)
    weigh_bags(rows, rows, none, none, features, bounds, weights)


def use_rows() -> None:
    """Compile a server's kernels of rows, which are independent of entry filter and rule."""
    table = _table(Fixed())
    table.assign(_KEYS, _ROWS)
    run = Lines({0: table}).run(0, 1)
    run.pull(_ONE_TABLE, _KEYS + 1, insert=True)
    run.make_room([(_ONE_TABLE, _KEYS)])
    touch_pages(np.zeros(1, np.int64), 0, 1)
    storage, none = Storage(1, 0, 0), np.empty(0, np.int64)
    # Call without_row too. Otherwise its first call comes when memory is short, too late to compile it.
    without_row(*storage.arrays, none, none)


def use_tables(specs: Iterable[TableSpec], keys: torch.Tensor = _KEYS) -> None:
    """Compile a push and a pull of each kind of table."""
    for spec in dict.fromkeys(map(_small, specs)):
        table, rows = make_table(spec), _ROWS[: len(keys)]
        if isinstance(table, DenseTable):
            if not isinstance(spec.rule, Fixed):
                table.apply(torch.ones(1), 0.1)
            continue
        run, spans = Lines({0: table}).run(0, 1), np.array([len(keys)])
        if not isinstance(spec.rule, Fixed):
            run.apply(spans, keys, rows, 0.1)
        run.pull(spans, keys, insert=True)
        if (bounded := table.bounded) is not None:
            table.assign(_KEYS, _ROWS)
            bounded.begin_sweep()
            run.pull(_ONE_TABLE, _KEYS, insert=True)
            bounded.sweep(1)
            look(table, _KEYS.numpy())


def use_every_table() -> None:
    """Compile the kernels of every rule, entry filter and bound."""
    blocks = (SGD(weight_decay=0.5), SGD(momentum=0.5), Adagrad(), Adam(), FTRL())
    use_tables(TableSpec(kind=TableKind.DENSE, name="", size=1, rule=rule) for rule in blocks)
    use_tables(_spec(rule()) for rule in RULES.values())
    use_tables([_spec(SGD(momentum=0.5))])
    use_tables(_spec(SGD(), entry) for entry in EntryKind)
    use_tables([_bounded(_spec(SGD()))])


def use_saves() -> None:
    """Compile the kernels of saving and loading, and of a trainer's rows in geo training."""
    table = _table(SGD())
    table.assign(_KEYS, _ROWS)
    with table.cut(mark=True) as cut:
        table.load(cut.read(0, cut.rows))


def use_rest() -> None:
    """Compile the kernels of shrink and of evaluation."""
    table = _table(SGD(), EntryKind.SHOW_CLICK)
    table.pull(_KEYS)
    table.begin_shrink(ShrinkPolicy())
    table.pull(_KEYS, insert=False)
    table.shrink_some(len(_KEYS))
    table = _table(SGD(), EntryKind.COUNT)
    table.begin_shrink(ShrinkPolicy())
    table.shrink_some(len(_KEYS))


EVERYTHING: tuple[Callback, ...] = (
    use_rows,
    use_batches,
    use_bags,
    use_saves,
    use_every_table,
    use_rest,
)


def _small(spec: TableSpec) -> TableSpec:
    """Return a spec of size 1 that needs the same kernels."""
    rows = RowOptions(entry=Entry(spec.rows.entry.kind, 1.0), statistics=spec.rows.statistics)
    small = TableSpec(kind=spec.kind, name="warm", size=1, rule=spec.rule, rows=rows)
    return small if spec.rows.bound is None else _bounded(small)


def _bounded(spec: TableSpec) -> TableSpec:
    return dataclasses.replace(spec, rows=dataclasses.replace(spec.rows, bound=Bound(rows=1)))


def _spec(rule: AnyRule, entry: EntryKind = EntryKind.ALL) -> TableSpec:
    rows = RowOptions(entry=Entry(entry, 1.0))
    return TableSpec(kind=TableKind.SPARSE, name="warm", size=1, rule=rule, rows=rows)


def _table(rule: AnyRule, entry: EntryKind = EntryKind.ALL) -> SparseTable:
    return SparseTable(_spec(rule, entry))
