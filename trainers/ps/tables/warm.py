"""Warming up: every kernel once, on a handful of rows, before anybody waits for an answer. Knows which
calls lead to which kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from trainers.ps.kernels.compiled import cache_folder, compile_once
from trainers.ps.kernels.finite import all_finite
from trainers.ps.kernels.merge import merge_rows
from trainers.ps.kernels.owners import split
from trainers.ps.kernels.touching import touch_pages
from trainers.ps.kernels.unique import unique, unique_kernel
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.rules import FTRL, SGD, Adagrad, Adam, AnyRule, SparseAdam
from trainers.ps.tables.shrink import ShrinkPolicy
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import Entry, EntryKind, RowOptions, TableKind, TableSpec


def warm_up(*, tables: bool) -> None:
    """Compile or load the kernels for batches, and those of tables too if asked. The first time on a
    machine this takes some seconds and tells so; several processes at once compile only once.
    """
    compile_once(cache_folder(unique_kernel), use_tables if tables else use_batches)


def use_batches() -> None:
    """What a trainer does with a batch."""
    keys = torch.arange(3)
    unique(keys)
    merge_rows([(keys, torch.zeros(3, 1))])
    split(keys, 2)
    all_finite(torch.zeros(3))


def use_tables() -> None:
    """And what a server does with blocks and rows."""
    use_batches()
    keys, rows = torch.arange(3), torch.ones(3, 1)
    touch_pages(np.zeros(1, np.int64), 0, 1)
    for block_rule in (SGD(weight_decay=0.5), SGD(momentum=0.5), Adagrad(), Adam(), FTRL()):
        block = DenseTable(TableSpec(kind=TableKind.DENSE, name="warm", size=1, rule=block_rule))
        block.apply(None, torch.ones(1), 0.1)
    for rule in (SGD(), Adagrad(), SparseAdam(), FTRL()):
        table = _table(rule, EntryKind.ALL)
        table.assign(keys, rows)
        table.apply(keys, rows, 0.1)
    table = _table(SGD(), EntryKind.SHOW_CLICK)
    table.apply(keys, rows, 0.1, torch.ones(3, 2))
    table.pull(keys + 2, insert=False)
    with table.cut(mark=True) as cut:
        table.load(cut.read(0, cut.rows))
    table.shrink(ShrinkPolicy())
    for entry in (EntryKind.PROBABILITY, EntryKind.COUNT):
        _table(SGD(), entry).pull(keys)


def _table(rule: AnyRule, entry: EntryKind) -> SparseTable:
    options = RowOptions(entry=Entry(entry, 1.0))
    return SparseTable(TableSpec(kind=TableKind.SPARSE, name="warm", size=1, rule=rule, rows=options))
