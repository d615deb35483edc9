"""What starts cost: torchrun, fleetrun, and `fleetrun --warm`, which imports torch once.

    python bench/warm.py [--nproc 2 8] [--runs 5] [--way NAME] [--write FILE]

A data parallel job of N processes over Gloo makes ten steps. Measured from the start of the launcher: until
all ranks are past their imports (`imports`) and have made a step; the processor time of all processes until
the end of such a job; and the proportional memory of all ranks after ten steps. In another job, a rank is
killed once after ten steps: `restart` is the time from the kill until all ranks are past their imports again,
or `none` if the job does not end within a minute more than twice the time of the first job. In a third job,
with `--watch`, the script is saved after ten steps. The last two columns are the times until all ranks are
past their imports again and have made a step. The ways take turns. Medians [least-most]. Each job with
--warm is the first of its script.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from _marks import check_marks, measured, publish

NAME = "warm.py"
WORKER = Path(__file__).with_name("_warm_worker.py")
BOUND = 600.0
MORE = 60.0  # seconds that a job with a kill may take longer
FLEETRUN = [sys.executable, "-m", "fleetrun", "--max_restart=3"]
WAYS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"],
    "fleetrun": FLEETRUN,
    "fleetrun --warm": [*FLEETRUN, "--warm"],
}
COLUMNS = {
    "imports": "imports, s", "step": "first step, s", "processor": "processor time, s", "pss": "memory, MiB",
    "restart": "restart, s", "edit": "imports after an edit, s", "edit step": "step after an edit, s",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--write", metavar="FILE", type=Path, help="put the table between the marks in it")
    options = parser.parse_args()
    check_marks(options.write, NAME)
    load, ways = os.getloadavg()[0], [options.way] if options.way else list(WAYS)
    lines = [
        f"| processes | | {' | '.join(COLUMNS.values())} |",
        f"|--:|---|{'--:|' * len(COLUMNS)}",
    ]
    for nproc in options.nproc:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(options.runs):
            for way in ways:
                begun = time.monotonic()
                without = job(way, nproc, 0, BOUND)
                bound = 2 * (time.monotonic() - begun) + MORE
                found[way].append(
                    {**without, "restart": job(way, nproc, 1, bound)["restart"], **edit(way, nproc)}
                )
        for way, runs in found.items():
            cells = [_shown([run[name] for run in runs]) for name in COLUMNS]
            lines.append(f"| {nproc} | {way} | {' | '.join(cells)} |")
    head = measured(f"medians of {options.runs} runs", load)
    publish(f"{head}\n\n" + "\n".join(lines) + "\n", options.write, NAME)


def job(way: str, nproc: int, crashes: int, bound: float) -> dict[str, float]:
    """Run one job for `bound` seconds at most. Return seconds, and MiB, by what was measured."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    (folder / "run").mkdir(mode=0o700)
    command = [*WAYS[way], f"--nproc_per_node={nproc}", str(WORKER), str(folder), str(crashes)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder / "run")}
    try:
        before, begun = _processor_time(), time.time()
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=bound, env=environ, cwd=folder, check=False
            )
        except subprocess.TimeoutExpired:
            if crashes:
                return {"restart": math.nan}
            raise
        if ended.returncode and crashes:
            return {"restart": math.nan}
        if ended.returncode:
            sys.exit(f"{command} exited with {ended.returncode}:\n{ended.stderr[-3000:]}")
        if "--warm" in way and "start cold" in ended.stderr:
            sys.exit(f"{command} started cold:\n{ended.stderr[-3000:]}")
        told = [json.loads(path.read_text()) for path in folder.glob("told.*")]
        first = [each for each in told if each["attempt"] == 0]
        again = [each for each in told if each["attempt"] == 1]
        return {
            "imports": max(each["imported"] for each in first) - begun,
            "step": max(each["stepped"] for each in first) - begun,
            "processor": _processor_time() - before,
            "pss": sum(each["pss"] for each in first) / 1024,
            "restart": max((each["imported"] for each in again), default=math.nan)
            - max(each["ends"] for each in first),
        }
    finally:
        for each in psutil.process_iter(["cmdline"]):  # torchrun that is killed leaves its ranks
            if str(folder) in (each.info["cmdline"] or ()):
                each.kill()
        shutil.rmtree(folder)


def edit(way: str, nproc: int) -> dict[str, float]:
    """Save the script of a running job. Return the seconds until its ranks are there again."""
    if "--max_restart=3" not in WAYS[way]:
        return {"edit": math.nan, "edit step": math.nan}
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    (folder / "run").mkdir(mode=0o700)
    script = folder / "train.py"
    shutil.copy(WORKER, script)
    command = [*WAYS[way], "--watch", f"--nproc_per_node={nproc}", str(script), str(folder), "-1"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder / "run")}

    def all_told(attempt: int) -> list[dict[str, float]]:
        until = time.monotonic() + BOUND
        while len(paths := list(folder.glob(f"told.*.{attempt}"))) < nproc and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.5)  # the last file is complete, and the launcher is idle
        return [json.loads(path.read_text()) for path in paths]

    with (folder / "out").open("w") as out:
        launch = subprocess.Popen(command, stdout=out, stderr=out, env=environ, cwd=folder)
        try:
            all_told(0)
            text = script.read_text() + "\n# edited\n"
            saved = time.time()
            script.write_text(text)
            told = all_told(1)
            return {
                "edit": max(each["imported"] for each in told) - saved,
                "edit step": max(each["stepped"] for each in told) - saved,
            }
        finally:
            launch.send_signal(signal.SIGINT)
            launch.wait()
            shutil.rmtree(folder)


def _processor_time() -> float:
    """Of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _shown(values: list[float]) -> str:
    found = [each for each in values if not math.isnan(each)]
    if not found:
        return "none"
    digits = 0 if statistics.median(found) >= 100 else 2
    some = f" ({len(found)} of {len(values)})" if len(found) < len(values) else ""
    return f"{statistics.median(found):.{digits}f} [{min(found):.{digits}f}-{max(found):.{digits}f}]{some}"


if __name__ == "__main__":
    main()
