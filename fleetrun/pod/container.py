"""A container is one process of the job, over all its attempts; a pod is the containers of one job on this
node.

A container knows its spec, its log, its process, and the error file in which the process writes about its own
failure. Both keep their state; what follows from an exit the supervisor decides. The states, and the moves
between them:

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
    """The record in `path`, or None when there is none or it is malformed: a report must never fail because
    of it.
    """
    if path is None:
        return None
    try:
        return channels.read_error(*_read(path))
    except OSError:
        return None


def read_dismissed(path: Path | None) -> bool:
    """Whether a server wrote that its trainers let it go: then it may end before they do."""
    try:
        return path is not None and channels.read_dismissed(_read(path)[0])
    except OSError:
        return False


def read_finished(path: Path | None, pid: int, program: str) -> bool:
    """Whether the script of this process had run to its end. `program`: its name at its own end."""
    try:
        return path is not None and channels.read_finished(_read(path)[0], pid, program)
    except OSError:
        return False


def _read(path: Path) -> tuple[bytes, float]:
    """What is in it, and when it was written."""
    with os.fdopen(open_plain(path), "rb") as file:
        return file.read(channels.LARGEST_ERROR_FILE), os.fstat(file.fileno()).st_mtime


_CRASHES = frozenset(
    {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP}
)
"""By which a process ends itself."""


class Status(StrEnum):
    """The words are Paddle's; they appear in `Run Pod: ..., status ready`."""

    UNINIT = "uninit"
    READY = "ready"
    RUNNING = "running"
    TERMINATING = "terminating"
    RESTARTING = "restarting"
    COMPLETED = "completed"
    FAILED = "failed"


_MOVES: dict[Status, frozenset[Status]] = {
    Status.UNINIT: frozenset({Status.READY, Status.FAILED}),
    Status.READY: frozenset({Status.RUNNING, Status.TERMINATING, Status.FAILED}),
    Status.RUNNING: frozenset({Status.TERMINATING, Status.RESTARTING, Status.COMPLETED, Status.FAILED}),
    Status.TERMINATING: frozenset({Status.RESTARTING, Status.COMPLETED, Status.FAILED}),
    Status.RESTARTING: frozenset({Status.READY, Status.RUNNING, Status.TERMINATING, Status.FAILED}),
    Status.COMPLETED: frozenset({Status.RESTARTING}),
    Status.FAILED: frozenset({Status.RESTARTING}),
}


def move(now: Status, then: Status) -> Status:
    """`then`, if a container or pod may go there from `now`. Raises RuntimeError (a bug, never bad input)
    otherwise.
    """
    if then not in _MOVES[now]:
        raise RuntimeError(f"illegal move from {now} to {then}")
    return then


@frozen_by_name
class Ended:
    """How one attempt of a container ended. Times are seconds since the epoch.

    `asked` is the signal that fleetrun itself had sent before, if any: such an end is a consequence.
    `out_of_memory` tells that the kernel's OOM killer did it, `dismissed` that a server ended because its
    trainers had let it go, `finished` that it crashed in the exit of its interpreter, after its script had
    run to its end. `peak_memory` is in bytes, that of the process or of the largest of its children.
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
        """Whether its work is done."""
        return self.exit.ok or self.finished

    @property
    def killed(self) -> bool:
        """Whether it got a SIGKILL that neither fleetrun nor, as far as is known, the OOM killer sent."""
        return self.exit.signal == signal.SIGKILL and self.asked is None and not self.out_of_memory

    @property
    def stopped(self) -> bool:
        """Whether it ended by a signal that fleetrun sent, SIGTERM or the SIGKILL after it."""
        return self.asked is not None and self.exit.signal in (self.asked, signal.SIGKILL)

    @property
    def hopeless(self) -> bool:
        """Whether the process said that a restart will not help."""
        return self.record is not None and not self.record.restart_helps

    @property
    def message(self) -> str:
        """The exception's, empty if none is known."""
        return self.record.message if self.record is not None else ""

    @property
    def failed_at(self) -> float:
        """When it went wrong: what the process wrote of itself, else when it ended."""
        return self.record.time if self.record is not None else self.ended

    @property
    def may_be_machine(self) -> bool:
        """Whether the machine may be to blame: nobody asked for this end, and no limit was reached."""
        return not (self.ok or self.stopped or self.out_of_memory) and may_be_machine(self.exit, self.message)

    @property
    def suspicion(self) -> str:
        """Of a `may_be_machine`: `MachineFault.suspicion`."""
        return suspicion(self.exit, self.message)

    def fault(self, step: int | None, *, counts_on: bool = False) -> Fault:
        """For the restart policy. `step`: the last one that was made in this attempt."""
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
"""A process that has begun as what this spec describes, with this environment: a standby, if there is one."""


class Container:
    """The handle of a running spec."""

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
        """Make the log file, so that one that cannot be written is known before anything starts."""
        os.close(logs.open_log(self.spec.log))
        if self.spec.long_file is not None:
            try:
                replace_file(self.spec.long_file, json.dumps(dict(self.spec.long_values)))
            except OSError as error:
                raise LaunchError(f"cannot write {self.spec.long_file}: {error.strerror}") from None
        self._to(Status.READY)

    def start(self) -> Process:
        """Raises what `Process.spawn` raises; the container is FAILED then."""
        probe = self.spec.env.get(channels.PROBE_VARIABLE)
        probes = [Path(probe + end) for end in ("", ".last", channels.IMPORTS_SUFFIX)] if probe else []
        for path in (self.spec.error_file, self.spec.notice_file, *probes):
            if path is not None:
                with suppress(OSError):  # the script may have done anything to its log directory
                    path.unlink(missing_ok=True)
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
        """Before it is asked to end: let the process know why, and until when it may go on (seconds since the
        epoch).
        """
        path = self.spec.notice_file
        if path is None or not self.alive:
            return
        with suppress(OSError):  # a full disk, or a log directory that the script took away
            replace_file(path, channels.write_notice(why, deadline))

    def ask(self, number: int) -> None:
        """A signal from fleetrun that is meant to end it; to the whole group."""
        if self.process is not None and self.alive:
            if self._asked is None and not self.process.ended:
                self._asked = number
                self._to(Status.TERMINATING)
            self.process.signal_group(number)

    def leave_behind(self) -> None:
        """SIGKILL does not end it: go on as if it had."""
        self._left_behind = True
        self._to(Status.FAILED)

    def hold(self, held: bool) -> None:
        """Suspend its group, or let it go on."""
        if self.process is not None and self.alive:
            self.process.signal_group(signal.SIGSTOP if held else signal.SIGCONT)

    def collect(self, out_of_memory: Callable[[int], bool]) -> Ended:
        """After the pidfd became readable: reap, and remember how it ended.

        What a failed leader leaves in its group is ended with it, unless it was asked to go: then its
        children have been asked too and have their grace.
        """
        process = self.process
        assert process is not None, "collect before start"
        now = self._wall()  # before anything slow: failures of several machines are ordered by it
        program = process.program()
        exit = process.reap(with_group=self._asked is None)
        record = read_error(self.spec.error_file) if not exit.ok else None
        self.ended = Ended(
            spec=self.spec,
            exit=exit,
            pid=process.pid,
            started=now - (time.monotonic() - self._began),  # the clock may have been set meanwhile
            ended=now,
            attempt=self.restarts,
            asked=self._asked,
            record=record,
            dismissed=exit.ok and self.spec.role is Role.SERVER and read_dismissed(self.spec.error_file),
            finished=exit.signal in _CRASHES and read_finished(self.spec.error_file, process.pid, program),
            out_of_memory=exit.code == -9 and self._asked is None and out_of_memory(process.pid),
            peak_memory=process.peak_memory,
        )
        if self.spec.notice_file is not None:
            with suppress(OSError):
                self.spec.notice_file.unlink(missing_ok=True)
        if self.ended.ok and self.spec.error_file is not None:
            with suppress(OSError):
                self.spec.error_file.unlink(missing_ok=True)
        self._to(Status.COMPLETED if self.ended.ok else Status.FAILED)
        return self.ended

    def record(self) -> ErrorRecord | None:
        """What the process has reported about its own failure in this attempt."""
        return read_error(self.spec.error_file)

    def renew(self) -> None:
        """Make ready for another attempt, if there has been one."""
        if self.process is not None:
            self.restarts += 1
            self._to(Status.RESTARTING)
            self.process = None

    def _to(self, status: Status) -> None:
        self.status = move(self.status, status)


# ---- A pod


class Pod:
    def __init__(self, spec: PodSpec, attempt: int = 0, warm: TakeWarm = lambda spec, env: None) -> None:
        """`attempt` counts the pods of this job that ran on this node before, with the same log files."""
        self.spec = spec
        self.status = Status.UNINIT
        self.containers = [Container(each, attempt, warm=warm) for each in spec.containers]
        self.hook = Container(spec.pre_hook, attempt) if spec.pre_hook is not None else None

    def prepare(self) -> None:
        """Make the log files. Raises LaunchError when that cannot be; nothing runs then."""
        for container in [*self.containers, *([self.hook] if self.hook else [])]:
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
        """Containers to stop together, one group after the other: servers last, so that no trainer loses its
        server first.
        """
        workers = [each for each in self._all if each.spec.role is not Role.SERVER]
        return [workers, [each for each in self._all if each.spec.role is Role.SERVER]]

    @property
    def trainers_completed(self) -> bool:
        """Whether the job is done. Servers, heter trainers and coordinators serve the trainers; they do not
        decide.
        """
        return all(
            each.status is Status.COMPLETED for each in self.containers if each.spec.role is Role.TRAINER
        )

    def pids(self) -> set[int]:
        return {each.process.pid for each in self.alive if each.process is not None}

    @property
    def _all(self) -> list[Container]:
        return [*self.containers, *([self.hook] if self.hook else [])]
