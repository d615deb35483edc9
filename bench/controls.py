"""False alarms: healthy but unusual jobs, and what the launcher says of them.

    python bench/controls.py                          # all jobs, five ways, 3 ranks; 40 minutes
    python bench/controls.py --ways default --jobs 'evaluates;pipeline' -v
    python bench/controls.py --write docs/benchmarks-launcher.md

A job waits for 100 seconds in a phase that is not training, and for 30 with --hang_timeout 60, which is to be
longer than the longest silence of a healthy job, its start included. Counted are warnings, sentences of
information (`trainer 0 has not come to ...`) and jobs that were ended or started again. The last column has
jobs that are broken.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from _controls_job import BROKEN, HEALTHY
from _marks import publish

JOB = Path(__file__).with_name("_controls_job.py")
RANKS = 3
LONGEST = 420  # seconds of a job
WAYS = ["default", "two nodes", "--hang_timeout 60", "without py-spy", "run directory unusable"]
"""The last three with --hang_timeout 60, as root for `without py-spy`."""
SAYS = "see `fleetrun why`"


@dataclass
class Found:
    """Of one way."""

    rank_seconds: float = 0.0
    jobs: int = 0
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    broken: int = 0


class Running:
    def __init__(self, name: str, way: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        folder.mkdir()
        self.begun = time.monotonic()
        self.watched = way not in ("default", "two nodes")
        self.took = 0.0
        seconds = 30 if self.watched else 100
        nodes = 2 if way == "two nodes" else 1
        options = ["--max_restart", "0", "--stop_timeout", "1"]
        env = dict(os.environ)
        enter: list[str] = []
        if self.watched:
            options += ["--hang_timeout", "60"]
        if way == "without py-spy":
            enter = ["unshare", "--mount", "sh", "-c", 'mount --bind /dev/null "$0"; exec "$@"']
            enter.append(str(Path(sys.executable).with_name("py-spy")))
        elif way == "run directory unusable":
            env["XDG_RUNTIME_DIR"] = str(JOB)  # no folder
        port = _free_port()
        _taken.append(port)
        counts = [2, 1] if nodes == 2 else [RANKS]
        self.launches = []
        for node in range(nodes):
            own = ["--nproc_per_node", str(counts[node])]
            if node:
                _await_server(port)
            if nodes > 1:
                own += ["--nnodes", "2", "--rank", str(node), "--master", f"127.0.0.1:{port}"]
            own += ["--log_dir", str(folder / f"log{node}")]
            command = [*enter, sys.executable, "-m", "fleetrun", *options, *own, str(JOB), name, str(seconds)]
            with (folder / f"err{node}").open("w") as err:
                self.launches.append(
                    subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=err)
                )
        self.suspend_at = self.begun + 30 if name == "suspended" else None
        self.resume_at: float | None = None

    def look(self) -> bool:
        """Whether it has ended. Suspends it in between if it is to be."""
        now = time.monotonic()
        if self.suspend_at is not None and now >= self.suspend_at:
            self.suspend_at, self.resume_at = None, now + 60
            self._signal(signal.SIGTSTP)
        if self.resume_at is not None and now >= self.resume_at:
            self.resume_at = None
            self._signal(signal.SIGCONT)
        return all(launch.poll() is not None for launch in self.launches)

    def _signal(self, number: int) -> None:
        for launch in self.launches:
            launch.send_signal(number)

    def end(self) -> None:
        self.took = time.monotonic() - self.begun
        self._signal(signal.SIGTERM)
        for launch in self.launches:
            launch.wait()

    def said(self) -> list[str]:
        return [line for path in sorted(self.folder.glob("err*")) for line in path.read_text().splitlines()]


_taken = [15_000]


def _free_port() -> int:
    """Below those that the kernel gives to clients, and another one each time."""
    for port in range(_taken[-1] + 1, 20_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no free port")


def _await_server(port: int) -> None:
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)


def run(way: str, names: list[str], folder: Path, at_once: int, verbose: bool) -> Found:
    found = Found()
    broken = {job.__name__ for job in BROKEN}
    waiting, running = list(names), []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(Running(waiting[0], way, folder / waiting.pop(0)))
        for job in tuple(running):
            ended, late = job.look(), time.monotonic() - job.begun > LONGEST
            found_it = job.name in broken and not job.watched and any(SAYS in line for line in job.said())
            if ended or late or found_it:
                running.remove(job)
                job.end()
                _count(found, job, ended=ended, broken=job.name in broken)
        time.sleep(0.5)
    if verbose:
        for title, lines in (
            ("warning", found.warnings),
            ("note", found.notes),
            ("ended", found.ended),
            ("missed", found.missed),
        ):
            for line in lines:
                print(f"    {title}: {line}")
    return found


def _count(found: Found, job: Running, *, ended: bool, broken: bool) -> None:
    lines = job.said()
    told = [line for line in lines if SAYS in line]
    codes = [launch.returncode for launch in job.launches]
    if broken:
        found.broken += 1
        hung = any("Hang: " in line for line in lines)
        if not (told or hung):
            found.missed.append(f"{job.name}: {codes}")
        return
    found.jobs += 1
    found.rank_seconds += RANKS * job.took
    warned = [
        line
        for line in lines
        if " WARNING " in line and "no secret" not in line and "XDG_RUNTIME_DIR" not in line
    ]
    found.warnings += [f"{job.name}: {line}" for line in warned]
    found.notes += [f"{job.name}: {line}" for line in told if line not in warned]
    if not ended or any(codes):
        found.ended.append(f"{job.name}: {codes} after {job.took:.0f} s: {' / '.join(lines[-3:])}")


def table(results: dict[str, Found]) -> list[str]:
    rows = [
        "| way | healthy jobs | rank-hours | ended | warnings | information | broken jobs found |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for way, found in results.items():
        hours = found.rank_seconds / 3600
        rows.append(
            f"| {way} | {found.jobs} | {hours:.2f} | {len(found.ended)} | {len(found.warnings)} "
            f"| {len(found.notes)} | {found.broken - len(found.missed)} of {found.broken} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [job.__name__ for job in (*HEALTHY, *BROKEN)]
    parser.add_argument("--jobs", metavar="NAMES", default=";".join(every), help="separated by semicolons")
    parser.add_argument("--ways", metavar="WAYS", default=";".join(WAYS), help="separated by semicolons")
    parser.add_argument("--at_once", metavar="N", type=int, default=6, help="jobs; each has 3 processes")
    parser.add_argument("-v", "--verbose", action="store_true", help="what was said")
    parser.add_argument("--write", metavar="FILE", type=Path, help="put the table between the marks in it")
    options = parser.parse_args()
    results = {}
    for way in options.ways.split(";"):
        with tempfile.TemporaryDirectory() as folder:
            results[way] = run(way, options.jobs.split(";"), Path(folder), options.at_once, options.verbose)
        print(table({way: results[way]})[-1], flush=True)
    lines = table(results)
    publish("\n".join(lines), options.write, "controls.py")


if __name__ == "__main__":
    main()
