"""What rows in 16 bits and row-wise rules save, and what they cost: memory, time and AUC, without servers.

    python bench/ps_lean.py [--rows 10000000] [--examples 800000] [--write docs/benchmarks-ps.md]

Memory and speed of a table of random ids, dim 16, one thread, in its CPU time; each table is made in a
process of its own. Bytes a row: those in use by records, flags and index, on average while the table doubles
its rows at last, since the index is fuller at some sizes than at others; and all resident memory at the end,
in which up to 32 MiB each of records and index have been touched ahead of use. AUC: one process trains the
job of bench/ps_wide_deep.py with dim 16, its rows in one table; the dense part is the same in all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from _marks import check_marks, publish
from _ps_files import TEST_ROWS, TRAIN_ROWS
from ps_auc import BATCH, HIDDEN, LR, Tensors, splits

from trainers.metrics import auc
from trainers.ps.kernels.index import SEGMENT, SEGMENTS
from trainers.ps.tables.rules import Adagrad, AnyRule, RowWiseAdagrad, RowWiseAdam, SparseAdam
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import Initializer, InitKind, RowOptions, RowType, TableKind, TableSpec
from trainers.zoo.click_models import WideDeep

NAME = "ps_lean.py"
DIM = 16
KINDS: list[tuple[AnyRule, float, list[RowType]]] = [
    (Adagrad(), 0.05, [RowType.FLOAT32, RowType.BFLOAT16]),
    (RowWiseAdagrad(), 0.05, [RowType.FLOAT32, RowType.BFLOAT16, RowType.FLOAT16]),
    (SparseAdam(), LR, [RowType.FLOAT32, RowType.BFLOAT16]),
    (RowWiseAdam(), LR, [RowType.FLOAT32, RowType.BFLOAT16]),
]
"""Rules, their learning rates, and types."""


def new_table(rule: AnyRule, dtype: RowType) -> SparseTable:
    rows = RowOptions(init=Initializer(InitKind.UNIFORM, -0.01, 0.01, seed=1), dtype=dtype)
    return SparseTable(TableSpec(kind=TableKind.SPARSE, name="ids", size=DIM, rule=rule, rows=rows))


# ---- Memory and time.


def measured(rule: AnyRule, dtype: RowType, rows: int, batch: int = 20_000) -> dict[str, float]:
    """Bytes a row in use and resident, and nanoseconds of an insertion, a lookup and an update of a row."""
    torch.set_num_threads(1)
    table, random = new_table(rule, dtype), np.random.default_rng(0)
    ids, grad = random.integers(-(2**63), 2**63 - 1, rows), torch.randn(batch, DIM)
    table.apply(torch.from_numpy(ids[:10]), grad[:10], LR)
    inserted, used, before = [], [], resident()
    for start in range(0, rows, batch):
        some = torch.from_numpy(ids[start : start + batch])
        inserted.append(seconds(lambda some=some: table.pull(some)))
        if 2 * len(table) > rows:
            used.append(bytes_in_use(table) / len(table))
    all_bytes = (resident() - before) / rows
    asked = [torch.from_numpy(ids[random.integers(0, rows, batch)]) for _ in range(40)]
    pulls = [seconds(partial(table.pull, some, insert=False)) for some in asked]
    updates = [seconds(partial(table.apply, some, grad, LR)) for some in asked]
    times = {"insert": inserted, "lookup": pulls, "update": updates}
    found = {name: statistics.median(each) / batch * 1e9 for name, each in times.items()}
    return {"used": statistics.mean(used), "resident": all_bytes} | found


def bytes_in_use(table: SparseTable) -> int:
    storage = table._storage
    return len(table) * (4 * storage.stride + 1) + 8 * SEGMENT * int(storage.index.numbers[SEGMENTS])


def seconds(call: Callable[[], object]) -> float:
    """CPU time of this thread."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# ---- AUC.


class Rows(torch.nn.Module):
    """All rows of the job in a table; ids are its keys."""

    def __init__(self, table: SparseTable, lr: float) -> None:
        super().__init__()
        self._table, self._lr = table, lr
        self._keys = torch.empty(0, dtype=torch.int64)
        self._touched = torch.empty(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self._keys, places = torch.unique(ids, return_inverse=True)
        training = torch.is_grad_enabled()
        self._touched = self._table.pull(self._keys, insert=training).requires_grad_(training)
        return self._touched[places]

    def step(self) -> None:
        """The rule on the rows of the last batch."""
        assert self._touched.grad is not None
        self._table.apply(self._keys, self._touched.grad, self._lr)


def trained(rule: AnyRule, lr: float, dtype: RowType, train: Tensors, test: Tensors) -> float:
    """Test AUC after one epoch."""
    torch.manual_seed(0)
    rows = Rows(new_table(rule, dtype), lr)
    model = WideDeep(rows, DIM, hidden=HIDDEN)
    adam = torch.optim.Adam(model.parameters(), lr=LR)
    for batch in torch.split(torch.randperm(len(train[0])), BATCH):
        ids, dense, labels = (each[batch] for each in train)
        adam.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(ids, dense), labels).backward()
        rows.step()
        adam.step()
    pairs = zip(*(torch.split(each, 4096) for each in test[:2]), strict=True)
    with torch.no_grad():
        clicks = torch.cat([torch.sigmoid(model(ids, dense)) for ids, dense in pairs])
    return auc(clicks.double(), test[2])


# ---- The table.


def line(name: str, dtype: RowType, found: dict[str, float], score: float, wide: float) -> str:
    times = " | ".join(f"{found[each]:.0f}" for each in ("insert", "lookup", "update"))
    less = "" if dtype is RowType.FLOAT32 else f"{score - wide:+.4f}"
    size = f"**{found['used']:.1f}** | {found['resident']:.1f}"
    return f"| {name} | {dtype.name.lower()} | {size} | {times} | {score:.4f} | {less} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", metavar="N", type=int, default=10_000_000, help="of a table [%(default)s]")
    parser.add_argument("--examples", metavar="N", type=int, default=TRAIN_ROWS, help="[%(default)s]")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    torch.set_num_threads(1)
    _, train, test = splits(options.examples, TEST_ROWS)
    lines = [
        f"{options.rows:,} rows of {DIM} values; AUC after {options.examples:,} examples.",
        "",
        "| rule | values | bytes a row in use | resident | insert, ns | lookup, ns | update, ns | test AUC | "
        "less float32's |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for rule, lr, types in KINDS:
        wide = 0.0
        for dtype in types:
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                found = alone.submit(measured, rule, dtype, options.rows).result()
            score = trained(rule, lr, dtype, train, test)
            wide = score if dtype is RowType.FLOAT32 else wide
            lines.append(line(type(rule).__name__, dtype, found, score, wide))
            sys.stderr.write(f"{lines[-1]}\n")
    publish("\n".join(lines), options.write, NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
