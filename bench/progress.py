"""Cost of progress reports: microseconds per step, compared with tensorboard's SummaryWriter.

    python bench/progress.py [--seconds 1.5] [--rounds 5] [--write FILE]

One process under fleetrun calls each in turn as often as it can for so many seconds; reports that leave twice
a second are in it. The goal: below 0.5 % of a step of 1 ms, which is 5 microseconds. Medians [least-most],
less what calling nothing takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _marks import check_marks, publish

NAME = "progress.py"
WORKER = Path(__file__).with_name("_progress_worker.py")
BOUND = 3600.0
GOAL = 5e-6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of each way in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    with tempfile.TemporaryDirectory() as folder:
        told = measured(Path(folder), options)
    publish(table_of(told), options.write, NAME)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    words = ["--max_restart=0", f"--log_dir={folder}/log", str(WORKER), str(folder)]
    command = [sys.executable, "-m", "fleetrun", *words, str(options.seconds), str(options.rounds)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND, env=environ, check=False)
    if ended.returncode:
        sys.exit(
            f"The job exited with code {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
        )
    told: dict[str, list[float]] = json.loads((folder / "told.json").read_text())
    return told


def table_of(told: dict[str, list[float]]) -> str:
    """`told`: seconds a call by way, of each round; the first way is the loop alone."""
    empty, *ways = told.items()
    loop = statistics.median(empty[1])
    lines = ["| a step | us [least-most] | of a step of 1 ms | <= 5 us |", "|---|---:|---:|---|"]
    for name, rounds in ways:
        own = sorted(max(0.0, seconds - loop) for seconds in rounds)
        middle = statistics.median(own)
        met = "yes" if middle <= GOAL else "no"
        spread = f"{middle * 1e6:.2f} [{own[0] * 1e6:.2f}-{own[-1] * 1e6:.2f}]"
        lines.append(f"| {name} | {spread} | {middle * 1e5:.2f} % | {met} |")
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the "
        f"end, {len(empty[1])} rounds.\n\n" + "\n".join(lines)
    )


if __name__ == "__main__":
    main()
