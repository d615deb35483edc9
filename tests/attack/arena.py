"""The place of one attack: a folder, a seeded chance, the command, and what attacks ask of its jobs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from tests.support.command import Fleetrun, Launch
from trainers.errors import FleetError

PATIENCE = 300.0
"""Seconds, for hangs."""


@dataclass
class Arena:
    random: Random
    folder: Path
    fleetrun: Fleetrun
    story: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def note(self, what: str) -> None:
        self.story.append(f"{time.monotonic() - self.began:7.2f} {what}")

    def pause(self, longest: float, shortest: float = 0.0) -> None:
        time.sleep(self.random.uniform(shortest, longest))


Attack = Callable[[Arena], None]


def containers(launch: Launch) -> dict[str, int]:
    """The pids of the processes that the launcher started, by `trainer.0`, `ps.1`."""
    found = {}
    for pid in _children(launcher(launch)):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            for word in words:
                if word.startswith(b"FLEETRUN_CONTAINER="):
                    found[word.decode().partition("=")[2].partition(".")[2]] = pid
    return found


def launcher(launch: Launch) -> int | None:
    """The pid of the guard's child; None when there is none now."""
    with contextlib.suppress(OSError, IndexError):
        return launch.launcher
    return None


def _children(pid: int | None) -> list[int]:
    if pid is None:
        return []
    with contextlib.suppress(OSError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def send(pid: int | None, number: int) -> bool:
    """Whether there was such a process."""
    if pid is None:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def victim_pid(launch: Launch, victim: str) -> int | None:
    """`guard`, `launcher` or a container such as `ps.1`."""
    if launch.popen.poll() is not None:
        return None
    if victim == "guard":
        return launch.popen.pid
    return launcher(launch) if victim == "launcher" else containers(launch).get(victim)


@contextlib.contextmanager
def refusal_of(path: Path) -> Iterator[list[FleetError]]:
    """An error of the runtime in here must name this path; it is in the list then."""
    refused: list[FleetError] = []
    try:
        yield refused
    except FleetError as error:
        refused.append(error)
    if refused and str(path) not in str(refused[0]):
        raise AssertionError(f"the error does not name {path}") from refused[0]


def sleep_or_end(launch: Launch, seconds: float) -> bool:
    """Whether it still runs after so many seconds."""
    deadline = time.monotonic() + seconds
    while launch.popen.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return launch.popen.poll() is None


def check_spotless(launch: Launch) -> None:
    """Of a command that has ended: no process of it is left, and it showed no traceback of its own."""
    launch.no_process()
    assert "this is a bug in fleetrun" not in launch.said, launch


def check_clean_text(launch: Launch) -> None:
    assert "Traceback" not in launch.err, launch
    assert "this is a bug in fleetrun" not in launch.said, launch


# ---- Jobs on parameter servers

SERVERS = TRAINERS = 2
JOB = ("--server_num", str(SERVERS), "--trainer_num", str(TRAINERS), "--max_restart", "1000")


@dataclass
class Counting:
    """A job of the script `ps_counting`: each push adds 1 to the rows of its trainer and to those of all."""

    arena: Arena
    steps: int
    words: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    ps: dict[str, object] = field(default_factory=dict)

    def start(self, env: dict[str, str] | None = None) -> Launch:
        folder = str(self.arena.folder)
        ps = {"durability": "log", "durability_dir": f"{folder}/kept", "snapshot_interval_s": 0.4}
        given = {"folder": folder, "steps": self.steps, "ps": ps | self.ps, **self.options}
        script = ("-m", "tests.support.scripts.ps_counting", json.dumps(given))
        return self.arena.fleetrun.start(*JOB, *self.words, *script, env=self.env | (env or {}))

    def reached(self) -> int:
        """The highest step that a trainer printed; -1 for none."""
        return reached(self.arena.folder, "pushed")

    def check(self, launch: Launch) -> None:
        """The job is complete, and no push was lost or doubled."""
        assert launch.code == 0, launch
        exact = [self.steps] * 4 + [self.steps * TRAINERS] * 4
        for rank in range(TRAINERS):
            newest = max(
                self.arena.folder.glob(f"log/*.trainer.{rank}.log"), key=lambda path: path.stat().st_mtime_ns
            )
            said = re.findall(r"^values (.*)$", newest.read_text(errors="replace"), re.MULTILINE)
            assert said, f"trainer {rank} said no values\n{launch}"
            assert [float(word) for word in said[-1].split()] == exact, (
                f"trainer {rank}: {said[-1]}\n{launch}"
            )
        assert not list(self.arena.folder.glob("kept/*")), "the job is over: nothing needs to be kept"


def reached(folder: Path, word: str) -> int:
    texts = [path.read_text(errors="replace") for path in folder.glob("log/*.trainer.*.log")]
    return max(
        (int(n) for text in texts for n in re.findall(rf"^{word} (\d+)$", text, re.MULTILINE)), default=-1
    )


def until_training(arena: Arena, launch: Launch, word: str = "pushed", further: int = 1) -> bool:
    """Until some trainer has gone on by so many steps; False when the command has ended before."""
    before, deadline = reached(arena.folder, word), time.monotonic() + PATIENCE
    while launch.popen.poll() is None:
        if reached(arena.folder, word) >= before + further:
            return True
        assert time.monotonic() < deadline, f"no step for {PATIENCE:g} s\n{launch}"
        time.sleep(0.02)
    return False


# ---- What listens


def listening(launch: Launch, roles: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """(address, port, pid) of what the launcher, and the containers of these roles, listen on."""
    pids = {pid for name, pid in containers(launch).items() if name.partition(".")[0] in roles}
    found = []
    for pid in pids | {launcher(launch) or 0}:
        with contextlib.suppress(psutil.Error):
            sockets = psutil.Process(pid).net_connections("tcp")
            open_ = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
            found += [(where.ip, where.port, pid) for where in open_]
    return found
