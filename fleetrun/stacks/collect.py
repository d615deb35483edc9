"""Collect the Python stacks of all processes of a job on this node, within a time limit.

The functions block, so only commands and helper processes may call them, never a launcher's loop.

py-spy reads stacks from outside. If py-spy is not installed or lacks permission, a signal requests the stacks
from the process. fleetrun's runtime lets `faulthandler` write them to stderr, which is the log. A process
that would die of the signal never receives it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fleetrun.aliases import Environ, Strings
from fleetrun.envs.channels import STACKS_SIGNAL
from fleetrun.files import open_plain
from fleetrun.frozen import frozen, frozen_by_name
from fleetrun.host.interpreter import helper_environment
from fleetrun.stacks import processes
from fleetrun.stacks.frames import Taken, Target, Threads, of_faulthandler, of_pyspy
from fleetrun.stacks.processes import belongs, blocking, catches, state_of, waits_for

# ---- Stacks by signal: `faulthandler` writes them on stderr. A process that would die of the signal never
# receives it

_PATIENCE = 5.0  # seconds for the stacks to appear in the log
_SETTLED = 0.2  # seconds without a new line, after which the stacks are complete
_LOG_PAUSE = 0.02
_MOST = 1 << 20  # bytes of a log that are searched for stacks


def can_ask(target: Target, pid: int) -> bool:
    """Return True if process `pid` belongs to the target and has a handler for the signal."""
    return (
        state_of(pid) not in ("", "Z", "T", "t") and belongs(pid, target.mark) and catches(pid, STACKS_SIGNAL)
    )


def ask_process(target: Target, pid: int) -> Threads:
    """Ask a process for its stacks, and read them from its log.

    The result is empty if it does not write them in time. Blocks.
    """
    log = Path(target.log)
    begin, blocked = _size(log), blocking(pid, STACKS_SIGNAL)
    if begin is None or not _send(target, pid):
        return ()
    deadline = time.monotonic() + _PATIENCE
    size, since = begin, time.monotonic()
    while time.monotonic() < deadline:
        now = _size(log) or begin
        if now != size:
            size, since = now, time.monotonic()
        elif (
            size > begin
            and time.monotonic() - since >= _SETTLED
            and _done(pid, blocked)
            and _threads(log, begin)
        ):
            break
        time.sleep(_LOG_PAUSE)
    return _threads(log, begin)


def _done(pid: int, blocked: set[int]) -> bool:
    """Return True if the process has written all stacks. A pause for a slow disk may look like the end.

    The kernel blocks a signal in the thread that handles it. Threads in `blocked` blocked it before.
    """
    return not waits_for(pid, STACKS_SIGNAL) and blocking(pid, STACKS_SIGNAL) <= blocked


def _send(target: Target, pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if can_ask(target, pid):  # checked again, because the pid can no longer change owners
            signal.pidfd_send_signal(pidfd, STACKS_SIGNAL)
            return True
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return False


def _size(log: Path) -> int | None:
    """Return the size of a regular file. None for other files, because a FIFO must not be read."""
    with suppress(OSError):
        return log.lstat().st_size if log.is_file() and not log.is_symlink() else None
    return None


def _threads(log: Path, begin: int) -> Threads:
    try:
        with os.fdopen(open_plain(log), "rb") as file:
            file.seek(begin)
            return of_faulthandler(file.read(_MOST).decode("utf-8", "replace"))
    except OSError:
        return ()


# ---- Stacks by py-spy

PYSPY_MISSING = "py-spy is not installed: pip install 'fleetrun[monitor]'"
_WHY = {
    "ermission": "this user may not look into it (kernel.yama.ptrace_scope, or another user's process)",
    "not permitted": "this user may not look into it (kernel.yama.ptrace_scope, or another user's process)",
    "find python version": "it is not Python, or a version that py-spy does not know",
    "No such": "it has ended",
}
_LONGEST = 200  # characters
_UNINTERRUPTIBLE = 2.0  # seconds for a killed py-spy to end


def find_pyspy() -> str | None:
    """Find py-spy, first next to this Python and then on the PATH."""
    return shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")


class SpyError(Exception):
    """The reason why py-spy has no stacks of a process."""


def dump_pyspy(program: str, pid: int, env: Environ, within: float) -> Threads:
    """Read the threads of a Python process. Raises SpyError, after about `within` seconds at the latest.

    py-spy stops a process while it reads. It would wait forever for a process that is already stopped, or
    uninterruptible in the kernel. Such a process does not move, so it is read without a stop.
    """
    with _left_running(pid) as quietly:
        try:
            return of_pyspy(_run([program, "dump", "--json", "--pid", str(pid), *quietly], env, within))
        except ValueError as error:
            raise SpyError(f"py-spy's answer cannot be read: {error}") from None


def record_pyspy(program: str, pid: int, env: Environ, seconds: int, format: str, to: Path) -> None:
    """Record where the threads of a process and of its children spend their time, for `seconds` seconds.

    py-spy samples 100 times a second, including waiting threads. `format`: flamegraph or speedscope. Raises
    SpyError.
    """
    how = [
        "--format",
        format,
        "--duration",
        f"{seconds}",
        "--idle",
        "--threads",
        "--subprocesses",
    ]
    with _left_running(pid) as quietly:
        argv = [program, "record", *how, "--output", str(to), "--pid", str(pid), *quietly]
        _run(argv, env, seconds + _TO_WRITE)


_TO_WRITE = 60.0


@contextlib.contextmanager
def _left_running(pid: int) -> Iterator[Strings]:
    """Yield py-spy's options for a process. py-spy must not stop a process that is already stopped or
    uninterruptible.

    Afterwards, continue a process that a killed py-spy left stopped.
    """
    before = state_of(pid)
    try:
        yield ("--nonblocking",) if before in ("T", "t", "D") else ()
    finally:
        # It is stopped, or will be once it returns from the kernel.
        if before != "T" and (waits_for(pid, signal.SIGSTOP) or state_of(pid) == "T"):
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)


def _run(argv: list[str], env: Environ, within: float) -> str:
    try:
        popen = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise SpyError(f"py-spy cannot be started: {error.strerror}") from None
    try:
        out, err = popen.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        _kill(popen)
        raise SpyError(f"py-spy did not answer within {within:g} s") from None
    if popen.returncode != 0:
        raise SpyError(_why(err.decode(errors="replace")))
    return out.decode(errors="replace")


def _kill(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    for stream in (popen.stdout, popen.stderr):
        if stream is not None:
            stream.close()
    with suppress(subprocess.TimeoutExpired):  # py-spy itself may be in uninterruptible sleep
        popen.wait(_UNINTERRUPTIBLE)


def _why(output: str) -> str:
    found = next((why for sign, why in _WHY.items() if sign in output), None)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return found or f"py-spy: {lines[0] if lines else 'no word'}"[:_LONGEST]


# ---- Stacks of all processes of a job on this node, within a time limit. The functions block, so a
# launcher's loop never calls them

_AT_ONCE = 8
_EACH = 5.0  # seconds for one process
_LONGEST_NAME = 40
_OLD = 5.0  # seconds after which a process counts as started
_PAUSE = 0.25


@frozen
class Collection:
    """The stacks of a job. `hint` suggests how to get missing stacks. Empty if the stacks are complete."""

    processes: tuple[Taken, ...]
    hint: str = ""

    @property
    def whole(self) -> bool:
        """True if the position of each Python process is known."""
        return not self.hint


@frozen_by_name
class Means:
    """The means to take stacks."""

    program: str | None
    """Path of py-spy. None: not installed."""
    env: Environ
    """Environment of py-spy."""
    deadline: float
    asks: bool = True
    """Processes that py-spy cannot read may be asked by signal."""
    age: Callable[[int], float | None] = processes.age_of

    @property
    def left(self) -> float:
        """The remaining seconds."""
        return self.deadline - time.monotonic()


def collect(
    targets: Sequence[Target], within: float, program: str | None, *, asks: bool = True
) -> Collection:
    """Take the stacks of all targets in order, each with the Python processes below it. Takes little more
    than `within` seconds, whatever the processes do.

    `program` is py-spy (`find_pyspy`), None if it is not installed. `asks`: a process that cannot be read may
    be asked to write its stacks into its log.
    """
    deadline = time.monotonic() + within
    means = Means(program=program, env=helper_environment(), deadline=deadline, asks=asks)
    jobs = [(target, pid) for target in targets for pid in _pids(target)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        taken = tuple(pool.map(lambda job: take(job[0], job[1], means), jobs))
    unknown = any(not each.threads and each.note != _NO_PYTHON for each in taken)
    hint = (
        "" if not unknown else PYSPY_MISSING if means.program is None else "not every process could be read"
    )
    return Collection(taken, hint)


_NO_PYTHON = "it is not Python"


def _pids(target: Target) -> list[int]:
    below = processes.python_below(target.pid)
    return [target.pid, *below[: processes.MOST_BELOW]]


def take(target: Target, pid: int, means: Means) -> Taken:
    """Take the stacks of one process."""
    state = processes.state_of(pid)
    known = {"target": target, "pid": pid, "state": state}
    command = processes.command_of(pid)[:_LONGEST_NAME]
    threads: Threads = ()
    if not state or state in "ZX":
        note = "it has ended"
    elif not processes.is_python(pid):
        note = _NO_PYTHON
    elif means.left <= 0:
        note = "the time ran out"
    else:
        threads, note = _look(target, pid, means)
    return Taken(**known, command=command, threads=threads, note="" if threads else note)  # type: ignore[arg-type]


def _look(target: Target, pid: int, means: Means) -> tuple[Threads, str]:
    """Return its threads, or the reason why they are unknown. A new process gets some time to start."""
    threads, note = _once(target, pid, means)
    while not threads and means.left > _PAUSE and (age := means.age(pid)) is not None and age < _OLD:
        time.sleep(_PAUSE)
        threads, note = _once(target, pid, means)
    return threads, note


def _once(target: Target, pid: int, means: Means) -> tuple[Threads, str]:
    note = "py-spy is not installed"
    if means.program is not None:
        try:
            threads = dump_pyspy(means.program, pid, means.env, max(0.1, min(_EACH, means.left)))
            return _own(threads), "no Python runs in it"
        except SpyError as error:
            note = str(error)
    if not (means.asks and can_ask(target, pid)):
        return (), f"{note}; and it does not write its own stacks, which needs --probe on"
    return _own(ask_process(target, pid)), f"{note}; it writes its stacks to its stderr"


def _own(threads: Threads) -> Threads:
    """Drop the thread in which the probe answers."""
    return tuple(each for each in threads if not any(PROBE in frame.file for frame in each.frames[-1:]))


PROBE = "fleetrun/probe/inside/"
