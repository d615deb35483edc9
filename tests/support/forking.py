"""Forking: members of a job that begin within milliseconds, because they are forked from a process that has
imported torch and the trainers already. They are processes as any other: killed, restarted, waited for.

As a module this is that process: it takes orders as lines of JSON on stdin, and tells on stdout that it has
warmed up, which pid an order became, and which pid has ended how.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import queue
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fleetrun.envs.contract import Cluster
from tests.support.cluster import PATH, ROOT, Job, job

_START_S = 100.0
"""Seconds. For hangs."""
_WARM_S = 280.0
"""It imports torch first, which a disk that is busy may take minutes for; tests have 300."""
_LATER = (
    "pytest",
    "encodings.idna",
    "fleetrun.envs.curve",
    "fsspec",
    "tests.support.scripts",
    "torch.distributed.checkpoint",
    "trainers.inference",
    "trainers.ps.runtime",
    "trainers.ps.server_runtime",
)
"""What members import only when they need it. Most of them do."""


class Forked:
    """A process, with those methods of subprocess.Popen that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout) or self._code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._code

    def send_signal(self, sig: int) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def end(self, code: int) -> None:
        self._code = code
        self._ended.set()


class Forker:
    """The process from which others are forked, which imports `more` modules too. Not for use by several
    threads at once.
    """

    def __init__(self, *more: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forking", *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PATH, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            text=True,
            bufsize=1,
        )
        self._warm = threading.Event()
        self._number = 0
        self._started: dict[int, queue.Queue[Forked]] = {}
        self._alive: dict[int, Forked] = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def start(self, command: Sequence[str], environ: Mapping[str, str], folder: Path, log: Path) -> Forked:
        """Run `python -m MODULE ARGUMENTS`, with its output in `log`."""
        assert command[0] == "-m"
        assert self._popen.stdin is not None
        assert self._warm.wait(_WARM_S), "it has not imported what all of its children need"
        self._number += 1
        number, started = self._number, queue.Queue[Forked](1)
        self._started[number] = started
        order = {"command": command[1:], "environ": environ, "folder": str(folder), "log": str(log)}
        self._popen.stdin.write(json.dumps({**order, "number": number}) + "\n")
        return started.get(timeout=_START_S)

    def job(self, folder: Path, *, trainers: int, servers: int) -> contextlib.AbstractContextManager[Job]:
        """As tests.support.cluster.job, with forked members."""
        return job(folder, trainers=trainers, servers=servers, make=partial(_ForkedJob, self))

    def close(self) -> None:
        """Also while a process that a test left, forked from this one, keeps the pipe of the orders open."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.kill()
        self._popen.wait()
        self._thread.join(_START_S)
        self._popen.stdin.close()
        self._popen.stdout.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            told = json.loads(line)
            if "code" in told:
                self._alive.pop(told["pid"]).end(told["code"])
            elif "number" in told:
                forked = self._alive[told["pid"]] = Forked(told["pid"])
                self._started.pop(told["number"]).put(forked)
            else:
                self._warm.set()


class _ForkedJob(Job):
    def __init__(self, forker: Forker, cluster: Cluster, folder: Path) -> None:
        super().__init__(cluster, folder)
        self._forker = forker

    def _run(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Forked:
        log.write_bytes(b"")  # another job in the folder may have had it
        return self._forker.start(command, environ, self._folder, log)


def _orders(waked: socket.socket) -> Iterator[str]:
    """Lines of stdin; meanwhile, tell which children have ended."""
    text = b""
    while True:
        ready, _, _ = select.select([0, waked], [], [])
        if waked in ready:
            waked.recv(4096)
            _tell_ended()
        if 0 in ready:
            more = os.read(0, 1 << 16)
            if not more:
                return
            *lines, text = (text + more).split(b"\n")
            yield from map(bytes.decode, lines)


def _tell_ended() -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(pid=ended[0], code=os.waitstatus_to_exitcode(ended[1]))


def _tell(**words: int) -> None:
    os.write(1, (json.dumps(words) + "\n").encode())


def _become(order: dict[str, Any]) -> None:
    """In the child: all that makes it the process that was ordered."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for path, flags, number in (
        (os.devnull, os.O_RDONLY, 0),
        (order["log"], os.O_WRONLY | os.O_CREAT, 1),
    ):
        descriptor = os.open(path, flags, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["folder"])
    sys.argv = list(order["command"])


def _serve() -> list[str] | None:
    """The command, in a child; None at the end."""
    waked, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for line in _orders(waked):
        order = json.loads(line)
        # The parent of the test reads the pid before it can read the end: both are told by this process.
        pid = os.fork()
        if not pid:
            _become(order)
            return list(order["command"])
        _tell(number=order["number"], pid=pid)
    return None


def _warm() -> None:
    """Import and load, before the first fork, what every member will need, also compiled kernels, of which
    each member would read its own from the disk.
    """
    import torch

    from tests.support import training  # noqa: F401
    from trainers import fleet  # noqa: F401
    from trainers.data.warm import use_columns
    from trainers.ps import SparseEmbedding, read_values  # noqa: F401
    from trainers.ps.tables.warm import EVERYTHING

    for name in (*_LATER, *sys.argv[1:]):
        importlib.import_module(name)
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(1))
    for optimizer in (torch.optim.SGD([weight]), torch.optim.Adam([weight])):
        weight.sum().backward()
        optimizer.step()  # the first one imports half of torch
    torch.save(weight, io.BytesIO())
    for use in (*EVERYTHING, use_columns):
        use()
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False  # torch's would take half of the time of a member that does little
    gc.freeze()  # no member looks through what all of them share


def _run(module: str) -> NoReturn:
    """As `python -m`, but for freeing at the end all that was imported: that takes seconds."""
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the interpreter would show it
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _warm()
    _tell()
    command = _serve()
    if command is not None:
        _run(command[0])
