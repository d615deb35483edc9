"""Whether a CPU job should bind each of its processes to a core of its own.

    python bench/cores.py [--rounds 5] [--write docs/benchmarks-launcher.md]

A DistributedDataParallel job trains a small network on two processes with one thread each, bound or not in
turns; then two jobs of one process at the same time, each bound to the first core, as two launches that know
nothing of each other would choose. The time of a job is that of its steps. Medians.
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

from _marks import check_marks, publish

NAME = "cores.py"
SCRIPT = """
import os, time
if os.environ["BENCH_BOUND"] == "1":
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
import torch
from torch import distributed, nn
distributed.init_process_group("gloo")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model = nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images, digits = torch.rand(256, 64), torch.randint(0, 10, (256,))
def step():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), digits).backward()
    optimizer.step()
for _ in range(20):
    step()
distributed.barrier()
began = time.perf_counter()
for _ in range(300):
    step()
if distributed.get_rank() == 0:
    print("seconds", time.perf_counter() - began, flush=True)
distributed.destroy_process_group()
"""


def times(script: Path, jobs: int, processes: int, *, bound: bool) -> list[float]:
    """Of so many jobs at the same time."""
    options = ["--nproc_per_node", str(processes), "--follow", "all"]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "fleetrun", *options, f"--log_dir={script.parent}/log{job}", str(script)],
            env=os.environ | {"BENCH_BOUND": str(int(bound)), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job in range(jobs)
    ]
    found = []
    for job in started:
        said, _ = job.communicate()
        if job.returncode:
            raise RuntimeError(f"The job exited with code {job.returncode}:\n{said}")
        found.append(float(said.partition("seconds ")[2].split()[0]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=5)
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    cases = {"one job of two processes": (1, 2), "two jobs of one process, at once": (2, 1)}
    found: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="cores.") as name:
        script = Path(name, "train.py")
        script.write_text(SCRIPT)
        for _ in range(options.rounds):
            for title, (jobs, processes) in cases.items():
                for bound in (False, True):
                    took = max(times(script, jobs, processes, bound=bound))
                    found.setdefault((title, bound), []).append(took)
                    print(title, bound, f"{took:.2f}", file=sys.stderr, flush=True)
    head = "| 300 steps, s | on any core | bound | ratio |\n|---|---:|---:|---:|"
    rows = []
    for title in cases:
        free, bound_to = (statistics.median(found[title, bound]) for bound in (False, True))
        rows.append(f"| {title} | {free:.2f} | {bound_to:.2f} | {bound_to / free:.2f} x |")
    when = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs, {options.rounds} rounds."
    publish("\n".join([when, "", head, *rows]), options.write, NAME)


if __name__ == "__main__":
    main()
