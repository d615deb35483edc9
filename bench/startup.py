"""What a launch of a program that does nothing costs, two versions of fleetrun in turns.

    git worktree add /tmp/before COMMIT
    python bench/startup.py --than /tmp/before [--pairs 30] [--idle 20]

Which of the two is first alternates, so that what else the machine does hits both alike; the versions run
with this interpreter. CPU is that of the guard, the launcher and the two programs (a shell that says that it
has begun), from the kernel's own count; other work on the machine makes it larger, so read the quickest too.
Memory is what guard and launcher have for themselves while a job runs (the kernel's USS), and the idle CPU
what both use then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

BEGIN = 'read -r ns rest < /proc/$PPID/schedstat; echo "$PPID $ns" > "{fifo}"'
HERE = Path(__file__).resolve().parent.parent

Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--than", type=Path, required=True, help="a directory with another version")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--idle", type=float, default=20.0, help="seconds for which a job idles")
    parser.add_argument("words", nargs="*", help="options of fleetrun, after `--`")
    options = parser.parse_args()
    trees = {"then": options.than.resolve(), "now": HERE}
    told: dict[str, list[Figures]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for number in range(-1, options.pairs):
            for name in sorted(trees, reverse=bool(number % 2)):
                figures = launch(trees[name], work, options.words)
                if number >= 0:  # the first ones only compile
                    told[name].append(figures)
        for name, tree in trees.items():
            told[name].append(idle(tree, work, options.words, options.idle))
    for line in table(told):
        print(line)


def launch(tree: Path, work: Path, words: list[str]) -> Figures:
    """One whole launch of two programs that only say that they have begun."""
    with said(work) as (script, hear):
        script.write_text(f"#!/bin/sh\n{BEGIN.format(fifo=work / 'fifo')}\n")
        process, start = started(tree, work, words)
        first, cpu = hear()[1:]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"a launch of {tree} exited with code {process.returncode}")
        return {
            "CPU of a launch, ms": (usage.ru_utime + usage.ru_stime) * 1e3,
            "of it the launcher's until the first program runs, ms": cpu,
            "time until the first program runs, ms": (first - start) * 1e3,
            "time of a launch, ms": (time.monotonic() - start) * 1e3,
        }


def idle(tree: Path, work: Path, words: list[str], seconds: float) -> Figures:
    """A job that sleeps."""
    with said(work) as (script, hear):
        script.write_text(f"#!/bin/sh\n{BEGIN.format(fifo=work / 'fifo')}\nexec sleep 3600\n")
        process, _ = started(tree, work, words)
        launcher = int(hear()[0])
        time.sleep(2)  # until it has done what there is to do behind a start
        both = (process.pid, launcher)
        before = sum(map(used, both))
        time.sleep(seconds)
        after = sum(map(used, both))
        memory = sum(map(own_memory, both))
        process.send_signal(signal.SIGTERM)
        process.wait()
        return {"memory, MB": memory, f"idle CPU in {seconds:g} s, ms": after - before}


@contextlib.contextmanager
def said(work: Path) -> Iterator[tuple[Path, Callable[[], tuple[float, float, float]]]]:
    """A script to write, and what waits for it to run: its launcher, the moment, the launcher's CPU in ms."""
    script, fifo = work / "program", work / "fifo"
    script.touch(0o755)
    script.chmod(0o755)
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDWR)

    def hear() -> tuple[float, float, float]:
        launcher, ns = os.read(end, 4096).splitlines()[0].split()
        return float(launcher), time.monotonic(), int(ns) / 1e6

    try:
        yield script, hear
    finally:
        os.close(end)
        fifo.unlink()


def started(tree: Path, work: Path, words: list[str]) -> tuple[subprocess.Popen[bytes], float]:
    environ = {**os.environ, "PYTHONPATH": str(tree), "XDG_RUNTIME_DIR": str(work)}  # not queried
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every launch would compile what was changed last
    options = ["--nproc_per_node=2", f"--log_dir={work}/log", *words, "--no_python", f"{work}/program"]
    command = [sys.executable, "-m", "fleetrun", *options]
    start = time.monotonic()
    with (work / "console").open("wb") as console:
        process = subprocess.Popen(command, cwd=work, env=environ, stdout=console, stderr=console)
    return process, start


def used(pid: int) -> float:
    """Milliseconds of CPU so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6


def own_memory(pid: int) -> float:
    """MB that only this process has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def table(told: Mapping[str, list[Figures]]) -> Iterator[str]:
    yield "| | then | now |"
    yield "|---|---:|---:|"
    for name in {name: None for figures in told["now"] for name in figures}:
        cells = [_cell([each[name] for each in figures if name in each]) for figures in told.values()]
        yield f"| {name} | {' | '.join(cells)} |"


def _cell(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3g}"
    return f"{statistics.median(values):.1f} [{min(values):.1f}]"


if __name__ == "__main__":
    main()
