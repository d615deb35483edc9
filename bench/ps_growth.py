"""How long one request keeps a server busy while a table grows: new ids, from no rows to many.

    python bench/ps_growth.py [--rows 100000000] [--batch 100000] [--dim 4] [--bound]
                              [--write docs/benchmarks-ps-parts.md]

Every request inserts `batch` random ids. `--bound`: a table of so many rows at its limit instead, where each
new id evicts another. The goal: the longest one takes less than 50 ms more than the
median, at whatever size. CPU time of the thread, and wall time of the requests that were not interrupted:
others on the machine cannot lengthen these. 100 M rows of dim 4 with SGD need 5 GB.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from _marks import check_marks, publish

from trainers.ps.tables.rules import SGD
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import Bound, Initializer, InitKind, RowOptions, TableKind, TableSpec
from trainers.ps.tables.warm import use_tables

NAME = "ps_growth.py"
PARTS = 10


class Request(NamedTuple):
    """Seconds, and how often others took the processor."""

    cpu: float
    wall: float
    interrupted: int


def grown(rows: int, batch: int, dim: int, *, bounded: bool) -> list[Request]:
    init = Initializer(InitKind.UNIFORM, -0.01, 0.01, seed=1)
    options = RowOptions(init=init, bound=Bound(rows=rows) if bounded else None)
    spec = TableSpec(kind=TableKind.SPARSE, name="ids", size=dim, rule=SGD(), rows=options)
    use_tables([spec])  # loads kernels
    SparseTable(spec).pull(torch.arange(batch))
    table, random, found = SparseTable(spec), np.random.default_rng(0), []
    gradient = torch.zeros(batch, dim)
    for number in range(0, 2 * rows if bounded else rows, batch):
        ids = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, batch))
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        cpu, wall = time.thread_time(), time.perf_counter()
        if bounded:
            table.apply(ids, gradient, 0.1)
        else:
            table.pull(ids)
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        if number >= rows or not bounded:
            interrupted = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - before
            found.append(Request(cpu, wall, interrupted))
    return found


def line(title: str, requests: list[Request]) -> str:
    cells = [title]
    calm = [each.wall for each in requests if not each.interrupted]
    for times in ([each.cpu for each in requests], calm):
        if not times:
            cells += ["-", "-", "-"]
            continue
        median, longest = statistics.median(times) * 1e3, max(times) * 1e3
        cells += [f"{median:.1f}", f"{longest:.1f}", f"**{longest - median:.1f}**"]
    return f"| {' | '.join(cells)} | {len(calm)} of {len(requests)} |"


def table_of(requests: list[Request], options: argparse.Namespace) -> str:
    rows = "new rows at the limit" if options.bound else "rows"
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} CPUs, {options.rows:,} rows x {options.dim}, "
        f"SGD, requests of {options.batch:,} new ids; ms.",
        "",
        f"| millions of {rows} | CPU: median | longest | difference | uninterrupted, wall: median | "
        "longest | difference | uninterrupted |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    step = max(1, len(requests) // PARTS)
    for start in range(0, len(requests), step):
        some = requests[start : start + step]
        begin = start * options.batch / 1e6
        lines.append(line(f"{begin:,.0f} to {begin + len(some) * options.batch / 1e6:,.0f}", some))
    return "\n".join([*lines, line("all", requests)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", metavar="N", type=int, default=100_000_000)
    parser.add_argument("--batch", metavar="N", type=int, default=100_000, help="new ids of a request")
    parser.add_argument("--dim", metavar="N", type=int, default=4)
    parser.add_argument("--bound", action="store_true", help="a bounded table at its limit")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    name = f"{NAME} --bound" if options.bound else NAME
    check_marks(options.write, name)
    found = grown(options.rows, options.batch, options.dim, bounded=options.bound)
    publish(table_of(found, options), options.write, name)


if __name__ == "__main__":
    main()
