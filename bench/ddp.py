"""What fleet's wrappers cost a data parallel step: fleet under fleetrun beside torch's own
DistributedDataParallel under torchrun, the same steps, two processes, Gloo.

    python bench/ddp.py [--rounds 7] [--cases mlp resnet18] [--write docs/benchmarks-launcher.md]

Each round runs both, in turns which first; a run's figure is the median of five windows of steps. `ratio` is
the median over the rounds of ours / torch's; the goal is 0.98. On a shared machine a run is as fast as its
neighbours let it, so each round also has both in the same processes, in turns of a fraction of a second. All
have as many threads to a process as the machine has cores for it.
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

from _ddp_script import CASES
from _marks import check_marks, publish

NAME = "ddp.py"
SCRIPT = Path(__file__).with_name("_ddp_script.py")
PROCESSES = 2
GOAL = 0.98
LIMIT_S = 600
LAUNCHERS = {
    "ours": ["-m", "fleetrun", f"--nproc_per_node={PROCESSES}"],
    "both": ["-m", "fleetrun", f"--nproc_per_node={PROCESSES}"],
    "torch": ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={PROCESSES}"],
}
TITLES = {"mlp": "MLP 64-128-128-10", "resnet18": "ResNet-18, 32 x 32 pixels"}


def samples_per_second(way: str, case: str, folder: Path) -> float:
    """One run of a launcher, two processes."""
    return PROCESSES * CASES[case].batch / statistics.median(figures(way, case, folder))


def figures(way: str, case: str, folder: Path) -> list[float]:
    """What the script writes."""
    out = folder / "seconds.json"
    run([sys.executable, *LAUNCHERS[way], str(SCRIPT), way, case, str(out)], way, folder)
    found: list[float] = json.loads(out.read_text())
    out.unlink()
    return found


def run(command: list[str], way: str, folder: Path) -> None:
    """Exits with what the command printed if it fails."""
    threads = str(max(1, (os.cpu_count() or 1) // PROCESSES))
    env = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(SCRIPT.parents[1])}
    ended = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if ended.returncode:
        sys.exit(f"{way} exited with code {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")


def measure(case: str, rounds: int, folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"ours": [], "torch": [], "both": []}
    for number in range(rounds):
        for way in ("ours", "torch") if number % 2 else ("torch", "ours"):
            found[way].append(samples_per_second(way, case, folder))
        found["both"].append(statistics.median(figures("both", case, folder)))
    return found


def table(found: dict[str, dict[str, list[float]]], rounds: int) -> str:
    lines = [
        f"| | samples in a batch | fleet, samples/s | DDP under torchrun, samples/s | ratio | in the same "
        f"processes | >= {GOAL} |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for case, speeds in found.items():
        ratios = [ours / theirs for ours, theirs in zip(speeds["ours"], speeds["torch"], strict=True)]
        ratio = statistics.median(ratios)
        cells = [
            f"{TITLES[case]} | {PROCESSES} x {CASES[case].batch}",
            *(_spread(speeds[way], ",.0f") for way in ("ours", "torch")),
            _spread(ratios, ".3f"),
            _spread(speeds["both"], ".3f"),
            f"{_met(ratio)}, {_met(statistics.median(speeds['both']))}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    load = os.getloadavg()[0]
    about = f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} CPUs, load {load:.1f} at the end"
    return f"{about}, {rounds} rounds; medians [least-most].\n\n" + "\n".join(lines)


def _met(ratio: float) -> str:
    return "yes" if ratio >= GOAL else "no"


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} [{min(values):{form}}-{max(values):{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    with tempfile.TemporaryDirectory() as folder:
        found = {case: measure(case, options.rounds, Path(folder)) for case in options.cases}
    publish(table(found, options.rounds), options.write, NAME)


if __name__ == "__main__":
    main()
