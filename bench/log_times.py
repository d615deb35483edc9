"""How exact the times are that `fleetrun logs` shows, and what noting them costs the launcher.

    python bench/log_times.py

Scripts print when they print. `--python` runs another installation, such as that of an earlier version.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import random, sys, time
gap, until = float(sys.argv[1]), time.time() + float(sys.argv[2])
while time.time() < until:
    time.sleep(random.uniform(0.5, 1.5) * gap)
    print(f"{time.time():.4f}", flush=True)
"""
SECONDS = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--nproc_per_node", default="2")
    options = parser.parse_args()
    print("| seconds between lines | lines | median | 90 % | 99 % | launcher |")
    print("|---|---|---|---|---|---|")
    for gap in (3.0, 1.0, 0.3, 0.1, 0.01):
        with tempfile.TemporaryDirectory() as folder:
            share = run(options.python, options.nproc_per_node, gap, Path(folder))
            errors = sorted(errors_of(options.python, Path(folder)))
        at = (f"{1000 * errors[int((len(errors) - 1) * part)]:.0f} ms" for part in (0.5, 0.9, 0.99))
        print(f"| {gap:g} | {len(errors):,} | {' | '.join(at)} | {100 * share:.2f} % |")


def run(python: str, count: str, gap: float, folder: Path) -> float:
    """The part of a core that the launcher used."""
    (folder / "script.py").write_text(SCRIPT)
    words = ["--nproc_per_node", count, "--follow", "none", "script.py", str(gap), str(SECONDS)]
    argv = [python, "-m", "fleetrun", *words]
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launch:
        time.sleep(3)
        children = Path(f"/proc/{launch.pid}/task/{launch.pid}/children").read_text()
        used = Path(f"/proc/{children.split()[0]}/schedstat")
        began, before = time.monotonic(), int(used.read_text().split()[0])
        time.sleep(SECONDS - 5)
        spent = int(used.read_text().split()[0]) - before
        share = spent / 1e9 / (time.monotonic() - began)
    return share


def errors_of(python: str, folder: Path) -> list[float]:
    argv = [python, "-m", "fleetrun", "logs", "--json"]
    out = subprocess.run(argv, cwd=folder, capture_output=True, check=True).stdout
    lines = map(json.loads, out.splitlines())
    return [abs(line["time"] - float(line["line"])) for line in lines]


if __name__ == "__main__":
    main()
