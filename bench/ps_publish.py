"""What publishing costs a server, and what it writes: the same pushes with and without it, in one run.

    python bench/ps_publish.py [--runs 3] [--seconds 21] [--folder FOLDER]
                               [--write docs/benchmarks-serving.md]

Pushes as in `ps_durability.py`, but their ids follow a power law, as those of a log of clicks do: 5,000 drawn
for each push, those that are equal once. A server for each kind of publishing; their turns alternate, another
one first in each round, and a server without pushes publishes nothing. The bytes are those of the increments
of the turns, against a save of all rows with optimizer state (mode 0) of the same server in the end, and
against its values alone. `publish now`: seconds that fleet.publish() takes, beside nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from _marks import check_marks, measured, publish
from _ps_served import Served, table_line
from ps_durability import BLOCKS, KEYS, Pushes, cells_of, specs, take_turn

from trainers.ps.saves.manifest import SaveMode, current_manifest
from trainers.ps.trainer.saving import SaveCoordinator
from trainers.ps.wire import Field, Kind, Part

NAME = "ps_publish.py"
KINDS = {
    "nothing": None,
    "every 10 s": (10.0, ""),
    "every 10 s, int8": (10.0, "int8"),
    "every second": (1.0, ""),
}
PUSHES = 2000
"""Different ones."""

Found = dict[str, dict[str, list[float]]]  # kind -> figure -> one for each run


class Clicks(Pushes):
    """Pushes with ids of a power law."""

    def __init__(self, rows: int, power: float) -> None:
        super().__init__(KEYS)
        random = np.random.default_rng(6)
        dense, _, gradients = self._parts[0]
        self._parts = []
        for _ in range(PUSHES):
            ids = torch.from_numpy(np.unique(random.zipf(power, KEYS) % rows))
            table = len(BLOCKS)
            keys, rows_of = Part(table, Field.KEYS, ids), gradients._replace(data=gradients.data[: len(ids)])
            self._parts.append((dense, keys, rows_of))


def measure(folder: Path, options: argparse.Namespace) -> Found:
    found: Found = {name: {} for name in KINDS}
    pushes = Clicks(options.rows, options.power)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(_served(kind, folder / name, options.rows))
            for name, kind in KINDS.items()
        }
        for served in servers.values():
            take_turn(served, pushes, 0.5, options.underway)
        for run in range(options.runs):
            for name in [*servers][run % len(servers) :] + [*servers][: run % len(servers)]:
                figures = take_turn(servers[name], pushes, options.seconds, options.underway)
                for figure, value in figures.items():
                    found[name].setdefault(figure, []).append(value)
        for name, served in servers.items():
            if KINDS[name] is not None:
                found[name] |= _written(served, folder / name, pushes)
    return found


def _served(kind: tuple[float, str] | None, folder: Path, rows: int) -> Served:
    """A server with so many rows, which have been published if it publishes."""
    words = []
    if kind is not None:
        words = ["--publish", str(folder), "--publish_interval_s", str(kind[0]), "--publish_dtype", kind[1]]
    served = Served(specs(), options=words)
    for start in range(0, rows, 100_000):
        keys = torch.arange(start, min(start + 100_000, rows))
        served.ask(Kind.PULL, Part(len(BLOCKS), Field.KEYS, keys))
    if kind is not None:
        served.ask(Kind.REFRESH)
    return served


def _written(served: Served, folder: Path, pushes: Pushes) -> dict[str, list[float]]:
    """Bytes of increments and of saves, and how long a version takes."""
    sizes = [float(save.size) for save in current_manifest(folder).saves[1:]]
    found: dict[str, list[float]] = {"increment": sizes, "now": []}
    for _ in range(3):
        pushes.send(served)
        began = time.perf_counter()
        served.ask(Kind.REFRESH)
        found["now"].append(time.perf_counter() - began)
    for mode in (SaveMode.ALL, SaveMode.VALUES):
        where = folder.with_name(f"{folder.name}-{mode}")
        SaveCoordinator(served.client, 1).save(str(where), mode, 0)
        found[mode.name] = [float(sum(file.stat().st_size for file in where.rglob("*.safetensors")))]
    return found


def table_of(found: Found) -> str:
    head = ("published", "**pushes/s**", "of nothing", "server CPU, ms a push", "longest pause, ms")
    head = (*head, "MB an increment", "of a save", "of its values", "publish now, s")
    lines = [table_line(head), table_line(["---"] + ["---:"] * (len(head) - 1))]
    nothing = statistics.median(found["nothing"]["speed"])
    for name, figures in found.items():
        cells = cells_of(figures, nothing)
        if sizes := figures.get("increment"):
            size = statistics.median(sizes)
            cells.append(f"{size / 1e6:.1f}")
            cells += [f"{size / figures[each][0]:.2f}" for each in ("ALL", "VALUES")]
            cells.append(f"{statistics.median(figures['now']):.2f}")
        else:
            cells += ["-"] * 4
        lines.append(table_line([name, *cells]))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", metavar="N", type=int, default=3, help="turns of each kind")
    parser.add_argument("--seconds", metavar="S", type=float, default=21.0, help="seconds of a turn")
    parser.add_argument("--rows", metavar="N", type=int, default=1_000_000, help="rows of the sparse table")
    parser.add_argument("--power", metavar="P", type=float, default=1.2, help="of the ids")
    parser.add_argument("--underway", metavar="N", type=int, default=4, help="pushes sent ahead")
    parser.add_argument("--folder", metavar="FOLDER", type=Path, default=Path("/var/tmp"))
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="bench-publish.", dir=options.folder))
    try:
        found = measure(folder, options)
    finally:
        shutil.rmtree(folder)
    what = (
        f"{options.runs} runs of {options.seconds:g} s, {options.rows:,} rows, power {options.power:g}, "
        f"{options.underway} pushes underway"
    )
    head = f"{measured(what, load)} Medians [least-most]."
    publish(f"{head}\n\n{table_of(found)}", options.write, NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
