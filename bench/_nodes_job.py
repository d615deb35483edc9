"""A job on several nodes under observation: a launcher for each, on this machine, and their trainers.

Every death is seen by pidfd and every start is stamped by the trainer itself, so no figure has a polling
interval in it. Several jobs may wait at the same time; what happens to them happens in turn (`Turns`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from _nodes_peers import Launcher
from _processes import cpu_seconds, descendants, kill_carriers
from _run import Loop, Watched

SCRIPT = Path(__file__).with_name("_nodes_trainer.py")
EVER = 20.0
"""Seconds after which what has not happened never does."""
_HELD = 1.5
"""Seconds for which a job keeps the others from acting while it waits."""
_PLAIN = ("PYTHON", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "PADDLE_", "FLEETRUN_")


class BenchError(Exception):
    """This run gave no result; the text says why."""


class Turns:
    """So many jobs may act at once."""

    def __init__(self, at_once: int) -> None:
        self._free = threading.BoundedSemaphore(at_once)

    def take(self, loop: Loop) -> None:
        while not self._free.acquire(blocking=False):
            loop.settle(0.02)

    def give(self) -> None:
        self._free.release()


class Trainer(Watched):
    """A process that has said hello. Moments are CLOCK_MONOTONIC, ns."""

    def __init__(
        self, loop: Loop, connection: socket.socket, rank: int, world: int, started: int, pid: int
    ) -> None:
        super().__init__(loop, pid)
        self.rank, self.world, self.started = rank, world, started
        self.dies: int | None = None
        self._connection = connection

    def leave(self, code: int) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(f"exit {code}".encode())


class Node:
    """A launcher; `trainers` are all that it ever started."""

    def __init__(self, loop: Loop, name: str, popen: subprocess.Popen[bytes], out: Path) -> None:
        self.name, self.launched = name, time.monotonic_ns()
        self.trainers: list[Trainer] = []
        self._popen, self._out = popen, out
        self._launcher = Watched(loop, popen.pid)

    @property
    def died(self) -> int | None:
        return self._launcher.died

    @property
    def code(self) -> int:
        """Negative for a signal. Only when it has died."""
        return self._popen.wait(10)

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def live(self) -> list[Trainer]:
        return [trainer for trainer in self.trainers if trainer.died is None]

    @property
    def trainer(self) -> Trainer:
        """The one that runs. Raises BenchError when there is none."""
        if not self.live:
            raise BenchError(
                f"{self.name} has no trainer: {' | '.join(self.output.splitlines()[-3:])[-200:]}"
            )
        return self.live[-1]

    def signal(self, number: int) -> None:
        """To the process that the command started, alone."""
        self._launcher.signal(number)

    def vanish(self) -> None:
        """Its processes are killed, all at the same moment."""
        pids = [self._popen.pid, *descendants(self._popen.pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def cpu(self) -> float:
        """Seconds of the launcher and what it started."""
        return sum(map(cpu_seconds, [self._popen.pid, *descendants(self._popen.pid)]))

    def release(self) -> None:
        for watched in (self._launcher, *self.trainers):
            watched.release()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(10)


class Job:
    """`words` are given to each of its launchers. Its processes carry its mark in their environment."""

    def __init__(self, launcher: Launcher, folder: Path, turns: Turns, words: Sequence[str]) -> None:
        self.launcher, self.words = launcher, tuple(words)
        self.id = uuid.uuid4().hex[:8]
        self.nodes: dict[str, Node] = {}
        self.loop = Loop()
        self._turns = turns
        self.folder = folder
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.folder / "s"))
        self._listener.listen(100)
        self.loop.add(self._listener.fileno(), self._on_call)
        turns.take(self.loop)

    def start(
        self,
        name: str,
        *words: str,
        ours: Sequence[str] = (),
        plan: str = "",
        job_id: str = "",
        within: Sequence[str] = (),
    ) -> Node:
        """A launcher named so. `ours`: words that only fleetrun gets; `plan`: with this code its trainer
        exits soon after each start; `within`: a command that becomes the launcher.
        """
        own = list(ours) if self.launcher.ours else []
        command = [
            *within, *self.launcher.program, *self.words, "--job_id", job_id or self.id,
            "--log_dir", str(self.folder / f"log.{name}"), *words, *own, str(SCRIPT),
        ]  # fmt: skip
        plain = {key: value for key, value in os.environ.items() if not key.startswith(_PLAIN)}
        plain["PYTHONUNBUFFERED"] = "1"  # Paddle prints its command, else only when it ends
        marked = {"BENCH_SOCKET": str(self.folder / "s"), "BENCH_NODE": name}
        out = self.folder / f"out.{name}"
        with out.open("wb") as file:
            popen = subprocess.Popen(
                command, cwd=self.folder, env={**plain, **marked, **({"BENCH_PLAN": plan} if plan else {})},
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        node = self.nodes[name] = Node(self.loop, name, popen, out)
        return node

    def until(self, condition: Callable[[], object], limit: float = EVER) -> bool:
        """False if it does not come true in so many seconds. Others may act while it lasts."""
        if self.loop.until(lambda: bool(condition()), min(limit, _HELD)):
            return True
        with self._aside():
            return self.loop.until(lambda: bool(condition()), limit - _HELD)

    def looked_for(self, condition: Callable[[], object], limit: float = EVER) -> bool:
        """As `until`, of what no process tells: looked for 20 times a second."""
        if self._look(condition, min(limit, _HELD)):
            return True
        with self._aside():
            return self._look(condition, limit - _HELD)

    def _look(self, condition: Callable[[], object], limit: float) -> bool:
        deadline = time.monotonic() + limit
        while not condition() and time.monotonic() < deadline:
            self.loop.settle(0.05)
        return bool(condition())

    def pause(self, seconds: float) -> None:
        self.loop.settle(seconds)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        self._turns.give()
        try:
            yield
        finally:
            self._turns.take(self.loop)

    def _on_call(self) -> None:
        connection, _ = self._listener.accept()
        self._connections.append(connection)
        known: list[Trainer] = []
        self.loop.add(connection.fileno(), lambda: self._on_word(connection, known))

    def _on_word(self, connection: socket.socket, known: list[Trainer]) -> None:
        try:
            word, *rest = connection.recv(1000).decode().split()
        except (OSError, ValueError):  # ValueError: an empty message is the end of file
            self.loop.remove(connection.fileno())
            connection.close()
            return
        if word == "hello":
            known.append(Trainer(self.loop, connection, *map(int, rest[1:])))
            self.nodes[rest[0]].trainers += known
        else:
            known[0].dies = int(rest[0])

    def close(self) -> None:
        """Kill whatever is left of it."""
        for node in self.nodes.values():
            node.signal(signal.SIGKILL)  # first: it might restart what is killed next
        kill_carriers(f"BENCH_SOCKET={self.folder / 's'}".encode())
        for node in self.nodes.values():
            node.release()
        self._listener.close()
        for connection in self._connections:
            connection.close()
        self._turns.give()
