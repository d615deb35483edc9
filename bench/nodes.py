"""What happens to a job on several nodes after a failure: fleetrun and Paddle's launcher compared.

    PADDLE_BIN=FOLDER python bench/nodes.py [--runs 3] [--only fine,level-0]
                              [--write docs/benchmarks-recovery.md]

Real launchers on this machine, one for each node; their trainers are plain Python. The etcd is a real one
(Debian's etcd-server). Paddle needs etcd3 and an old grpcio for it, else its figures are earlier ones.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import _nodes_etcd
import _nodes_http
from _marks import check_marks, publish
from _nodes_cells import cell
from _nodes_job import EVER, BenchError, Job, Turns
from _nodes_peers import Launcher, fleetrun, paddle
from _nodes_play import Scenario
from _nodes_store import Etcd, free_port
from _processes import kill_carriers

NAME = "nodes.py"
PARTS = {
    "They meet at the first node's launcher": _nodes_http.SCENARIOS,
    "They meet in etcd": _nodes_etcd.SCENARIOS,
}
_BESIDE = 8
"""So many jobs at most exist at the same time; few act while the others wait (`Turns`)."""
_MARK = "BENCH_WORK"
"""In the environment of whatever the bench starts: its folder."""

Texts = dict[tuple[str, str], list[str]]


class Bench:
    """Plays scenarios and keeps what their runs gave, by launcher and scenario."""

    def __init__(self, work: Path, keep: bool, runs: int, etcd: str) -> None:
        self.texts: Texts = defaultdict(list)
        self._work, self._keep, self._runs, self._etcd = work, keep, runs, etcd

    def play(self, launcher: Launcher, scenarios: Sequence[Scenario]) -> None:
        """Those that want to be alone first, one by one; then the others."""
        for scenario in scenarios:
            if scenario.alone:
                for _ in range(scenario.runs or self._runs):
                    self._once(launcher, scenario, Turns(1))
        turns = Turns(launcher.at_once)
        with ThreadPoolExecutor(_BESIDE) as pool:
            for number in range(self._runs):
                for scenario in scenarios:
                    if not scenario.alone and number < (scenario.runs or self._runs):
                        pool.submit(self._once, launcher, scenario, turns)

    def _once(self, launcher: Launcher, scenario: Scenario, turns: Turns) -> None:
        began = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"{launcher.name}.{scenario.name}.", dir=self._work))
        job = Job(launcher, folder, turns, self._words(scenario))
        try:
            text = scenario.play(job)
        except (BenchError, OSError, subprocess.TimeoutExpired) as error:
            print(f"# {launcher.name}, {scenario.name}: {error}", file=sys.stderr, flush=True)
            text = "no result"
        finally:
            job.close()
            if not self._keep:
                shutil.rmtree(folder, ignore_errors=True)
        self.texts[launcher.name, scenario.name].append(text)
        shown = f"{launcher.name}, {scenario.name}, {time.monotonic() - began:.0f} s: {cell([text])}"
        print(f"# {shown}", file=sys.stderr, flush=True)

    def _words(self, scenario: Scenario) -> tuple[str, str]:
        if scenario in _nodes_etcd.SCENARIOS:
            return "--master", self._etcd
        return "--master", f"127.0.0.1:{free_port()}"


def wanted(launcher: Launcher | None, chosen: Sequence[str]) -> list[Scenario]:
    """What this launcher can be put through here."""
    if launcher is None:
        return []
    parts = [_nodes_http.SCENARIOS, _nodes_etcd.SCENARIOS if launcher.etcd else ()]
    return [each for part in parts for each in part if not chosen or each.name in chosen]


def table_of(texts: Texts, peers: Sequence[Launcher], runs: int, chosen: Sequence[str], load: str) -> str:
    versions = [f"{each.name} {each.version}".strip() for each in peers]
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} CPUs, {platform.release()}, Python "
        f"{platform.python_version()}, {', '.join(versions)}, {runs} runs, load {load}. Medians; "
        f"[least-most] where runs differ by much. Times count from the event. For ever: still so after "
        f"{EVER:.0f} s.",
    ]
    for title, scenarios in PARTS.items():
        lines += ["", f"| {title} | Paddle | fleetrun |", "|---|---|---|"]
        lines += [
            f"| {scenario.title} | {_theirs(texts, scenario)} | {_ours(texts, scenario)} |"
            for scenario in scenarios
            if not chosen or scenario.name in chosen
        ]
    return "\n".join(lines)


def _ours(texts: Texts, scenario: Scenario) -> str:
    found = texts.get(("fleetrun", scenario.name))
    return cell(found) if found else "not run"


def _theirs(texts: Texts, scenario: Scenario) -> str:
    found = texts.get(("Paddle", scenario.name))
    if found:
        return cell(found)
    return f"{scenario.earlier} (measured earlier)" if scenario.earlier else "not run"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [scenario.name for part in PARTS.values() for scenario in part]
    parser.add_argument("--runs", metavar="N", type=int, default=3)
    parser.add_argument(
        "--only", metavar="NAME,NAME", type=partial(_chosen, names), default=[], help=", ".join(names)
    )
    parser.add_argument("--launcher", metavar="NAME", help="fleetrun or Paddle alone")
    parser.add_argument("--work", metavar="DIR", type=Path, help="directory for the output of the launchers")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    before = os.getloadavg()[0]
    found = [each for each in (fleetrun(), paddle()) if each is not None]
    peers = [each for each in found if options.launcher in (None, each.name)]
    with ExitStack() as stack:
        work = _folder(options.work, stack)
        etcd = stack.enter_context(closing(Etcd(work / "etcd"))) if any(each.etcd for each in peers) else None
        bench = Bench(work, options.work is not None, options.runs, etcd.url if etcd else "")
        for launcher in peers:
            bench.play(launcher, wanted(launcher, options.only))
    load = f"{before:.1f} before and {os.getloadavg()[0]:.1f} after"
    publish(table_of(bench.texts, peers, options.runs, options.only, load), options.write, NAME)


def _folder(given: Path | None, stack: ExitStack) -> Path:
    """Where everything happens; in memory, so that no disk is measured. With the stack, or at a signal,
    whatever was started here ends.
    """
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    made = given or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes.", dir=memory)))
    made.mkdir(exist_ok=True)
    work = made.resolve()
    os.environ[_MARK] = str(work)
    mark = f"{_MARK}={work}".encode()
    stack.callback(kill_carriers, mark)

    def end(number: int, _: object) -> None:
        kill_carriers(mark)
        if given is None:
            shutil.rmtree(work, ignore_errors=True)
        kill_carriers(mark)  # what a thread has just started
        os._exit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # nothing inherits that one is ignored, too
        signal.signal(each, end)
    return work


def _chosen(names: Sequence[str], text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(names):
        raise argparse.ArgumentTypeError(f"unknown scenario: {', '.join(sorted(unknown))}")
    return chosen


if __name__ == "__main__":
    main()
