"""What durability costs: pushes a second that one server takes with each of its levels, in one run.

    python bench/ps_durability.py [--runs 7] [--seconds 1.5] [--folder FOLDER] [--write docs/benchmarks-ps.md]

As a wide & deep model pushes: 5,000 rows of dim 9 (SparseAdam) and 8 dense blocks of 40,313 elements in all
(Adam), answered one after another with `--underway` of them sent ahead. A server for each level; their turns
alternate, another one first in each round. Snapshots are taken every few seconds of a server's life, in its
turn or in another's. `disk`: plain appends of a push's bytes, each with fsync. FOLDER must be on a real disk.

Then snapshots of these tables alone, by one process without a server: bytes and seconds of a whole one, and
of those that follow when 200 pushes of 5,000 ids have come in between, whose ids follow a power law.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from _marks import check_marks, measured, publish
from _ps_served import Served, table_line

from trainers.ps.client import PendingReplies
from trainers.ps.durable.durable import DurableFolder
from trainers.ps.tables.rules import Adam, SparseAdam
from trainers.ps.tables.sparse import SparseTable, make_table
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.wire import Field, Kind, Part

NAME = "ps_durability.py"
KEYS, DIM = 5_000, 9
BLOCKS = (247 * 128, 128, 128 * 64, 64, 64, 1, 247, 1)
LEVELS = {
    "none": ("none", "no"),
    "snapshot": ("snapshot", "no"),
    "log, fsync no": ("log", "no"),
    "log, fsync everysec": ("log", "everysec"),
    "log, fsync always": ("log", "always"),
}
DISK = "disk: appends with fsync"

Found = dict[str, dict[str, list[float]]]  # level -> figure -> one for each run


def specs() -> list[TableSpec]:
    dense = [
        TableSpec(kind=TableKind.DENSE, name=f"w{number}", size=size, rule=Adam())
        for number, size in enumerate(BLOCKS)
    ]
    return [*dense, TableSpec(kind=TableKind.SPARSE, name="ids", size=DIM, rule=SparseAdam())]


class Pushes:
    """Pushes, over and over."""

    def __init__(self, rows: int) -> None:
        random = np.random.default_rng(4)
        rows_of = torch.randn(KEYS, DIM) * 0.01
        dense = Part(0, Field.VALUES, torch.randn(sum(BLOCKS)) * 0.01, lr=1e-3)
        self._parts = [
            (
                dense,
                Part(len(BLOCKS), Field.KEYS, torch.from_numpy(random.choice(rows, KEYS, replace=False))),
                Part(len(BLOCKS), Field.ROWS, rows_of, lr=1e-3),
            )
            for _ in range(16)
        ]
        self.bytes = 8 * KEYS + 4 * KEYS * DIM + 4 * sum(BLOCKS)
        self._turn = 0

    def send(self, served: Served) -> PendingReplies:
        self._turn += 1
        return served.send(Kind.PUSH, *self._parts[self._turn % len(self._parts)])


def take_turn(served: Served, pushes: Pushes, wanted_s: float, underway: int) -> dict[str, float]:
    """Pushes a second, server CPU in ms a push, and the longest time between two answers in ms."""
    tickets: deque[PendingReplies] = deque()
    before, began = served.cpu(), time.perf_counter()
    count, last, longest = 0, began, 0.0
    while tickets or time.perf_counter() - began < wanted_s:
        if time.perf_counter() - began < wanted_s:
            tickets.append(pushes.send(served))
            count += 1
            if len(tickets) < underway:
                continue
        served.client.wait(tickets.popleft())
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    took = time.perf_counter() - began
    return {
        "speed": count / took,
        "cpu": (served.cpu() - before) / count * 1e3,
        "longest": longest * 1e3,
    }


def append(path: Path, size: int, wanted_s: float) -> dict[str, float]:
    content = os.urandom(size)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < wanted_s:
        os.write(descriptor, content)
        os.fdatasync(descriptor)
        count += 1
    took = time.perf_counter() - began
    os.close(descriptor)
    path.unlink()
    return {"speed": count / took}


def measure(folder: Path, options: argparse.Namespace) -> Found:
    found: Found = {name: {} for name in (*LEVELS, DISK)}
    pushes = Pushes(options.rows)
    with ExitStack() as stack:
        servers: dict[str, Served] = {}
        for number, (name, (durability, fsync)) in enumerate(LEVELS.items()):
            words = ["--durability", durability, "--log_fsync", fsync, "--keep", str(folder / str(number))]
            words += ["--snapshot_interval_s", str(options.snapshot_interval)]
            servers[name] = stack.enter_context(Served(specs(), options=words))
        for served in servers.values():
            for start in range(0, options.rows, 100_000):
                keys = torch.arange(start, min(start + 100_000, options.rows))
                served.ask(Kind.PULL, Part(len(BLOCKS), Field.KEYS, keys))
            take_turn(served, pushes, 0.2, options.underway)
        for run in range(options.runs):
            turns = [*servers][run % len(servers) :] + [*servers][: run % len(servers)]
            for name in turns:
                figures = take_turn(servers[name], pushes, options.seconds, options.underway)
                for figure, value in figures.items():
                    found[name].setdefault(figure, []).append(value)
            for figure, value in append(folder / "plain", pushes.bytes, options.seconds / 3).items():
                found[DISK].setdefault(figure, []).append(value)
    return found


def snapshots(folder: Path, rows: int) -> str:
    """The lines of the second table."""
    random = np.random.default_rng(5)
    lines = [table_line(("snapshot", "rows that changed", "MB", "s")), table_line(["---"] + ["---:"] * 3)]
    for power in (None, 1.5, 1.2, 1.05):
        where = folder / f"power-{power}"
        durable = DurableFolder(where, job="bench", server=0, fsync=None)
        tables = [make_table(spec) for spec in specs()]
        table = tables[-1]
        assert isinstance(table, SparseTable)
        for start in range(0, rows, 100_000):
            table.pull(torch.arange(start, min(start + 100_000, rows)))
        figures = []
        for turn in range(4):
            touched = set[int]()
            for _ in range(200 if power and turn else 0):
                ids = torch.from_numpy(np.unique(random.zipf(power or 2.0, KEYS) % rows))
                table.apply(ids, torch.ones(len(ids), DIM), 0.1)
                touched.update(ids.tolist())
            began = time.perf_counter()
            task = durable.begin_snapshot(turn, tables, b"")
            task.wait()
            took = time.perf_counter() - began
            durable.end_snapshot()
            task.result()
            figures.append((len(touched), task.packed / 1e6, took))
            if power is None:
                break
        count, size, took = map(statistics.median, zip(*(figures[1:] or figures), strict=True))
        name = "whole" if power is None else f"of changes, power {power:g}"
        lines.append(table_line([name, f"{count:,.0f}" if power else "-", f"{size:.1f}", f"{took:.2f}"]))
        durable.discard()
    return "\n".join(lines)


def table_of(found: Found) -> str:
    head = ("durability", "**pushes/s**", "of none", "server CPU, ms a push", "longest pause, ms")
    lines = [table_line(head), table_line(["---"] + ["---:"] * (len(head) - 1))]
    none = statistics.median(found["none"]["speed"])
    for name, figures in found.items():
        lines.append(table_line([name, *cells_of(figures, none)]))
    return "\n".join(lines)


def cells_of(figures: dict[str, list[float]], of: float) -> list[str]:
    """Pushes a second, the same as a part `of` others, server CPU and the longest pause."""
    speeds = figures["speed"]
    middle = statistics.median(speeds)
    cells = [f"**{middle:,.0f}** [{min(speeds):,.0f}-{max(speeds):,.0f}]", f"{middle / of:.2f}"]
    for figure, digits in (("cpu", 2), ("longest", 0)):
        has = figure in figures
        cells.append(f"{statistics.median(figures[figure]):.{digits}f}" if has else "-")
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", metavar="N", type=int, default=7, help="turns of each level")
    parser.add_argument("--seconds", metavar="S", type=float, default=1.5, help="seconds of a turn")
    parser.add_argument("--rows", metavar="N", type=int, default=1_000_000, help="rows of the sparse table")
    parser.add_argument("--underway", metavar="N", type=int, default=4, help="pushes sent ahead")
    parser.add_argument("--snapshot_interval", metavar="S", type=float, default=10.0)
    parser.add_argument("--folder", metavar="FOLDER", type=Path, default=Path("/var/tmp"))
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="bench-durability.", dir=options.folder))
    try:
        found = measure(folder, options)
        alone = snapshots(folder, options.rows)
    finally:
        shutil.rmtree(folder)
    what = (
        f"{options.runs} runs of {options.seconds:g} s, {options.rows:,} rows, {options.underway} pushes "
        f"underway, a snapshot every {options.snapshot_interval:g} s"
    )
    head = f"{measured(what, load)} Medians [least-most]."
    publish(f"{head}\n\n{table_of(found)}\n\n{alone}", options.write, NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
