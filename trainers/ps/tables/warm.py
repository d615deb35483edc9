"""Warming up: kernels called on a handful of rows, before anybody waits for an answer. Knows which calls lead
to which kernels.

What is not on this machine yet is compiled: in a process for each kernel that none other is at (see
`kernels.compiled`). So the order here is how a job's processes share the work of its first start: a server
begins with new rows, a trainer with batches and then with what its own tables need. Kernels that few jobs
call are left to their first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np
import torch

from trainers.ps.kernels.batch import all_finite, merge_rows, split_by_server, unique
from trainers.ps.kernels.memory import touch_pages
from trainers.ps.tables.rules import FTRL, SGD, Adagrad, Adam, AnyRule, Fixed, SparseAdam
from trainers.ps.tables.sparse import SparseTable, make_table
from trainers.ps.tables.spec import (
    Entry,
    EntryKind,
    RowOptions,
    ShrinkPolicy,
    TableError,
    TableKind,
    TableSpec,
)

_KEYS = torch.arange(3)
_ROWS = torch.ones(3, 1)


def warm_up_server() -> None:
    """The kernels that every server needs, whatever its tables are: it does not know them yet."""
    use_rows()
    use_batches()


def warm_up_trainer(specs: Iterable[TableSpec], *, geo: bool) -> None:
    """The kernels that a trainer needs, and those by which the servers train its tables: they will find
    them here if they are on this machine. `geo`: what it does with rows of its own, too.
    """
    use_batches()
    use_tables(specs, _KEYS[:0])  # new rows are the servers' part
    if geo:
        use_saves()


def use_batches() -> None:
    """What a trainer does with a batch."""
    unique(_KEYS)
    merge_rows([(_KEYS, _ROWS)])
    split_by_server(_KEYS, 2)
    all_finite(_ROWS)


def use_rows() -> None:
    """What a server does with rows, whoever gets one and whatever trains them."""
    table = _table(Fixed())
    table.assign(_KEYS, _ROWS)
    table.pull(_KEYS + 1)
    touch_pages(np.zeros(1, np.int64), 0, 1)


def use_tables(specs: Iterable[TableSpec], keys: torch.Tensor = _KEYS) -> None:
    """A push and a pull of each kind of table; those that a server will refuse are left out."""
    for spec in dict.fromkeys(map(_small, specs)):
        with suppress(TableError):
            table, sparse = make_table(spec), spec.kind is TableKind.SPARSE
            if not isinstance(spec.rule, Fixed):
                table.apply(keys if sparse else None, _ROWS[: len(keys)] if sparse else torch.ones(1), 0.1)
            if sparse:
                table.pull(keys)


def use_every_table() -> None:
    blocks = (SGD(weight_decay=0.5), SGD(momentum=0.5), Adagrad(), Adam(), FTRL())
    use_tables(TableSpec(kind=TableKind.DENSE, name="", size=1, rule=rule) for rule in blocks)
    use_tables(_spec(rule) for rule in (SGD(), Adagrad(), SparseAdam(), FTRL()))
    use_tables(_spec(SGD(), entry) for entry in EntryKind)


def use_saves() -> None:
    """What a save and its loading do, and a trainer's rows in geo training."""
    table = _table(SGD())
    table.assign(_KEYS, _ROWS)
    with table.cut(mark=True) as cut:
        table.load(cut.read(0, cut.rows))


def use_rest() -> None:
    """What comes once a day, and in evaluation."""
    table = _table(SGD(), EntryKind.SHOW_CLICK)
    table.pull(_KEYS)
    table.shrink(ShrinkPolicy())
    table.pull(_KEYS, insert=False)


EVERYTHING: tuple[Callable[[], None], ...] = use_rows, use_batches, use_saves, use_every_table, use_rest


def _small(spec: TableSpec) -> TableSpec:
    """One of the same kernels, however many tables there are."""
    rows = RowOptions(entry=Entry(spec.rows.entry.kind, 1.0), statistics=spec.rows.statistics)
    return TableSpec(kind=spec.kind, name="warm", size=1, rule=spec.rule, rows=rows)


def _spec(rule: AnyRule, entry: EntryKind = EntryKind.ALL) -> TableSpec:
    rows = RowOptions(entry=Entry(entry, 1.0))
    return TableSpec(kind=TableKind.SPARSE, name="warm", size=1, rule=rule, rows=rows)


def _table(rule: AnyRule, entry: EntryKind = EntryKind.ALL) -> SparseTable:
    return SparseTable(_spec(rule, entry))
