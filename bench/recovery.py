"""From a crash to the next useful step: torchrun and fleetrun with a checkpoint on the disk, and fleetrun
with warm restarts and checkpoints in memory.

    python bench/recovery.py [--mb 100] [--nproc 2] [--crashes 10] [--way NAME] [--patience 12] [--write FILE]

A data parallel job of N processes over Gloo trains a model of MB megabytes with SGD. CRASHES times the last
rank is killed by SIGKILL, PATIENCE seconds after its first step; the launcher starts all again. Measured from
the kill, by the clock of the machine: the first statement of the new rank 0, which `import torch` follows;
the first step of the new attempt; and the first step that was not done before (`new step`). On the disk there
is a checkpoint every 20 steps, in memory after each. `a save` is how long the training stands still for one,
and `copy` what a plain copy of as many bytes takes beside it. Medians [least-most].

With `--way` only that one is measured, and what a restart spends its time on: processor time of a rank, which
other work on the machine changes least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _marks import check_marks, publish

NAME = "recovery.py"
WORKER = Path(__file__).with_name("_recovery_worker.py")
BOUND = 1800.0

FLEETRUN = [sys.executable, "-m", "fleetrun", "--max_restart=1000"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1000"]
STAGES = ("group", "model", "DDP", "load", "step")
WAYS = {
    "torchrun, disk": (TORCHRUN, "disk"),
    "fleetrun, disk": (FLEETRUN, "disk"),
    "fleetrun --warm, disk": ([*FLEETRUN, "--warm"], "disk"),
    "fleetrun --warm, memory": ([*FLEETRUN, "--warm"], "memory"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=100, help="size of the model")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--crashes", type=int, default=10)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--patience", type=float, default=12.0, help="seconds until a crash")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    if options.way is not None:
        for name, values in measured(*WAYS[options.way], options).items():
            print(f"{name}: {_shown(values, 1.0, 3)}")
        return
    found = {name: measured(*way, options) for name, way in WAYS.items()}
    publish(table_of(found, options), options.write, NAME)


def measured(launcher: list[str], way: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds by what was measured."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        words = [f"--nproc_per_node={options.nproc}", str(WORKER), str(folder), str(options.mb), way]
        command = [*launcher, *words, str(options.crashes), str(options.patience)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=BOUND, env=environ, cwd=folder, check=False
        )
        if ended.returncode:
            sys.exit(f"{command} exited with code {ended.returncode}:\n{ended.stderr[-3000:]}")
        return recoveries(
            [json.loads(line) for path in sorted(folder.glob("told.*.jsonl")) for line in path.open()],
            options,
        )
    finally:
        shutil.rmtree(folder)


def recoveries(told: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, list[float]]:
    crashes = {each["attempt"]: each for each in told if each["what"] == "crash"}
    if len(crashes) != options.crashes:
        sys.exit(f"The run had {len(crashes)} crashes instead of {options.crashes}.")
    found: dict[str, list[float]] = {
        "first statement": [],
        "first step": [],
        "new step": [],
        "done again": [],
    }
    for attempt, crash in crashes.items():
        after = [each for each in told if each["attempt"] > attempt]  # also of one that came to nothing
        begin = next(each for each in after if each["what"] == "begin")
        steps = [each for each in after if each["what"] == "step"]
        new = next((each for each in steps if each["step"] > crash["step"]), None)
        found["first statement"].append(begin["time"] - crash["time"])
        found["first step"].append(steps[0]["time"] - crash["time"])
        if new is None:
            sys.exit(f"Attempt {attempt + 1} reached no new step.")
        found["new step"].append(new["time"] - crash["time"])
        found["done again"].append(float(crash["step"] + 1 - steps[0]["step"]))
        for rank in range(options.nproc):
            of_rank = [each for each in after if each["rank"] == rank]
            spent = [next(each for each in of_rank if each["what"] == what) for what in ("begin", *STAGES)]
            for before, stage in itertools.pairwise(spent):
                name = f"processor time of {stage['what']}"
                found.setdefault(name, []).append(stage["processor"] - before["processor"])
    saves = [each for each in told if each["what"] == "saved"]
    found["a save"] = [each["seconds"] for each in saves]
    found["copy"] = [each["copy"] for each in saves]
    return found


def table_of(found: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> str:
    names = ["", "first statement, s", "first step, s", "new step, s", "of torchrun's", "steps done again"]
    lines = [
        f"| {' | '.join([*names, 'a save, ms', 'copy, ms'])} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    peer = statistics.median(found["torchrun, disk"]["new step"])
    for name, times in found.items():
        ratio = f"{statistics.median(times['new step']) / peer:.2f}"
        shown = [_shown(times[what], 1, 2) for what in ("first statement", "first step", "new step")]
        again = f"{statistics.median(times['done again']):.0f}"
        saves = [_shown(times[what], 1000, 0) for what in ("a save", "copy")]
        lines.append(f"| {' | '.join([name, *shown, ratio, again, *saves])} |")
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} CPUs, {options.nproc} processes, "
        f"{options.mb} MB, {options.crashes} crashes each.\n\n" + "\n".join(lines) + "\n"
    )


def _shown(values: list[float], scale: float, digits: int) -> str:
    least, most = min(values) * scale, max(values) * scale
    return f"{statistics.median(values) * scale:.{digits}f} [{least:.{digits}f}-{most:.{digits}f}]"


if __name__ == "__main__":
    main()
