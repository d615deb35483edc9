"""Jobs of real processes without the launcher: environments by the contract, ports reserved as the
launcher does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from fleetrun.envs import contract
from fleetrun.envs.contract import Cluster, Member, Mode, Role
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
PATH = f"{ROOT}:{ROOT / 'tests' / 'support' / 'child'}"
"""PYTHONPATH of what tests start: the packages, and what lets a process start soon."""


@contextmanager
def reserved_endpoints(count: int) -> Iterator[tuple[str, ...]]:
    """Loopback endpoints whose ports the kernel gives to nobody else; their owners can still bind them."""
    with ExitStack() as stack:
        endpoints = []
        for _ in range(count):
            holder = stack.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            endpoints.append(f"127.0.0.1:{holder.getsockname()[1]}")
        yield tuple(endpoints)


class Running(Protocol):
    """What is needed of a subprocess.Popen."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...

    def terminate(self) -> None: ...


@dataclass(slots=True)
class Process:
    """One started member of a job; its output goes to a file."""

    member: Member
    popen: Running
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout: float = 100.0) -> int:
        """The exit code (negative: a signal)."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.member.role} {self.member.rank} still runs:\n{self.output}"
            ) from None

    def wait_for(self, text: str, timeout: float = 100.0) -> None:
        """Until this text is in the output, with the rest of its line. Raises AssertionError when the process
        ends without it.
        """
        deadline = time.monotonic() + timeout
        while text not in self.output.rpartition("\n")[0] + "\n":
            ended = self.popen.poll() is not None
            if ended and text in self.output:
                return
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} not in the output of {self.log.name}:\n{self.output}")
            time.sleep(0.02)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """Returns when the kernel has stopped all of its threads. `go_on` is the contrary."""
        self.popen.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.popen.pid}/task")
        eventually(lambda: {_state(task) for task in tasks.iterdir()} <= {"T", ""})

    def go_on(self) -> None:
        self.popen.send_signal(signal.SIGCONT)


def _state(task: Path) -> str:
    """The letter of `ps`; empty when the thread has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Job:
    """Starts members of one cluster; whatever still runs at the end is killed."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder
        self._started = 0
        self.processes: list[Process] = []

    @property
    def servers(self) -> list[Process]:
        return [process for process in self.processes if process.member.role is Role.SERVER]

    @property
    def trainers(self) -> list[Process]:
        return [process for process in self.processes if process.member.role is Role.TRAINER]

    def start(self, command: Sequence[str], role: Role, rank: int, **changes: object) -> Process:
        """Run `python *command` as this member of the job."""
        endpoints = self.cluster.servers if role is Role.SERVER else self.cluster.trainers
        member = Member(
            cluster=self.cluster,
            role=role,
            rank=rank,
            endpoint=endpoints[rank],
            local_rank=rank,
            local_size=len(endpoints),
            pod="testpod",
            omp_threads=1,
        )
        member = replace(member, **changes)  # type: ignore[arg-type]
        log = self._folder / f"{role}.{rank}.{self._started}.log"
        self._started += 1
        environ = contract.without_contract(os.environ) | contract.write(member)
        environ |= {"PYTHONPATH": PATH, "PYTHONUNBUFFERED": "1"}
        process = Process(member, self._run(command, environ, log), log)
        self.processes.append(process)
        return process

    def _run(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Running:
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, *command],
                env=environ,
                cwd=self._folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_all(self, command: Sequence[str]) -> None:
        """Servers, then trainers, all with the same command."""
        for rank in range(len(self.cluster.servers)):
            self.start(command, Role.SERVER, rank)
        for rank in range(len(self.cluster.trainers)):
            self.start(command, Role.TRAINER, rank)

    def expect_success(self, timeout: float = 250.0) -> None:
        """Every process ends with exit code 0 within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for process in [*self.trainers, *self.servers]:
            code = process.wait(max(0.1, deadline - time.monotonic()))
            assert code == 0, f"{process.log.name} exited with {code}:\n{process.output}"


@contextmanager
def job(
    folder: Path, *, trainers: int, servers: int = 0, make: Callable[[Cluster, Path], Job] | None = None
) -> Iterator[Job]:
    """A parameter-server job, or a collective one without servers. `make`: another kind of Job."""
    with reserved_endpoints(trainers + servers + 1) as endpoints:
        cluster = Cluster(
            mode=Mode.PS if servers else Mode.COLLECTIVE,
            trainers=endpoints[:trainers],
            servers=endpoints[trainers : trainers + servers],
            master=endpoints[-1],
        )
        running = (make or Job)(cluster, folder)
        try:
            yield running
        finally:
            for process in running.processes:
                process.popen.kill()
                process.popen.wait()
