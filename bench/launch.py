"""Compares fleetrun with other launchers on this machine: one run, one table.

    python bench/launch.py                                    # the whole table
    python bench/launch.py --quick --scenario start8,fail4    # a look

Every launcher starts the same worker, which stamps CLOCK_MONOTONIC in its first statement and takes orders
over a unix socket. Deaths are seen by pidfd. The runs of all launchers alternate, so that drift of the
machine hits all alike. Whatever the bench started is killed by its end, also after Ctrl-C. Peers are looked
for in TORCH_BIN, PADDLE_BIN (folders; by default that of this interpreter), HONCHO_BIN or PATH, and on PATH
(mpirun).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _measures import Steps
from _peers import Peer, installed, ours
from _rows import Result, Samples
from _run import BenchError, Loop, Run
from _scenarios import SCENARIOS, Scenario
from _table import put_between_marks, table


class Bench:
    """Plays scenarios, one after another, and keeps what they gave."""

    def __init__(self, peers: Sequence[Peer], work: Path, scale: float) -> None:
        self.samples: Samples = {}
        self._peers, self._work, self._scale = peers, work, scale
        self._loop = Loop()
        self._open: list[Run] = []

    def play(self, scenario: Scenario, runs: int) -> None:
        """All rounds of one scenario; in each another launcher is the first."""
        peers = [peer for peer in self._peers if scenario.wants(peer)]
        results = self.samples[scenario.name] = {peer.name: [] for peer in peers}
        rounds = scenario.rounds(runs)
        for number in range(2 * rounds):  # at most twice as many, where some give no figure
            _progress(f"{scenario.name}: {number + 1} of {rounds}")
            turn = number % max(1, len(peers))
            for peer, result in self._round(scenario, peers[turn:] + peers[:turn]):
                results[peer.name] += [result] if result else []
                if "error" in result:
                    sys.stderr.write(f"{scenario.name}, {peer.name}: {result['error']}\n")
                if len(results[peer.name]) == rounds or scenario.enough(result):
                    peers.remove(peer)
            if not peers:
                break

    def _round(self, scenario: Scenario, peers: Sequence[Peer]) -> list[tuple[Peer, Result]]:
        """Every launcher once, all together from barrier to barrier."""
        results: list[tuple[Peer, Result]] = []
        self._open = [Run(self._loop, peer, self._work, self._scale) for peer in peers]
        active = [(run, scenario.steps(run)) for run in self._open]
        while active:
            going_on, pauses = [], [0.0]
            for run, steps in active:
                step = _advance(steps)
                if isinstance(step, float):
                    going_on.append((run, steps))
                    pauses.append(step)
                else:
                    results.append((run.peer, step))
                    run.close()
                    self._open.remove(run)
            active = going_on
            self._loop.settle(max(pauses))
        return results

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


def _advance(steps: Steps) -> float | Result:
    """To the next barrier: how long to pause there; or the result."""
    try:
        return next(steps)
    except StopIteration as done:
        result: Result = done.value
        return result
    except (BenchError, OSError) as error:
        return {"error": str(error)}


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    beside = Path(sys.executable).with_name("fleetrun")
    parser.add_argument(
        "--fleetrun", metavar="COMMAND", default=str(beside), help="our launcher [%(default)s]"
    )
    parser.add_argument(
        "--runs", metavar="N", type=int, default=7, help="runs of each launcher in each scenario"
    )
    parser.add_argument(
        "--only", metavar="NAMES", type=_names, help="only these launchers, such as fleetrun,honcho"
    )
    parser.add_argument(
        "--scenario", metavar="NAMES", type=_names, help=f"only these scenarios: {','.join(SCENARIOS)}"
    )
    parser.add_argument("--quick", action="store_true", help="3 runs, no slow peers, a tenth of the output")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure to this file")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    parser.add_argument("--work", metavar="DIR", type=Path, default=Path(tempfile.gettempdir()),
                        help="directory for the files of the runs [%(default)s]")  # fmt: skip
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    if unknown := set(options.scenario or ()) - set(SCENARIOS):
        parser.error(f"unknown scenario: {', '.join(sorted(unknown))}; choose from {', '.join(SCENARIOS)}")
    if options.write and (options.only or options.scenario or options.quick):
        parser.error("--write needs the whole table. Remove --only, --scenario and --quick.")
    return options


def _names(text: str) -> list[str]:
    return text.split(",")


def _peers(options: argparse.Namespace) -> tuple[list[Peer], list[str]]:
    """Who takes part, ours first, and a line for each peer that does not."""
    own = ours(options.fleetrun)
    peers, notes = installed(own.python)
    peers = [own, *peers]
    if options.only:
        if unknown := set(options.only) - {peer.name for peer in peers}:
            names = ", ".join(peer.name for peer in peers)
            raise FileNotFoundError(f"--only: there is no {', '.join(unknown)} here, but {names}")
        return [peer for peer in peers if peer.name in options.only], []
    if options.quick:
        notes += [f"--quick does not measure {peer.name}" for peer in peers if peer.slow]
        peers = [peer for peer in peers if not peer.slow]
    return peers, notes


def _conditions(peers: Sequence[Peer], notes: Sequence[str], runs: int, load: float) -> str:
    versions = ", ".join(f"{peer.name} {peer.version}".strip() for peer in peers)
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} CPUs, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {runs} runs, "
        f"load {load:.1f} before and {os.getloadavg()[0]:.1f} after. {versions}.",
        "",
        "Cells: median [least-most]; after the dot in a peer's cell: ours / theirs. "
        '"met" in brackets: the limit, where it comes from a peer\'s figure of the same run.',
        *(f"{note}." for note in notes),
        "",
    ]
    return "\n".join(lines)


def _measure(options: argparse.Namespace) -> str:
    """The whole run; returns what is printed."""
    peers, notes = _peers(options)
    runs, scale = (min(options.runs, 3), 0.1) if options.quick else (options.runs, 1.0)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-launch.", dir=options.work) as work:
        bench = Bench(peers, Path(work), scale)
        try:
            for name in options.scenario or SCENARIOS:
                bench.play(SCENARIOS[name], runs)
                if options.json:  # after each: a long run that breaks off has not been for nothing
                    options.json.write_text(json.dumps(bench.samples, indent=1) + "\n")
        finally:
            bench.close()
            _progress("")
    return _conditions(peers, notes, runs, load) + "\n" + table(bench.samples, [peer.name for peer in peers])


def main() -> int:
    options = _arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    document = options.write.read_text() if options.write else ""
    try:
        if options.write:
            put_between_marks(document, "")  # fails now and not in a quarter of an hour
        text = _measure(options)
    except (FileNotFoundError, ValueError) as error:
        sys.stderr.write(f"bench/launch.py: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the running processes were killed\n")
        return 130
    print(text)
    if options.write:
        options.write.write_text(put_between_marks(document, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
