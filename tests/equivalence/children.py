"""The members of a job, which are forked from this process, and what they found.

This process has imported everything. Each member writes what it found into a file. A job that hangs is
killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from fleetrun.envs import contract
from fleetrun.envs.contract import Cluster, Member, Role
from trainers.errors import FleetError

DEADLINE_S = 120.0
"""A run that takes longer hangs. An ordinary one takes a second on an idle machine."""
_AFTER_S = 60.0
"""How long servers may run after their trainers."""


# ---- What a process found


@dataclass(frozen=True, slots=True)
class Seen:
    """A value that the loop saw. `shared`: it is of this trainer's examples, and the mean over trainers is
    that of one process.
    """

    label: str
    value: torch.Tensor
    shared: bool = False
    there: bool = True
    """False: only other trainers saw it."""


@dataclass(slots=True)
class Result:
    """What a process found. `error`: its type, whether fleet refused, and its text. `stage`: how many times
    the job had been started again.
    """

    seen: list[Seen] = field(default_factory=list)
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    error: tuple[str, bool, str] | None = None
    trace: str = ""
    stage: int = 0

    def failed(self, error: Exception) -> None:
        self.error = (type(error).__name__, isinstance(error, FleetError), str(error))
        self.trace = traceback.format_exc()


# ---- In the process that starts the members of a job


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a program."""

    name: str
    trainers: int
    a_sync: bool = False


@dataclass(slots=True)
class Child:
    """A member of a job."""

    pid: int
    fd: int
    path: Path
    log: Path

    def read(self) -> Result | None:
        """None if it ended without a result."""
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            found: Result = pickle.loads(self.path.read_bytes())
            return found
        return None

    def kill(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    @property
    def ended(self) -> bool:
        return bool(select.select([self.fd], [], [], 0)[0])


def fork(folder: Path, name: str, environ: dict[str, str], call: Callable[[], Result]) -> Child:
    """Start a process that writes what `call` returns."""
    path, log = folder / f"{name}.result", folder / f"{name}.log"
    pid = os.fork()
    if not pid:
        _become(folder, log, path, environ, call)
    return Child(pid, os.pidfd_open(pid), path, log)


def start_member(
    folder: Path, cluster: Cluster, role: Role, rank: int, call: Callable[[], Result], name: str = ""
) -> Child:
    """Start a member of a cluster with the environment that the launcher would give it."""
    places = cluster.servers if role is Role.SERVER else cluster.trainers
    member = Member(
        cluster=cluster,
        role=role,
        rank=rank,
        endpoint=places[rank],
        local_rank=rank,
        local_size=len(places),
        pod="testpod",
        omp_threads=1,
    )
    environ = contract.without_contract(os.environ) | contract.write(member)
    return fork(folder, name or f"{role}-{rank}", environ, call)


def _become(
    folder: Path, log: Path, path: Path, environ: dict[str, str], call: Callable[[], Result]
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        faulthandler.enable(output)
        faulthandler.register(signal.SIGUSR1, output)
        warnings.simplefilter("ignore")
        result = call()
        aside = path.with_suffix(".part")
        aside.write_bytes(pickle.dumps(result))
        aside.replace(path)
        code = 0
    except BaseException:  # noqa: BLE001  # the end of a child
        traceback.print_exc()
    finally:
        os._exit(code)


@contextlib.contextmanager
def a_folder() -> Iterator[Path]:
    """A folder for a job, removed after it."""
    folder = Path(tempfile.mkdtemp(prefix="equivalence-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(children: Sequence[Child], deadline: float) -> bool:
    """Until all have ended, or one of them with an error; False at the deadline."""
    waiting = list(children)
    while waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        ready, _, _ = select.select([each.fd for each in waiting], [], [], left)
        for each in [each for each in waiting if each.fd in ready]:
            waiting.remove(each)
            found = each.read()
            if found is None or found.error is not None:
                return True
    return True


@dataclass(slots=True)
class Job:
    """One run under way: `results` waits for it. `later`: each starts the trainers of another stage, when
    those before have ended well. `awaited`: whether servers end by themselves.
    """

    trainers: list[Child] = field(default_factory=list)
    servers: list[Child] = field(default_factory=list)
    later: list[Callable[[], list[Child]]] = field(default_factory=list)
    awaited: bool = True
    deadline: float = field(default_factory=lambda: time.monotonic() + DEADLINE_S)

    def results(self) -> tuple[list[Result | None], str]:
        """Of each trainer that has one, and a problem: a hang, or the end of a process without a result."""
        problem = ""
        while (
            (ended := _wait(self.trainers, self.deadline)) and self.later and not self._failed(self._read())
        ):
            self.trainers += self.later.pop(0)()
        if not ended:
            problem = f"hang: no end within {DEADLINE_S:.0f} s\n" + self._stacks()
        found = self._read()
        failed = self._failed(found)
        awaited = self.servers if self.awaited else []
        if not problem and not failed and not _wait(awaited, time.monotonic() + _AFTER_S):
            problem = "hang: a server does not end\n" + self._stacks()
        dead = [each for each in self.trainers + awaited if each.ended and each.read() is None]
        if not problem and dead:
            problem = "a process ended without a result\n" + "\n".join(each.tail() for each in dead)
        failures = [each.read() for each in awaited if each.ended]
        if not problem and not failed:
            problem = "\n".join(each.trace for each in failures if each is not None and each.trace)
        return found, problem

    def kill(self) -> None:
        for each in self.trainers + self.servers:
            each.kill()

    def _read(self) -> list[Result | None]:
        return [each.read() if each.ended else None for each in self.trainers]

    @staticmethod
    def _failed(found: Sequence[Result | None]) -> bool:
        return any(each is None or each.error is not None for each in found)

    def _stacks(self) -> str:
        for each in self.trainers + self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGUSR1)
        time.sleep(0.5)  # for the handlers to write, and only after a hang
        return "\n".join(f"{each.log.name}:\n{each.tail()}" for each in self.trainers + self.servers)
