"""What it costs a server to count and sample the requests for its tables, and to report that.

    python bench/ps_tables.py [--runs 30] [--write docs/benchmarks-ps-parts.md]

Four servers get the same requests in turn, a pull and then a push of unique ids of 26 tables with Adagrad:
two that count nothing, one that counts, and one that also samples, and reports every five seconds. Cells are
medians over runs of the CPU time of a server, all its threads, as a multiple of the first one's in that run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from _marks import check_marks, measured, publish
from _ps_served import Served, table_line

from trainers.ps.tables.rules import Adagrad
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.wire import Field, Kind, Part

NAME = "ps_tables.py"
TABLES, DIM, IDS = 26, 16, 1_000_000
WAYS = {
    "counts nothing": ["--uncounted"],
    "counts nothing, again": ["--uncounted"],
    "counts": [],
    "counts, samples, reports": ["--report"],
}
RUN_S = 10.0


class Requests:
    """`keys` of each table in a request, drawn as most ids are: few of them often."""

    def __init__(self, keys: int) -> None:
        random = torch.Generator().manual_seed(3)
        self._batches = []
        for _ in range(16):
            drawn = [
                (IDS ** torch.rand(4 * keys, generator=random)).long().unique()[:keys] for _ in range(TABLES)
            ]
            spans, all_keys = torch.tensor([len(each) for each in drawn]), torch.cat(drawn)
            self._batches.append((spans, all_keys, torch.randn(len(all_keys), DIM, generator=random)))
        self._turn = 0

    def send(self, served: Served) -> None:
        spans, keys, grad = self._batches[self._turn % len(self._batches)]
        self._turn += 1
        wanted = (Part(0, Field.SPANS, spans), Part(0, Field.KEYS, keys))
        served.ask(Kind.PULL, *wanted)
        served.ask(Kind.PUSH, *wanted, Part(0, Field.ROWS, grad, lr=1e-3))


def measure(servers: Sequence[Served], keys: int, runs: int) -> list[list[float]]:
    """For each server its CPU seconds of a pull and push, in each run."""
    found: list[list[float]] = [[] for _ in servers]
    requests = [Requests(keys) for _ in servers]
    for run in range(runs + 1):
        before, began, count = [served.cpu() for served in servers], time.perf_counter(), 0
        while time.perf_counter() - began < RUN_S:
            for served, some in zip(servers, requests, strict=True):
                some.send(served)
            count += 1
        for served, cpu, times in zip(servers, before, found, strict=True):
            times.extend([(served.cpu() - cpu) / count] if run else [])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", metavar="N", type=int, default=15, help="runs of each case")
    parser.add_argument("--keys", default="20,500", help="keys of each table in a request")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    specs = [
        TableSpec(kind=TableKind.SPARSE, name=f"t{number}", size=DIM, rule=Adagrad())
        for number in range(TABLES)
    ]
    head = ["keys a table", "CPU of a pull and a push, ms", *list(WAYS)[1:]]
    lines = [table_line(head), table_line(["---:"] * len(head))]
    for keys in map(int, options.keys.split(",")):
        with ExitStack() as stack:
            servers = [stack.enter_context(Served(specs, options=way)) for way in WAYS.values()]
            plain, *others = measure(servers, keys, options.runs)
        ratios = [
            statistics.median(mine / base for mine, base in zip(each, plain, strict=True)) for each in others
        ]
        cells = [f"{keys}", f"{1000 * statistics.median(plain):.2f}", *(f"{each:.3f}" for each in ratios)]
        lines.append(table_line(cells))
    head = measured(f"{options.runs} runs of {RUN_S:g} s, {TABLES} tables of dim {DIM}", load)
    publish("\n".join([head, "", *lines]), options.write, NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
