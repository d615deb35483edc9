"""A day of a cluster in minutes: six hosts (network namespaces), a job of four nodes, and the same faults for
torchrun with a checkpoint on the disk and for fleetrun with everything that it has against lost time.

    python bench/day.py [--minutes 9.5] [--seed 1] [--pause 0.05] [--write FILE]

The job is a data parallel training over Gloo whose losses are known (`_day_worker.py`); two hosts more run a
launcher that waits. The schedule is drawn from SEED: every 25 to 40 seconds one fault, of kinds that take
turns in a shuffled order, on a host that is in the job then. `bad` is always one of the first two:

  exception   the script raises RuntimeError
  kill        SIGKILL to the rank
  hang        the rank waits for ever (fleetrun: --hang_timeout 8; the collectives of both end after 20 s)
  lost        the host's cable is out and everything on it is killed; it is back after 20 s
  cut         the cable is out for 20 s
  slow        20 % of the packets from and to the host are lost, for 20 s
  bad         from now on for 90 s the rank on this host dies of SIGSEGV, 20 steps after each of its starts
  store       `lost` of the first host, which serves the store (fleetrun: with the next two)

The first host is spared by lost, cut and bad. A launcher that has ended is started again after 5 s, as an
engine would. Both launchers give up a silent node after 5 s. As the day has minutes, fleetrun's hour after
which work makes up for a fault has 60 s (--restart_window); it waits 60 s for a node (--elastic_timeout),
twice as long as by default, because a lost host is away for 20 s and six share the processors of one machine.

`new steps` is how far the training came in the time; `goodput` that times the step of a run without faults,
over the time. `to the next new step` is the time from a fault to the first step that was not made before:
median [least-most]; of `bad` from its beginning to the first new step after the last death on this host.
`wrong` are losses that differ from those of a run without faults. `starts on the bad host`: after it had
failed twice, while it was bad.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _marks import check_marks, publish

from tests.support.hosts import Host, hosts

NAME = "day.py"
WORKER = Path(__file__).with_name("_day_worker.py")
NODES, SPARES = 4, 2
KINDS = ("exception", "kill", "hang", "lost", "cut", "slow", "bad", "store")
AWAY, AGAIN, BAD_FOR = 20.0, 5.0, 90.0
WARM_UP = 25.0  # seconds before the first fault
PORT = 29400

Step = tuple[int, int]
"""Step and rank."""


@dataclass
class Fault:
    """At so many seconds after the start. `which` chooses among the hosts that are in the job then."""

    at: float
    kind: str
    which: float
    host: str = ""
    time: float = 0.0
    recovered: float | None = None


@dataclass
class Day:
    steps: int
    goodput: float
    faults: list[Fault]
    losses: dict[Step, set[float]] = field(default_factory=dict)
    left: int = 0
    bad_again: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    ways = options.way or list(WAYS)
    days = {way: lived(WAYS[way], schedule(options), options) for way in ways}
    known = reference(max(day.steps for day in days.values()))
    publish(table_of(days, known, options), options.write, NAME)


def schedule(options: argparse.Namespace) -> list[Fault]:
    dice = random.Random(options.seed)
    at, kinds, found = WARM_UP, [], []
    while at < options.minutes * 60 - 30:
        if not kinds:
            kinds = dice.sample(KINDS, len(KINDS))
            if not found:  # the last is the next
                kinds.remove("bad")
                kinds.insert(len(kinds) - dice.randrange(2), "bad")
        found.append(Fault(at, kinds.pop(), dice.random()))
        at += dice.uniform(25, 40)
    return found


# ---- The two launchers


def torchrun(first: Host, host: Host, worker: Sequence[str]) -> list[str]:
    conf = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=1,join_timeout=3600"
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}", "--nproc-per-node=1",
        "--max-restarts=1000", "--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:{PORT}",
        "--rdzv-id=day", f"--rdzv-conf={conf}", f"--local-addr={host.address}", *worker, "disk",
    ]  # fmt: skip


def fleetrun(first: Host, host: Host, worker: Sequence[str]) -> list[str]:
    store = ",".join(f"10.77.0.{number}:{PORT}" for number in (1, 2, 3))
    return [
        sys.executable, "-m", "fleetrun", f"--nnodes={NODES}", f"--spares={SPARES}", "--nproc_per_node=1",
        f"--master={store}", "--warm", "--heartbeat_timeout=5", "--hang_timeout=8",
        "--stop_timeout=1", "--rdzv_timeout=3600", "--elastic_timeout=60", "--restart_window=60",
        *worker, "memory",
    ]  # fmt: skip


Launcher = Callable[[Host, Host, Sequence[str]], list[str]]
WAYS: dict[str, Launcher] = {"torchrun, disk": torchrun, "fleetrun --spares --warm, memory": fleetrun}


# ---- One day


class Cluster:
    def __init__(self, found: Sequence[Host], folder: Path, launcher: Launcher, pause: float) -> None:
        self.hosts = found
        self._folder = folder
        self._launcher = launcher
        self._pause = pause
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._down: dict[str, float] = {}
        self._slow: dict[str, float] = {}
        self._again: dict[str, float] = {}
        self._bad: dict[str, float] = {}

    def start(self, host: Host) -> None:
        worker = [str(WORKER), str(self._folder)]
        *command, way = self._launcher(self.hosts[0], host, worker)
        log = (host.folder / "launcher.log").open("ab")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        env["XDG_RUNTIME_DIR"] = str(host.folder)
        argv = [*host.enter, *command, way, "0", str(self._pause)]
        self._running[host.name] = subprocess.Popen(argv, cwd=host.folder, env=env, stdout=log, stderr=log)

    def tend(self) -> None:
        """What an engine and an electrician do."""
        now = time.time()
        for host in self.hosts:
            if now >= self._slow.get(host.name, now + 1):
                del self._slow[host.name]
                host.lossy(0)
            if now >= self._bad.get(host.name, now + 1):
                del self._bad[host.name]
                (self._folder / f"{host.name}.bad").unlink()
            if host.name in self._down:
                if now >= self._down[host.name]:
                    del self._down[host.name]
                    host.link_up()
            elif self._running[host.name].poll() is not None:
                when = self._again.setdefault(host.name, now + AGAIN)
                if now >= when:
                    del self._again[host.name]
                    self.start(host)

    def strike(self, fault: Fault, where: Host) -> None:
        fault.host, fault.time = where.name, time.time()
        if fault.kind == "kill":
            for pid in ranks_on(where):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif fault.kind in ("lost", "cut", "store"):
            where.link_down()
            self._down[where.name] = fault.time + AWAY
            if fault.kind != "cut":
                self.kill_all(where)
        elif fault.kind == "slow":
            where.lossy(20)
            self._slow[where.name] = fault.time + AWAY
        else:
            if fault.kind == "bad":
                self._bad[where.name] = fault.time + BAD_FOR
            (self._folder / f"{where.name}.{fault.kind}").touch()

    def kill_all(self, host: Host) -> None:
        for _ in range(20):
            pids = host.pids()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                return
            time.sleep(0.05)

    def end(self) -> int:
        """How many processes are left, a while after the launchers were told to end."""
        for each in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                each.send_signal(signal.SIGTERM)
        until = time.time() + 40
        while time.time() < until and any(each.poll() is None for each in self._running.values()):
            time.sleep(0.2)
        time.sleep(1)
        return sum(len(host.pids()) for host in self.hosts)


def ranks_on(host: Host) -> list[int]:
    """The processes that train there, not their launcher, nor zygotes, which have no such file open."""
    found = []
    for pid in host.pids():
        with contextlib.suppress(OSError):
            links = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
            if any(f"/told.{host.name}.{pid}." in each for each in links):
                found.append(pid)
    return found


def lived(launcher: Launcher, faults: list[Fault], options: argparse.Namespace) -> Day:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    (folder / "shared").mkdir()
    try:
        with hosts(NODES + SPARES, folder) as found:
            cluster = Cluster(found, folder / "shared", launcher, options.pause)
            for host in found:
                cluster.start(host)
                time.sleep(0.3)
            while not any(each["what"] == "step" for each in said(folder / "shared")):
                time.sleep(0.2)
            began = time.time()
            for fault in faults:
                wait(began + fault.at, cluster)
                there = candidates(fault, found)
                while fault.kind == "bad" and not there and time.time() < began + options.minutes * 60:
                    wait(time.time() + 0.5, cluster)
                    there = candidates(fault, found)
                if there:
                    cluster.strike(fault, there[int(fault.which * len(there))])
            wait(began + options.minutes * 60, cluster)
            over = time.time()
            left = cluster.end()
            if left:
                for host in found:
                    cluster.kill_all(host)
        told = [each for each in said(folder / "shared") if each["time"] < over]
        return judged(told, faults, began, over, left)
    finally:
        shutil.rmtree(folder)


def candidates(fault: Fault, found: Sequence[Host]) -> list[Host]:
    """The hosts that it may strike."""
    if fault.kind == "store":
        return list(found[:1])
    there = [host for host in found if ranks_on(host)]
    return [host for host in there if host is not found[0] or fault.kind not in ("lost", "cut", "bad")]


def wait(until: float, cluster: Cluster) -> None:
    while time.time() < until:
        cluster.tend()
        time.sleep(0.1)


def said(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.glob("told.*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # of a process that was killed
                yield json.loads(line)


def judged(told: list[dict[str, Any]], faults: list[Fault], began: float, over: float, left: int) -> Day:
    steps = sorted((each["time"], each["step"]) for each in told if each["what"] == "step")
    first = min(each["step"] for each in told if each["what"] == "step" and each["time"] >= began)
    for fault in faults:
        if fault.time:
            over_at = max([fault.time, *deaths(told, fault)])
            before = max((step for at, step in steps if at <= over_at + 0.2), default=0)
            fault.recovered = next((at - fault.time for at, step in steps if step > before + 1), None)
    best = max(step for _, step in steps)
    usual = step_time(steps, faults, began)
    day = Day(best - first, (best - first) * usual / (over - began), faults, left=left)
    for each in told:
        if each["what"] == "step":
            day.losses.setdefault((each["step"], each["rank"]), set()).add(each["loss"])
    for fault in faults:
        _, *again = deaths(told, fault) or [0.0]
        if again:
            begun = [each["time"] for each in told if each["what"] == "begin" and each["host"] == fault.host]
            day.bad_again += sum(again[0] < at < fault.time + BAD_FOR for at in begun)
    return day


def deaths(told: list[dict[str, Any]], fault: Fault) -> list[float]:
    """Of the rank on a bad host, in order."""
    if fault.kind != "bad" or not fault.time:
        return []
    mine = [each for each in told if each.get("kind") == "bad" and each["host"] == fault.host]
    return sorted(each["time"] for each in mine if fault.time <= each["time"] < fault.time + BAD_FOR + 1)


def step_time(steps: list[tuple[float, int]], faults: list[Fault], began: float) -> float:
    """The median of new steps before the first fault."""
    until = min((fault.time for fault in faults if fault.time), default=steps[-1][0])
    first: dict[int, float] = {}
    for at, step in steps:
        if began <= at < until:
            first.setdefault(step, at)
    times = [first[step] for step in sorted(first)]
    return statistics.median(later - sooner for sooner, later in itertools.pairwise(times))


def reference(steps: int) -> dict[Step, float]:
    """The losses of a run without faults."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NODES}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [str(WORKER), str(folder), "disk", str(steps + 2000), "0"]
        subprocess.run([*command, *words], env=env, cwd=folder, check=True, capture_output=True)
        return {(each["step"], each["rank"]): each["loss"] for each in said(folder) if each["what"] == "step"}
    finally:
        shutil.rmtree(folder)


def table_of(days: dict[str, Day], known: dict[Step, float], options: argparse.Namespace) -> str:
    names = ["", "new steps", "goodput", "of torchrun's", "to the next new step, s"]
    by_kind = [f"{kind}, s" for kind in KINDS]
    lines = [
        f"| {' | '.join([*names, *by_kind, 'wrong', 'processes left', 'starts on the bad host'])} |",
        "|---|" + "---:|" * (len(names) + len(by_kind) + 2),
    ]
    peer = next(iter(days.values())).steps
    for way, day in days.items():
        times = [fault.recovered for fault in day.faults if fault.recovered is not None]
        kinds = [_of_kind(day, kind) for kind in KINDS]
        wrong = sum(known.get(which) not in losses or len(losses) > 1 for which, losses in day.losses.items())
        cells = [way, str(day.steps), f"{day.goodput:.1%}", f"{day.steps / peer:.2f}", _spread(times), *kinds]
        lines.append(
            f"| {' | '.join([*cells, f'{wrong} of {len(day.losses)}', str(day.left), str(day.bad_again)])} |"
        )
    struck = next(iter(days.values())).faults
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} CPUs, {options.minutes:g} minutes, seed "
        f"{options.seed}, {len(struck)} faults planned.\n\n" + "\n".join(lines) + "\n"
    )


def _of_kind(day: Day, kind: str) -> str:
    found = [fault for fault in day.faults if fault.kind == kind and fault.time]
    times = [fault.recovered for fault in found if fault.recovered is not None]
    late = len(found) - len(times)
    return (_spread(times) if times else "-") + (f", {late} never" if late else "")


def _spread(times: list[float]) -> str:
    if not times:
        return "-"
    return f"{statistics.median(times):.1f} [{min(times):.1f}-{max(times):.1f}]"


if __name__ == "__main__":
    main()
