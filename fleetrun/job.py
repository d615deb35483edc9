"""Represent a job that this process launched. The launcher runs as a child process and prints events. The end
of the job becomes a value or an exception.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, Self, TypeVar

from fleetrun import files
from fleetrun.aliases import Document, Texts
from fleetrun.console.text import read_tail
from fleetrun.control.client import NoAnswer, NoLauncher, ask
from fleetrun.errors import (
    LaunchError,
    RendezvousError,
    ScriptNotExecutableError,
    ScriptNotFoundError,
    UsageError,
)
from fleetrun.function import Call
from fleetrun.pod.guard import CALLER_VARIABLE
from fleetrun.record.history import parsed
from fleetrun.record.journal import Event

T = TypeVar("T")


# ---- How a job ended


@dataclass(frozen=True, kw_only=True)
class Result(Generic[T]):
    """The end of a job on this node."""

    values: list[T]
    """`values[i]` is the return value of the trainer with rank `ranks[i]`. Empty if the job ran a script."""
    ranks: list[int]
    """The ranks of the trainers on this node. On a single node, `values[rank]` is the value of a rank."""
    logs: dict[str, Path] = field(repr=False)
    """The log file of each process by its name, such as `trainer.0` or `ps.1`."""
    elapsed: float
    """Seconds from the call to the end."""
    restarts: int = 0
    exit_code: int = 0
    """0, unless `Job.stop` ended the job."""


class JobError(LaunchError):
    """A started job failed. The message is the report of the first failure.

    `exit_code` is the exit code of the `fleetrun` command. If a function raised an exception, that exception
    is `__cause__`, unless it cannot be unpickled.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.role: str | None = None
        self.rank: int | None = None
        """`role` and `rank` of the process that failed first; None if no process on this node failed."""
        self.traceback = ""
        """The traceback of that process, empty if it left none."""
        self.logs: dict[str, Path] = {}
        """The log file of each process by its name."""


# ---- A job


class Job(Generic[T]):
    """A job that this process launched. You may call every method from any thread."""

    def __init__(
        self,
        words: Sequence[str],
        env: Texts | None,
        *,
        call: Call | None = None,
        engine: str = "",
    ) -> None:
        self._call = call
        self._engine = engine
        self._elapsed = 0.0
        folder = str(call.folder) if call is not None else ""
        added = {name: str(value) for name, value in (env or {}).items()}
        self._environ = {**os.environ, **added, CALLER_VARIABLE: f"{os.getpid()} {folder}"}
        self._argv = [sys.executable, "-P", "-m", "fleetrun", *words]
        self._changed = threading.Condition()
        self._seen = _Seen()
        self._code: int | None = None
        self._asked: set[int] = set()
        self._popen: subprocess.Popen[bytes] | None = None
        self._error_text = self._engine_error = ""  # the error text that the launcher printed
        self._outcome_lock = threading.Lock()
        self._outcome: Result[T] | LaunchError | None = None
        if folder:
            weakref.finalize(self, _remove_folder, folder, os.getpid())
        threading.Thread(target=self._follow, name="fleetrun", daemon=True).start()
        # Wait until the launch is recorded, or has failed.
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._seen.launch or self._engine or not self.running)
        except KeyboardInterrupt:
            self.stop(now=True)
            raise
        if self._code and not self._seen.launch:
            self.wait()

    # ---- public methods

    @property
    def name(self) -> str:
        """The `job_id`, which commands such as `fleetrun status` accept."""
        return str(self._seen.launch.get("job", ""))

    @property
    def pod(self) -> str:
        """The run ID on this node, six letters. Commands accept it too."""
        return str(self._seen.launch.get("pod", ""))

    @property
    def pid(self) -> int:
        """The process ID of the launcher. Signals to it have the same effect as signals to the `fleetrun`
        command.
        """
        return self._popen.pid if self._popen is not None else 0

    @property
    def logs(self) -> dict[str, Path]:
        """The log file of each process on this node by its name, such as `trainer.0`."""
        return self._seen.logs()

    @property
    def running(self) -> bool:
        """True until the job has ended."""
        return self._code is None

    def wait(self, timeout: float | None = None) -> Result[T]:
        """Wait for the end of the job, at most `timeout` seconds. The job continues after a timeout or
        KeyboardInterrupt.

        Raises TimeoutError after the timeout, JobError if the job failed, another LaunchError if fleetrun
        could not continue, and UsageError for a negative `timeout`.

        After `stop`, the result has an `exit_code`, and values only from the trainers that returned.
        """
        __tracebackhide__ = True
        if timeout is not None and not timeout >= 0:
            raise UsageError(f"timeout is {timeout!r}; it must be at least 0 seconds, or None")
        with self._changed:
            if not self._changed.wait_for(lambda: self._code is not None, timeout):
                raise TimeoutError(f"job {self.name} (pod {self.pod}) has not ended within {timeout:g} s")
        with self._outcome_lock:
            if self._outcome is None:
                try:
                    self._outcome = self._result()
                except LaunchError as error:
                    if error.hint:
                        error.add_note(error.hint)
                    self._outcome = error
                if self._call is not None:
                    shutil.rmtree(self._call.folder, ignore_errors=True)
        if isinstance(self._outcome, LaunchError):
            raise self._outcome.with_traceback(None)
        return self._outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the end, and raise the errors of `wait`. After an exception, stop the job first."""
        if error is None:
            self.wait()
            return
        self.stop()
        with self._changed:
            self._changed.wait_for(lambda: not self.running)

    def stop(self, *, now: bool = False) -> None:
        """Request the end of the job, and return. The processes get SIGTERM, and SIGKILL after
        `stop_timeout`.

        With `now`, they are killed immediately. Does nothing if the job has ended.
        """
        self.send_signal(signal.SIGTERM)
        if now:
            self.send_signal(signal.SIGQUIT)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher, which acts like the `fleetrun` command.

        SIGINT acts like Ctrl-C. The launcher passes SIGUSR1 and SIGUSR2 to the processes. Does nothing if the
        job has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._popen is not None or not self.running)
        if self._popen is not None and self.running:
            self._asked.add(128 + number)
            self._popen.send_signal(number)

    def debug(self, rank: int = 0) -> str:
        """Open pdb in this trainer of this node when it reaches a breakpoint, as `fleetrun debug` does.

        Return how that ended. Raises LaunchError if the job ends before.
        """
        from fleetrun.control.debugger import at_terminal, debug

        def wait() -> None:
            if not self.running:
                raise LaunchError(f"job {self.name} (pod {self.pod}) has ended")
            time.sleep(0.1)

        runtime = files.run_folder(self._environ)
        return debug(files.debug_socket(runtime, f"{self.pod}.trainer.{rank}"), wait, at_terminal)

    def status(self, timeout: float = 5.0) -> Document:
        """Return the state of the job and its processes, as `fleetrun status --json` shows it.

        The fields that the command measures itself (`cpu`, `memory`, `gpu`, `last_line`) are absent. Raises
        LaunchError if the job has ended, or does not answer within `timeout` seconds.
        """
        if self._engine:
            raise LaunchError(f"the status of a job that {self._engine} runs is available only on its nodes")
        deadline = time.monotonic() + timeout
        path = files.control_socket(files.run_folder(self._environ), self.pod)
        while True:
            try:
                return ask(path, {"ask": "status"}, deadline - time.monotonic())
            except NoAnswer as silence:
                with self._changed:
                    early = isinstance(silence, NoLauncher) and self.running and time.monotonic() < deadline
                    if early:  # the launcher is about to listen, or to end
                        self._changed.wait(0.05)
                if not early:
                    ended = "has ended" if not self.running else f"does not answer: {silence}"
                    raise LaunchError(f"job {self.name} (pod {self.pod}) {ended}") from None

    def events(self) -> Iterator[Event]:
        """Yield each event from the start until the job has ended, as `--display json` prints it.

        A reader that falls more than 10,000 events behind misses some: `{"event": "lost", "events": 17}`.
        """
        return Events(self)

    def __repr__(self) -> str:
        state = "running" if self.running else f"ended with {self._code}"
        return f"<Job {self.name} (pod {self.pod}), {state}>"

    # ---- the launcher

    def _follow(self) -> None:
        """Run and follow the launcher. This thread must live as long as the launcher, because the launcher
        ends with the thread that started it.
        """
        code, began = LaunchError.exit_code, time.monotonic()
        try:
            with tempfile.TemporaryFile() as errors:
                code = self._seen.code(self._run(errors))
                errors.seek(0)
                self._error_text = errors.read().decode(errors="replace") or self._engine_error
        except (OSError, ValueError) as error:  # the process limit is reached, or a word has a NUL character
            self._error_text = f"{_ERROR}the launcher cannot be started: {error}"
        finally:
            with self._changed:
                self._code, self._elapsed = code, round(time.monotonic() - began, 3)
                self._changed.notify_all()

    def _run(self, errors: IO[bytes]) -> int:
        """Run the launcher to its end. Return its exit code, or the negative number of its signal.

        Raises OSError and ValueError.
        """
        self._popen = subprocess.Popen(
            self._argv,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if self._engine else errors,
            start_new_session=True,  # Ctrl-C in a terminal reaches only the caller, which decides
        )
        with self._changed:
            self._changed.notify_all()
        assert self._popen.stdout is not None
        event_of = self._engine_line if self._engine else parsed
        with self._popen.stdout as stream:
            rest = b""
            while data := os.read(stream.fileno(), _AT_ONCE):
                *lines, rest = (rest + data).split(b"\n")
                self._take([event for line in lines if (event := event_of(line)) is not None])
        return self._popen.wait()

    def _engine_line(self, line: bytes) -> Event:
        """Return a line of an engine as an event. Launchers on other nodes print text, and the local launcher
        that started them does too.
        """
        text = line.decode(errors="backslashreplace")
        if text.startswith(_ERROR) or self._engine_error:
            self._engine_error += f"{text}\n"
        return {"time": round(time.time(), 3), "event": "log", "container": "", "line": text}

    def _take(self, events: Sequence[Event]) -> None:
        with self._changed:
            for each in events:
                self._seen.take(each)
            self._changed.notify_all()

    # ---- how it ended

    def _result(self) -> Result[T]:
        code, over = self._code or 0, self._seen.over
        stopped = code in self._asked and not over.get("report")
        if code and not stopped:
            self._raise_failure(code)
        ranks = sorted(self._seen.trainers())
        values: list[T] = []
        if self._call is not None:
            found = [rank for rank in ranks if self._call.has_value(rank)]
            if not stopped and found != ranks:
                missing = next(rank for rank in ranks if rank not in found)
                name = self._seen.trainers()[missing]
                raise self._failure(f"trainer {missing} ended before its function returned", name, missing, 1)
            ranks, values = found, [self._call.value(rank) for rank in found]
        return Result(
            values=values,
            ranks=ranks,
            logs=self.logs,
            elapsed=self._elapsed,
            restarts=int(over.get("restarts", 0)),
            exit_code=code,
        )

    def _raise_failure(self, code: int) -> NoReturn:
        _, error, text = self._error_text.rpartition(_ERROR)
        if error or not (self._seen.launch or self._engine):
            raise _launch_error(code, text)
        first, over = self._seen.first, self._seen.over
        report = "\n".join(line for line in over.get("report", []) if line.strip("="))
        ended = over.get("reason") or (f"{self._engine} ended" if self._engine else "the launcher was killed")
        reason = report or f"{ended}, exit code {code}"
        problem = self._failure(reason, first.get("container"), first.get("rank"), code)
        cause = None
        if self._call is not None and problem.role == "trainer" and problem.rank is not None:
            cause = self._call.error(problem.rank)
        raise problem from cause

    def _failure(self, message: str, container: str | None, rank: int | None, code: int) -> JobError:
        error = JobError(message)
        role = container.rpartition(".")[0] if container else None
        error.exit_code, error.role, error.rank, error.logs = code, role, rank, self.logs
        log = self.logs.get(container or "")
        error.traceback = "\n".join(read_tail(log).traceback) if log is not None else ""
        return error


def _remove_folder(folder: str, pid: int) -> None:
    """Remove the directory at the end of the caller. A fork of the caller leaves it in place."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


# ---- The events of a job

_MOST_EVENTS = 10_000
_AT_ONCE = 1 << 16  # most bytes of events that are read and handed over together


class Events(Iterator[Event]):
    """A position in the events of a job. An interrupt does not lose events."""

    def __init__(self, job: Job[Any]) -> None:
        self._job = job
        self._position = 0
        self._ready: deque[Event] = deque()

    @property
    def behind(self) -> bool:
        """True if the next event has already arrived."""
        return bool(self._ready)

    def __next__(self) -> Event:
        while (event := self.within(None)) is None:
            pass
        return event

    def within(self, seconds: float | None) -> Event | None:
        """Return the next event, or None if none arrives in time. Raises StopIteration at the end."""
        job, seen = self._job, self._job._seen
        if not self._ready:
            with job._changed:
                job._changed.wait_for(lambda: seen.end > self._position or not job.running, seconds)
                if seen.end == self._position:
                    if job.running:
                        return None
                    raise StopIteration
                self._ready.extend(seen.since(self._position))
                self._position = seen.end
        return self._ready.popleft()


@dataclass(slots=True)
class _Seen:
    """The received events. The newest are kept, and the ones that describe the state of the job."""

    launch: Event = field(default_factory=dict)
    ready: Event = field(default_factory=dict)
    failed: Event = field(default_factory=dict)
    over: Event = field(default_factory=dict)
    _kept: list[Event] = field(default_factory=list)
    _dropped: int = 0

    def take(self, event: Event) -> None:
        match event["event"]:
            case "launch":
                self.launch = self.ready = event
            case "ready":
                self.ready = event
            case "over":
                self.over = event
            case "failed" if not (self.failed or event.get("restart") or event.get("beside")):
                self.failed = event
        self._kept.append(event)
        if len(self._kept) > 2 * _MOST_EVENTS:
            self._dropped += _MOST_EVENTS
            del self._kept[:_MOST_EVENTS]

    def code(self, ended: int) -> int:
        """Return the launcher's exit code, given its exit code or minus its signal.

        A program that ignores SIGCHLD cannot read the code and gets 0. The code then comes from the events.
        """
        if ended < 0:
            return 128 - ended
        return ended or int(self.over.get("code", LaunchError.exit_code if self.launch else 0))

    @property
    def end(self) -> int:
        return self._dropped + len(self._kept)

    def since(self, position: int) -> list[Event]:
        """Return the events from `position` on. If some were dropped, a `lost` event with their number comes
        first.
        """
        lost = self._dropped - position
        if lost <= 0:
            return self._kept[-lost:]
        return [{"time": self._kept[0]["time"], "event": "lost", "events": lost}, *self._kept]

    @property
    def first(self) -> Event:
        """The event with the process and rank of the first failure. Empty if no process failed here."""
        # a killed launcher leaves no final event, so use the first `failed` event
        known = self.over or self.failed
        return known if known.get("container") else {}

    def logs(self) -> dict[str, Path]:
        return {each["name"]: Path(each["log"]) for each in self.ready.get("containers", [])}

    def trainers(self) -> dict[int, str]:
        """Return the names of the trainers on this node by rank."""
        containers = self.ready.get("containers", [])
        return {each["rank"]: each["name"] for each in containers if each["role"] == "trainer"}


# ---- Errors of the launcher

_ERROR = "fleetrun: error: "
"""The start of an error on the stderr of the command (`cli._report`)."""

_KINDS: Mapping[int, type[LaunchError]] = {
    kind.exit_code: kind
    for kind in (UsageError, ScriptNotFoundError, ScriptNotExecutableError, RendezvousError)
}


def _launch_error(code: int, text: str) -> LaunchError:
    """Convert the stderr of the command back to the exception that the launcher raised."""
    message, _, rest = text.strip().partition("\n")
    hint = "\n".join(line.removeprefix("  ") for line in rest.splitlines())
    error = _KINDS.get(code, LaunchError)(message or f"the launcher ended with {code}", hint=hint or None)
    error.exit_code = code
    return error
