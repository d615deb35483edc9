"""Cost of a checkpoint during training: synchronous, asynchronous, and with torch's own functions for both.

    python bench/checkpoints.py [--mb 400] [--nproc 2] [--steps 30] [--repeat 5] [--folder DIR] [--write FILE]

A data parallel job of N processes over Gloo trains an MLP with Adam and saves in turn by each way, REPEAT
times. `pause` is how long the call takes; `MB/s` the speed from the call until all is durable, with no
training meanwhile; `lost` how much longer the call, STEPS steps after it and the wait for what is left of the
save take than STEPS steps alone: what the checkpoint costs in all. Rank 0's times; medians [least-most].

torch.distributed.checkpoint (dcp) writes the same tensors and makes no checksums and no manifest, has no
rename at the end and removes nothing. With a stager that is kept it uses the memory of its copy again, as
ours does. DIR must be on a real disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _marks import check_marks, publish

NAME = "checkpoints.py"
WORKER = Path(__file__).with_name("_checkpoints_worker.py")
BOUND = 3600.0

Samples = dict[str, dict[str, list[float]]]
"""By way, then by what was measured; seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=400, help="a checkpoint's size")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--write", metavar="FILE", type=Path, help="put the table between the marks in it")
    options = parser.parse_args()
    check_marks(options.write, NAME)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        told = measured(folder, options)
    finally:
        shutil.rmtree(folder)
    publish(table_of(told, options), options.write, NAME)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Samples]:
    words = [f"--nproc_per_node={options.nproc}", "--max_restart=0", f"--log_dir={folder}/log", str(WORKER)]
    settings = [str(value) for value in (folder, options.mb, options.steps, options.repeat)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fleetrun", *words, *settings]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND, env=environ, check=False)
    if ended.returncode:
        sys.exit(f"the job exited with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    told: dict[str, Samples] = json.loads((folder / "told.json").read_text())
    return told


def table_of(told: dict[str, Samples], options: argparse.Namespace) -> str:
    ways, about = told["ways"], told["about"]
    size, alone = about["bytes"]["of a checkpoint"][0], about["steps"]["alone"]
    lines = ["| | pause, ms [least-most] | MB/s | lost, ms | of it, of `save` |", "|---|---:|---:|---:|---:|"]
    whole = statistics.median(ways["fleet.save_checkpoint"]["lost"])
    for way, found in ways.items():
        lost = statistics.median(found["lost"])
        cells = [_ms(found["pause"]), f"{size / statistics.median(found['durable']) / 1e6:,.0f}"]
        lines.append(f"| {' | '.join([way, *cells, _ms(found['lost']), f'{lost / whole:.2f}'])} |")
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} CPUs, {options.nproc} processes, "
        f"{size / 1e6:,.0f} MB, {len(ways['fleet.save_checkpoint']['lost'])} runs; a step alone takes "
        f"{statistics.median(alone) / options.steps * 1e3:,.0f} ms, {options.steps} steps "
        f"{_ms(alone)} ms.\n\n" + "\n".join(lines)
    )


def _ms(seconds: list[float]) -> str:
    low, middle, high = (1e3 * value for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:,.0f} [{low:,.0f}-{high:,.0f}]"


if __name__ == "__main__":
    main()
