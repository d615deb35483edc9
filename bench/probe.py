"""Cost of the probe: a step of about 1 ms with `--probe on` and `--probe off`, and the start of a process.

    python bench/probe.py [--pairs 15] [--steps 3000]

A pair is one job of each kind, in changing order: one process that computes for about a millisecond and makes
an all_reduce (Gloo) and a step of an optimizer; its median step counts. The start is the time from the
command to the first line of a script that imports nothing. The goals: below 0.5 % of a step; the start is
told.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = """
import statistics, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
values, matrix = torch.nn.Parameter(torch.ones(100)), torch.ones(220, 220)
values.grad = torch.ones(100)
optimizer = torch.optim.SGD([values], lr=0.1)
times = []
for _ in range(int(sys.argv[1])):
    began = time.perf_counter()
    matrix @ matrix
    matrix @ matrix
    dist.all_reduce(values.grad)
    optimizer.step()
    times.append(time.perf_counter() - began)
print(statistics.median(times))
"""
STARTED = "import time; print(time.time())"


def said(probe: str, script: Path, *words: str) -> float:
    """The number that the script prints last."""
    command = [
        sys.executable,
        "-m",
        "fleetrun",
        "--probe",
        probe,
        "--max_restart",
        "0",
        "--log_level",
        "ERROR",
    ]
    done = subprocess.run(
        [*command, str(script), *words],
        cwd=script.parent, capture_output=True, text=True, timeout=600, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def started(probe: str, script: Path) -> float:
    began = time.time()
    return said(probe, script) - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps, start = Path(folder, "steps.py"), Path(folder, "start.py")
        steps.write_text(STEPS)
        start.write_text(STARTED)
        found: dict[str, list[tuple[float, float]]] = {"a step": [], "the start": []}
        for number in range(options.pairs):
            order = ("on", "off") if number % 2 else ("off", "on")
            step = {probe: said(probe, steps, str(options.steps)) for probe in order}
            begin = {probe: started(probe, start) for probe in order}
            found["a step"].append((step["on"], step["off"]))
            found["the start"].append((begin["on"], begin["off"]))
    print("| what | on, ms | off, ms | on / off: median of pairs [25 % - 75 %] |\n|---|---:|---:|---:|")
    for what, pairs in found.items():
        ratios = sorted(on / off for on, off in pairs)
        on, off = (statistics.median(each) * 1e3 for each in zip(*pairs, strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        print(f"| {what} | {on:.3f} | {off:.3f} | {statistics.median(ratios):.4f} [{low:.4f} - {high:.4f}] |")


if __name__ == "__main__":
    main()
