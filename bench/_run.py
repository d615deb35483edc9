"""One launch under observation: a folder, a socket that its workers call, and every death seen by pidfd.

All runs share one `Loop`, so that several launchers can wait side by side while one is measured.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from _peers import Job, Peer
from _processes import carriers as carriers_of
from _processes import carries, children, descendants, kill_carriers, pidfd

WORKER = Path(__file__).with_name("_worker.py")
START_TIMEOUT = 60.0


class BenchError(Exception):
    """This run gave no figure; the text says why."""


class Loop:
    """Waits for whichever descriptor is readable and calls its owner."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, fd: int, callback: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def remove(self, fd: int) -> None:
        self._selector.unregister(fd)

    def until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Handle events until `condition()`; False if it did not come true in `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self._selector.select(left):
                key.data()
        return True

    def settle(self, seconds: float) -> None:
        self.until(lambda: False, seconds)


class Watched:
    """A process whose death is stamped (CLOCK_MONOTONIC, ns) when its pidfd tells."""

    def __init__(self, loop: Loop, pid: int) -> None:
        self.pid = pid
        self.died: int | None = None
        self._loop = loop
        self._fd = pidfd(pid)
        if self._fd is None:
            self.died = time.monotonic_ns()
        else:
            loop.add(self._fd, self._on_death)

    def _on_death(self) -> None:
        self.died = time.monotonic_ns()
        self.release()

    def release(self) -> None:
        if self._fd is not None:
            self._loop.remove(self._fd)
            os.close(self._fd)
            self._fd = None

    def signal(self, number: int) -> None:
        if self._fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)


class Worker(Watched):
    """A process that has said hello. `stamps` holds the time of each thing that it reported."""

    def __init__(self, loop: Loop, connection: socket.socket, started: int, pid: int, rank: int) -> None:
        super().__init__(loop, pid)
        self.started, self.rank = started, rank
        self.stamps: dict[str, int] = {}
        self._connection = connection

    def tell(self, order: str) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(order.encode())


class Run:
    """One launch. Its processes carry its mark in their environment; `close` ends them all."""

    def __init__(self, loop: Loop, peer: Peer, work: Path, scale: float = 1.0) -> None:
        self.loop, self.peer, self.scale = loop, peer, scale
        self.folder = Path(tempfile.mkdtemp(prefix="run.", dir=work))
        self.workers: list[Worker] = []
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.folder / "s"))
        self._listener.listen(1024)
        self._mark = f"BENCH_SOCKET={self.folder / 's'}"
        self._launcher: Watched | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self.launched = 0
        loop.add(self._listener.fileno(), self._on_call)

    # --- starting

    def launch(
        self, processes: int, *, stop: str = "die", empty: bool = False, env: dict[str, str] | None = None,
        to_files: bool = False, restarts: int = 0, stop_timeout: int | None = None,
    ) -> None:  # fmt: skip
        """Let the launcher start its job. `stop`: how workers take SIGTERM (die, stamp, ignore)."""
        script = WORKER
        if empty:
            script = self.folder / "empty.py"
            script.write_text("")
        job = Job(
            script=script, folder=self.folder, processes=processes, to_files=to_files and self.peer.to_files,
            restarts=restarts, stop_timeout=stop_timeout,
        )  # fmt: skip
        self.start(self.peer.command(job), {"BENCH_STOP": stop, **(env or {})})

    def start(self, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        """`command` in the run's folder, its output to the file `out`, without this shell's PYTHON* variables
        (they change how a Python launcher works)."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        socket_name, _, socket_path = self._mark.partition("=")
        environment = {**inherited, "BENCH_STOP": "die", socket_name: socket_path, **(env or {})}
        with (self.folder / "out").open("wb") as out:
            self.launched = time.monotonic_ns()
            self._popen = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        self._launcher = Watched(self.loop, self._popen.pid)

    # --- what happens

    def _on_call(self) -> None:
        connection, _ = self._listener.accept()
        self._connections.append(connection)
        worker: list[Worker] = []
        self.loop.add(connection.fileno(), lambda: self._on_report(connection, worker))

    def _on_report(self, connection: socket.socket, worker: list[Worker]) -> None:
        try:
            word, *numbers = connection.recv(4096).decode().split()
        except (OSError, ValueError):  # ValueError: an empty message is the end of file
            self.loop.remove(connection.fileno())
            return
        if word == "hello":
            worker.append(Worker(self.loop, connection, *map(int, numbers)))
            self.workers += worker
        elif worker:
            worker[0].stamps[word] = int(numbers[0])

    @property
    def launcher(self) -> Watched:
        assert self._launcher is not None, "the run was not started"
        return self._launcher

    @property
    def exit_code(self) -> int:
        """As a shell shows it: 128 + n for signal n."""
        assert self._popen is not None, "the run was not started"
        code = self._popen.wait(10)
        return code if code >= 0 else 128 - code

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    def await_workers(self, count: int) -> list[Worker]:
        """Once `count` workers have called; raises BenchError when they do not."""
        self.loop.until(lambda: len(self.workers) >= count or self.launcher.died is not None, START_TIMEOUT)
        if len(self.workers) < count:
            last = " | ".join(self.output.splitlines()[-3:])
            raise BenchError(f"{len(self.workers)} of {count} started: {last[-200:]}")
        return list(self.workers)

    def await_exit(self, timeout: float) -> bool:
        return self.loop.until(lambda: self.launcher.died is not None, timeout)

    def await_all(self, timeout: float) -> bool:
        """Until the launcher and every worker has gone."""
        return self.loop.until(lambda: self.launcher.died is not None and not self.live(), timeout)

    def live(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.died is None]

    def left(self) -> int:
        """How many processes of this run are alive, whatever they are."""
        return len(carriers_of(self._mark.encode()))

    def has(self, pid: int) -> bool:
        """Whether that process is alive and of this run."""
        return carries(pid, self._mark.encode())

    def own_processes(self) -> list[int]:
        """The launcher and its helpers (a guard, a process per child): all processes that are not workers."""
        workers = [worker.pid for worker in self.workers]
        return [self.launcher.pid, *descendants(self.launcher.pid, besides=workers)]

    def below_guard(self) -> int:
        """Of ours: the launcher proper, the only child of the process that the command started."""
        return children(self.launcher.pid)[0]

    def since_launch(self, moment: int) -> float:
        """Milliseconds."""
        return (moment - self.launched) / 1e6

    # --- the end

    def close(self) -> None:
        """Kill what is left of the run and remove its folder."""
        if self._launcher is not None:
            self._launcher.signal(signal.SIGKILL)  # first: it might restart what is killed next
        kill_carriers(self._mark.encode())
        if self._popen is not None:
            self._popen.wait(10)
        for watched in [self._launcher, *self.workers]:
            if watched is not None:
                watched.release()
        for each in [self._listener, *self._connections]:
            with contextlib.suppress(KeyError, ValueError):  # its end of file has been seen
                self.loop.remove(each.fileno())
            each.close()
        shutil.rmtree(self.folder, ignore_errors=True)
