"""Hold the state of processes and pods.

A container is one process of the job, over all its attempts. A pod is the containers of one job on this node.
A container has a spec, a log, a process, and the error file in which the process describes its own failure.
The supervisor decides what follows from an exit. The states and the moves between them:

           +-----------------> FAILED <---------+
           |                      ^             |
        UNINIT --> READY --> RUNNING --> TERMINATING --> COMPLETED
                     ^          |              |
                     |          v              |
                     +---- RESTARTING <--------+
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from fleetrun.aliases import Clock, Texts
from fleetrun.envs import channels
from fleetrun.envs.channels import ErrorRecord
from fleetrun.envs.contract import Role
from fleetrun.errors import LaunchError
from fleetrun.files import open_plain, replace_file
from fleetrun.pod import logs
from fleetrun.pod.policy import Fault, error_at, may_be_machine, suspicion
from fleetrun.pod.process import Exit, Process
from fleetrun.pod.spec import ContainerSpec, PodSpec
from fleetrun.values import frozen_by_name


def read_error(path: Path | None) -> ErrorRecord | None:
    """Return the record in `path`, or None if it is missing or malformed.

    A bad error file must not break the report.
    """
    return channels.read_error(*_read(path))


def read_dismissed(path: Path | None) -> bool:
    """Return True if a server wrote that its trainers dismissed it. It may then end before them."""
    return channels.read_dismissed(_read(path)[0])


def read_finished(path: Path | None, pid: int, program: str) -> bool:
    """Return True if the script of this process ran to its end. `program` is the process name at its end."""
    return channels.read_finished(_read(path)[0], pid, program)


def _read(path: Path | None) -> tuple[bytes, float]:
    """Return the content of an error file, empty if there is none, and its modification time."""
    if path is not None:
        with suppress(OSError), os.fdopen(open_plain(path), "rb") as file:
            return file.read(channels.LARGEST_ERROR_FILE), os.fstat(file.fileno()).st_mtime
    return b"", 0.0


def _remove(*paths: Path | None) -> None:
    for path in filter(None, paths):
        with suppress(OSError):  # the script may have changed its log directory in any way
            path.unlink()


_PROBE_FILES = ("", ".last", channels.IMPORTS_SUFFIX, channels.FILES_SUFFIX)

_CRASHES = frozenset(
    {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP}
)
"""Signals by which a process ends itself."""


class Status(StrEnum):
    """The state of a container or pod. The words match Paddle's, as in `Run Pod: ..., status ready`."""

    UNINIT = "uninit"
    READY = "ready"
    RUNNING = "running"
    TERMINATING = "terminating"
    RESTARTING = "restarting"
    COMPLETED = "completed"
    FAILED = "failed"


_MOVES = {
    Status.UNINIT: (Status.READY, Status.FAILED),
    Status.READY: (Status.RUNNING, Status.TERMINATING, Status.FAILED),
    Status.RUNNING: (Status.TERMINATING, Status.RESTARTING, Status.COMPLETED, Status.FAILED),
    Status.TERMINATING: (Status.RESTARTING, Status.COMPLETED, Status.FAILED),
    Status.RESTARTING: (Status.READY, Status.RUNNING, Status.TERMINATING, Status.FAILED),
    Status.COMPLETED: (Status.RESTARTING,),
    Status.FAILED: (Status.RESTARTING,),
}


def move(now: Status, then: Status) -> Status:
    """Return `then` if a container or pod may move to it from `now`.

    Raises RuntimeError otherwise, which always shows a bug.
    """
    if then not in _MOVES[now]:
        raise RuntimeError(f"illegal move from {now} to {then}")
    return then


@frozen_by_name
class Ended:
    """The end of one attempt of a process. Times are in seconds since the epoch.

    `asked` is the signal that fleetrun sent before, if any. Such an end is only a consequence.
    `out_of_memory` is True if the kernel's OOM killer ended the process. `dismissed` is True for a server
    that its trainers dismissed. `finished` is True if the interpreter crashed while exiting, after the script
    ran to its end. `peak_memory` is in bytes, the larger of the process and its largest child.
    """

    spec: ContainerSpec
    exit: Exit
    pid: int
    started: float
    ended: float
    attempt: int
    asked: int | None = None
    record: ErrorRecord | None = None
    out_of_memory: bool = False
    dismissed: bool = False
    finished: bool = False
    peak_memory: int | None = None

    @property
    def ok(self) -> bool:
        """True if the work of the process is done."""
        return self.exit.ok or self.finished

    @property
    def killed(self) -> bool:
        """True if the process got a SIGKILL that did not come from fleetrun or, apparently, from the
        OOM killer.
        """
        return self.exit.signal == signal.SIGKILL and self.asked is None and not self.out_of_memory

    @property
    def stopped(self) -> bool:
        """True if the process ended by a signal of fleetrun, SIGTERM or the SIGKILL after it."""
        return self.asked is not None and self.exit.signal in (self.asked, signal.SIGKILL)

    @property
    def hopeless(self) -> bool:
        """True if the process reported that a restart will not help."""
        return self.record is not None and not self.record.restart_helps

    @property
    def message(self) -> str:
        """The exception's message, or an empty string."""
        return self.record.message if self.record is not None else ""

    @property
    def failed_at(self) -> float:
        """The time of the failure, as the process reported it, else the time of its end."""
        return self.record.time if self.record is not None else self.ended

    @property
    def may_be_machine(self) -> bool:
        """True if the node may be to blame, because the end was unexpected and within all limits."""
        return not (self.ok or self.stopped or self.out_of_memory) and may_be_machine(self.exit, self.message)

    @property
    def suspicion(self) -> str:
        """`MachineFault.suspicion` for an end with `may_be_machine`."""
        return suspicion(self.exit, self.message)

    def fault(self, step: int | None, *, counts_on: bool = False) -> Fault:
        """Return the fault for the restart policy. `step` is the last completed step of this attempt."""
        error = error_at(step, self.exit, self.message, self.record.traceback if self.record else "")
        return Fault(
            exit=self.exit,
            time=self.ended,
            kind=self.message.partition(":")[0],
            error="out of memory" if self.out_of_memory else error,
            step=step,
            hopeless=self.hopeless,
            counts_on=counts_on,
        )


TakeWarm = Callable[[ContainerSpec, Texts], Process | None]
"""Returns a forked process that continues as this spec with this environment, or None for a cold start."""


class Container:
    """The handle of one process of the job."""

    def __init__(
        self,
        spec: ContainerSpec,
        restarts: int = 0,
        wall: Clock = time.time,
        warm: TakeWarm = lambda spec, env: None,
    ) -> None:
        self.spec = spec
        self._warm = warm
        self.status = Status.UNINIT
        self.process: Process | None = None
        self.restarts = restarts
        self.ended: Ended | None = None
        self._left_behind = False
        self._asked: int | None = None
        self._wall = wall
        self._began = 0.0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.exit is None and not self._left_behind

    def prepare(self) -> None:
        """Create the log file, so that an unwritable log is reported before any process starts."""
        os.close(logs.open_log(self.spec.log))
        if self.spec.long_file is not None:
            try:
                replace_file(self.spec.long_file, json.dumps(dict(self.spec.long_values)))
            except OSError as error:
                raise LaunchError(f"cannot write {self.spec.long_file}: {error.strerror}") from None
        self._to(Status.READY)

    def start(self) -> Process:
        """Start the process. Raises the errors of `Process.spawn`, and the container is then FAILED."""
        probe = self.spec.env.get(channels.PROBE_VARIABLE)
        probes = [Path(probe + end) for end in _PROBE_FILES] if probe else []
        _remove(self.spec.error_file, self.spec.notice_file, *probes)
        output = logs.open_log(self.spec.log)
        try:
            if self.restarts:
                logs.mark(self.spec.log, f"restart {self.restarts} of {self.spec.title}")
            self._began = time.monotonic()
            self._asked = None
            env = self.spec.environment(self.restarts)
            self.process = self._warm(self.spec, env) or Process.spawn(self.spec.argv, env, output)
        except LaunchError:
            self._to(Status.FAILED)
            raise
        finally:
            os.close(output)
        self._to(Status.RUNNING)
        return self.process

    def notify(self, why: str, deadline: float) -> None:
        """Write the notice file before the process is stopped.

        The notice holds the reason and the deadline, in seconds since the epoch.
        """
        path = self.spec.notice_file
        if path is None or not self.alive:
            return
        with suppress(OSError):  # a full disk, or a log directory that the script removed
            replace_file(path, channels.write_notice(why, deadline))

    def ask(self, number: int) -> None:
        """Send a signal that is meant to end the process, to its whole group."""
        if self.process is not None and self.alive:
            if self._asked is None and not self.process.ended:
                self._asked = number
                self._to(Status.TERMINATING)
            self.process.signal_group(number)

    def leave_behind(self) -> None:
        """Continue as if the process had ended, although SIGKILL did not end it."""
        self._left_behind = True
        self._to(Status.FAILED)

    def hold(self, held: bool) -> None:
        """Suspend the process group, or let it continue."""
        if self.process is not None and self.alive:
            self.process.signal_group(signal.SIGSTOP if held else signal.SIGCONT)

    def collect(self, out_of_memory: Callable[[int], bool]) -> Ended:
        """Reap the process after its pidfd became readable, and return its end.

        The remaining group of a failed leader is ended too. After a stop signal, the remaining children have
        received the signal as well and keep their grace period.
        """
        process = self.process
        assert process is not None, "collect before start"
        now = self._wall()  # before anything slow, because failures of several nodes are ordered by this time
        program = process.program()
        exit = process.reap(with_group=self._asked is None)
        record = read_error(self.spec.error_file) if not exit.ok else None
        self.ended = Ended(
            spec=self.spec,
            exit=exit,
            pid=process.pid,
            started=now - (time.monotonic() - self._began),  # the system clock may have changed meanwhile
            ended=now,
            attempt=self.restarts,
            asked=self._asked,
            record=record,
            dismissed=exit.ok and self.spec.role is Role.SERVER and read_dismissed(self.spec.error_file),
            finished=exit.signal in _CRASHES and read_finished(self.spec.error_file, process.pid, program),
            out_of_memory=exit.code == -9 and self._asked is None and out_of_memory(process.pid),
            peak_memory=process.peak_memory,
        )
        _remove(self.spec.notice_file, self.spec.error_file if self.ended.ok else None)
        self._to(Status.COMPLETED if self.ended.ok else Status.FAILED)
        return self.ended

    def record(self) -> ErrorRecord | None:
        """Return the failure that the process reported in this attempt."""
        return read_error(self.spec.error_file)

    def renew(self) -> None:
        """Prepare another attempt, if there has been one."""
        if self.process is not None:
            self.restarts += 1
            self._to(Status.RESTARTING)
            self.process = None

    def _to(self, status: Status) -> None:
        self.status = move(self.status, status)


# ---- A pod


class Pod:
    def __init__(self, spec: PodSpec, attempt: int = 0, warm: TakeWarm = lambda spec, env: None) -> None:
        """Make a pod. `attempt` counts earlier pods of this job on this node with the same log files."""
        self.spec = spec
        self.status = Status.UNINIT
        self.containers = [Container(each, attempt, warm=warm) for each in spec.containers]
        self.hook = Container(spec.pre_hook, attempt) if spec.pre_hook is not None else None

    def prepare(self) -> None:
        """Create the log files. Raises LaunchError before any process starts."""
        for container in self._all:
            container.prepare()
        self._to(Status.READY)

    def running(self) -> None:
        if self.status is not Status.RUNNING:
            self._to(Status.RUNNING)

    def _to(self, status: Status) -> None:
        self.status = move(self.status, status)

    @property
    def alive(self) -> list[Container]:
        return [each for each in self._all if each.alive]

    @property
    def stop_order(self) -> list[list[Container]]:
        """Groups of containers to stop, one group after the other.

        Servers come last, so that each trainer keeps its server until its own end.
        """
        workers = [each for each in self._all if each.spec.role is not Role.SERVER]
        return [workers, [each for each in self._all if each.spec.role is Role.SERVER]]

    @property
    def trainers_completed(self) -> bool:
        """True if the job is done. Servers, heter trainers and coordinators only serve the trainers."""
        return all(
            each.status is Status.COMPLETED for each in self.containers if each.spec.role is Role.TRAINER
        )

    def pids(self) -> set[int]:
        return {each.process.pid for each in self.alive if each.process is not None}

    @property
    def _all(self) -> list[Container]:
        return [*self.containers, *([self.hook] if self.hook else [])]
