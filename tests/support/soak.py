"""A job of two to four nodes that random things happen to, and what must be true of it whatever happens."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.command import Launch
from tests.support.nodes import Etcd, Nodes
from tests.support.traces import left_behind, state_of, wait_until

TRAINER = Path(__file__).parent / "scripts" / "soak_trainer.py"
HEARTBEAT = 2.0
_BRIEF = 0.3 * HEARTBEAT
"""What the host of the store may be away: longer, and the job is over, which shall not be the rule."""
BOUND = 60.0
"""Seconds to an end once nothing happens any more: several times the job's own deadlines."""
_OPTIONS = (
    "--heartbeat_timeout", str(HEARTBEAT), "--elastic_timeout", "2", "--rdzv_timeout", "15",
    "--max_restart", "1000", "--stop_timeout", "2", "--log_level", "INFO",
)  # fmt: skip
_LINE = re.compile(r"^LAUNCH \w+ (\S+ \S+)", re.MULTILINE)
_MET = re.compile(
    rf"{_LINE.pattern} Node (\d+) of (\d+)(?: \(generation (\d+)\))?: (.*?)(?:; here .*)?$", re.MULTILINE
)


class Soak:
    """One job on four hosts. The first serves the store, unless there is an etcd."""

    def __init__(self, nodes: Nodes, shared: Path, seed: str, etcd: Etcd | None = None) -> None:
        self.random = random.Random(seed)
        self.story: list[str] = []
        self._nodes = nodes
        self._etcd = etcd
        self._first = 0 if etcd is not None else 1  # of those that the job can do without
        self._shared = shared
        self._launches: list[Launch] = []
        self._on: dict[int, Launch] = {}
        self._began = time.monotonic()
        self._later: list[tuple[float, str, Callable[[], None]]] = []
        self._faults: dict[Callable[[], None], int] = {
            self._join: 6, self._trainer_fails: 4, self._trainer_is_killed: 4, self._launcher_is_killed: 3,
            self._node_leaves: 2, self._launcher_pauses: 3, self._cut: 5, self._lose: 2, self._reset: 4,
            self._etcd_is_killed: 4 if etcd is not None else 0,
        }  # fmt: skip

    # ---- the job

    def begin(self) -> None:
        for number in (0, *self.random.sample((1, 2, 3), self.random.choice((1, 2, 3)))):
            self._start(number)
        if self.random.random() < 0.8:
            self._until_it_runs()

    def happen(self) -> bool:
        """One thing; False when the job is over already."""
        if self.random.random() < 0.5:
            self._until_it_runs()
        self._pass_time(self.random.choice((0.02, 0.3, 1.0)) * self.random.random())
        if self._over():
            return False
        names, weights = zip(*self._faults.items(), strict=True)
        self.random.choices(names, weights)[0]()
        return True

    def finish(self) -> None:
        """Everything is well again, and it is enough: the job ends."""
        self._pass_time(0.0, everything=True)
        for host in self._nodes.hosts[:4]:
            host.heal()
        if self.random.random() < 0.15 and self._etcd is None:
            self._store_is_killed()
        (self._shared / "enough").touch()
        if not self._over():
            for number in range(self._first, 4):
                if self._running(number) is None and self.random.random() < 0.7:
                    self._start(number)
        for launch in self._launches:
            launch.wait(BOUND)
        self._note("all have ended")

    # ---- what must be true

    def check(self) -> None:
        assert not self._told() or any(self._met()), "no launcher says where it is"
        jobs = self._check_generations()
        if jobs == 1:
            self._check_trainers()
        done = {each["launch"] for each in self._told() if each["what"] == "done"}
        for launch in self._launches:
            assert "Traceback" not in launch.err, launch
            if launch.code == 0:
                assert launch.token in done, f"0 without the work\n{launch}"
            wait_until(lambda launch=launch: not left_behind(launch.token), "processes are left")  # type: ignore[misc]

    def _check_generations(self) -> int:
        """How many jobs there were: once all nodes of one have left an etcd, it can hold another."""
        jobs = 1
        members: dict[tuple[int, int], Launch] = {}
        groups: dict[int, tuple[str, str]] = {}
        for when, generation, rank, size, where, launch in sorted(self._met(), key=lambda met: met[:3]):
            other = members.get((generation, rank))
            if other is not None:
                assert _LINE.findall(other.err)[-1] < when, f"two of rank {rank} in generation {generation}"
                jobs, members, groups = jobs + 1, {}, {}
            assert 2 <= int(size) <= 4
            members[generation, rank] = launch
            group = groups.setdefault(generation, (size, where))
            assert group == (size, where), f"generation {generation} is not the same for all: {group}"
        return jobs

    def _met(self) -> Iterator[tuple[str, int, int, str, str, Launch]]:
        for launch in self._launches:
            for when, rank, size, generation, where in _MET.findall(launch.err):
                yield when, int(generation or 1), int(rank), size, where, launch

    def _check_trainers(self) -> None:
        """The same, as the scripts see it."""
        starts = [each for each in self._told() if each["what"] == "start"]
        places = [(each["PADDLE_RESTART_COUNT"], each["RANK"]) for each in starts]
        assert len(set(places)) == len(places), f"two of one rank in one generation: {starts}"
        worlds = {(each["PADDLE_RESTART_COUNT"], each["WORLD_SIZE"]) for each in starts}
        assert len(worlds) == len({count for count, _ in worlds}), f"one generation, two sizes: {worlds}"

    # ---- things that happen

    def _join(self) -> None:
        free = [number for number in range(self._first, 4) if self._running(number) is None]
        if free:
            self._start(self.random.choice(free))
        else:
            self._trainer_fails()

    def _trainer_fails(self) -> None:
        number, launch = self._any()
        self._note(f"the trainer of h{number + 1} fails")
        (self._shared / f"fail.{launch.token}").touch()

    def _trainer_is_killed(self) -> None:
        alive = self._trainers()
        if alive:
            pid = self.random.choice(alive)
            self._note(f"trainer {pid} is killed")
            _signal(pid, signal.SIGKILL)

    def _launcher_is_killed(self) -> None:
        number, launch = self._any(self._first)
        guard = self.random.random() < 0.5
        self._note(f"the {'guard' if guard else 'launcher'} of h{number + 1} is killed")
        _signal(launch.popen.pid if guard else _launcher(launch), signal.SIGKILL)

    def _store_is_killed(self) -> None:
        launch = self._running(0)
        if launch is not None:
            self._note("the launcher with the store is killed")
            _signal(_launcher(launch), signal.SIGKILL)

    def _etcd_is_killed(self) -> None:
        assert self._etcd is not None
        seconds = self._note_for("etcd is killed, and started again", 2 * HEARTBEAT)
        self._etcd.kill()
        self._pass_time(seconds)
        self._etcd.start()

    def _node_leaves(self) -> None:
        number, launch = self._any(self._first)
        self._note(f"h{number + 1} is told to leave")
        _signal(launch.popen.pid, self.random.choice((signal.SIGTERM, signal.SIGINT)))

    def _launcher_pauses(self) -> None:
        number, launch = self._any()
        pid = _launcher(launch)
        longest = _BRIEF if number < self._first else 1.5 * HEARTBEAT
        seconds = self._note_for(f"the launcher of h{number + 1} pauses", longest)
        _signal(pid, signal.SIGSTOP)
        self._after(seconds, f"h{number + 1} goes on", lambda: _signal(pid, signal.SIGCONT))

    def _cut(self) -> None:
        number = self.random.choice((0, 1, 1, 2, 2, 3, 3))
        host, others = self._nodes.hosts[number], [h for h in self._nodes.hosts if h.name != f"h{number + 1}"]
        how = self.random.choice(("link_down", "partition_from", "drop_from", "drop_to"))
        longest = _BRIEF if number < self._first else 2 * HEARTBEAT
        seconds = self._note_for(f"{how} of {host.name}", longest)
        getattr(host, how)(*(() if how == "link_down" else others))
        self._after(seconds, f"{host.name} heals", host.heal)

    def _lose(self) -> None:
        host = self.random.choice(self._nodes.hosts[:4])
        seconds = self._note_for(f"{host.name} loses packets", 3.0)
        host.lossy(self.random.randint(5, 40))
        self._after(seconds, f"{host.name} heals", host.heal)

    def _reset(self) -> None:
        host = self.random.choice(self._nodes.hosts[:4])
        self._note(f"connections of {host.name} are reset")
        host.reset_connections()

    # ---- helpers

    def _until_it_runs(self) -> None:
        """If it does soon."""
        until = time.monotonic() + 3 * HEARTBEAT
        while time.monotonic() < until and not self._trainers() and not self._over():
            self._pass_time(0.02)

    def _trainers(self) -> list[int]:
        pids = [each["pid"] for each in self._told() if each["what"] == "start"]
        return [pid for pid in pids if state_of(pid) in ("R", "S", "D")]

    def _told(self) -> list[dict[str, Any]]:
        path = self._shared / "story"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _start(self, number: int) -> None:
        self._note(f"h{number + 1} starts")
        launch = self._nodes.start(
            number, *_OPTIONS, nnodes="2:4", script=str(TRAINER), env={"SOAK_SHARED": str(self._shared)}
        )
        self._launches.append(launch)
        self._on[number] = launch

    def _over(self) -> bool:
        needed = range(1) if self._etcd is None else range(4)
        return not any(self._running(number) for number in needed)

    def _running(self, number: int) -> Launch | None:
        launch = self._on.get(number)
        return launch if launch is not None and launch.popen.poll() is None else None

    def _any(self, first: int = 0) -> tuple[int, Launch]:
        found = [(number, launch) for number in range(first, 4) if (launch := self._running(number))]
        return self.random.choice(found or list(self._on.items())[:1])

    def _note(self, what: str) -> None:
        self.story.append(f"{time.strftime('%H:%M:%S')} {time.monotonic() - self._began:6.2f} {what}")

    def _note_for(self, what: str, longest: float) -> float:
        seconds = self.random.random() * longest
        self._note(f"{what} for {seconds:.2f} s")
        return seconds

    def _after(self, seconds: float, what: str, then: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, what, then))

    def _pass_time(self, seconds: float, everything: bool = False) -> None:
        """What lasts only for a while ends when its time comes."""
        until = time.monotonic() + seconds
        while self._later and (everything or min(self._later, key=_due)[0] <= until):
            due = min(self._later, key=_due)
            self._later.remove(due)
            if not everything:
                time.sleep(max(0.0, due[0] - time.monotonic()))
            self._note(due[1])
            due[2]()
        time.sleep(max(0.0, until - time.monotonic()))


def _due(entry: tuple[float, Any, Any]) -> float:
    return entry[0]


def _launcher(launch: Launch) -> int:
    """The process below the guard, or the guard when that has just ended."""
    try:
        return launch.launcher
    except (OSError, IndexError):
        return launch.popen.pid


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
