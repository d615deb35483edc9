"""What `server_threads` gives: a pull and a push of one request, by one thread and by two, in one process.

    python bench/ps_threads.py [--rows 2000000] [--turns 60] [--write docs/benchmarks-ps-parts.md]

Tables of dim 16 with Adagrad, which have all ids; those of a request are drawn uniformly. The turns of one
thread and of two alternate; wall times of both kernels and what is around them, without messages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from _marks import check_marks, publish

from trainers.ps.tables.rules import Adagrad
from trainers.ps.tables.run import Lines, SparseRun, Threads
from trainers.ps.tables.sparse import SparseTable, make_tables
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.tables.warm import use_tables

NAME, DIM = "ps_threads.py", 16
CASES = ((1, 5_000), (1, 20_000), (1, 100_000), (26, 26_000), (26, 104_000))
"""Tables, and ids of a request."""


def run_of(tables: int, rows: int, threads: int) -> SparseRun:
    rule = Adagrad()
    specs = [TableSpec(kind=TableKind.SPARSE, name=f"t{each}", size=DIM, rule=rule) for each in range(tables)]
    use_tables(specs)
    made = [table for table in make_tables(dict(enumerate(specs))).values() if isinstance(table, SparseTable)]
    for table in made:
        table.pull(torch.arange(rows // tables))
    return Lines(dict(enumerate(made)), Threads(threads)).run(0, tables)


def measure(tables: int, ids: int, rows: int, turns: int) -> dict[int, float]:
    """The median milliseconds of a request, by threads."""
    random, found = np.random.default_rng(0), {1: list[float](), 2: list[float]()}
    runs = {threads: run_of(tables, rows, threads) for threads in found}
    spans, grad = np.full(tables, ids // tables), torch.ones(ids // tables * tables, DIM)
    for turn in range(turns):
        each = [random.choice(rows // tables, ids // tables, replace=False) for _ in range(tables)]
        keys = torch.from_numpy(np.concatenate(each))
        for threads in sorted(found, reverse=bool(turn % 2)):
            began = time.perf_counter()
            runs[threads].pull(spans, keys, insert=True)
            runs[threads].apply(spans, keys, grad, 0.1)
            found[threads].append((time.perf_counter() - began) * 1e3)
    return {threads: statistics.median(times[turns // 10 :]) for threads, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", metavar="N", type=int, default=2_000_000, help="of all tables")
    parser.add_argument("--turns", metavar="N", type=int, default=60, help="turns of each number of threads")
    parser.add_argument("--write", metavar="FILE", type=Path, help="put the table between the marks in it")
    options = parser.parse_args()
    check_marks(options.write, NAME)
    torch.set_num_threads(1)
    lines = ["| tables | ids | one thread, ms | two threads, ms | ratio |", "|--:|--:|--:|--:|--:|"]
    for tables, ids in CASES:
        took = measure(tables, ids, options.rows, options.turns)
        lines.append(f"| {tables} | {ids:,} | {took[1]:.2f} | {took[2]:.2f} | **{took[1] / took[2]:.2f}** |")
    load = f"{options.rows:,} rows, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} after"
    publish(f"{time.strftime('%Y-%m-%d %H:%M')}, {load}.\n\n" + "\n".join(lines), options.write, NAME)


if __name__ == "__main__":
    main()
