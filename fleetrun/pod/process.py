"""Start, signal and reap processes of this host, and end whole process trees.

A process that has already ended always counts as success. A process started here leads its own session and
group, so `signal_group` reaches its children too. `end_descendants` finds processes that left the group as
descendants.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource  # noqa: F401  os.wait4 imports it, and there may be no descriptor left for that then
import select
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from fleetrun.aliases import Environ
from fleetrun.errors import LaunchError, ScriptNotExecutableError, ScriptNotFoundError, SpawnError
from fleetrun.proc import read_stat, readable
from fleetrun.values import frozen

_ROUNDS = 500  # of killing, a hundredth of a second each


@frozen
class Exit:
    """The end of a process. `code` is the exit code, or the negative signal number, as in subprocess."""

    code: int

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def signal(self) -> int | None:
        return -self.code if self.code < 0 else None

    @property
    def shell_code(self) -> int:
        """The exit code as a shell reports it, 128 + the number for a signal."""
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        if self.signal is None:
            return f"exited with code {self.code}"
        return f"was killed by {signal_name(self.signal)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Process:
    """A child of this process, with its group. Its pidfd becomes readable when it ends."""

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self._popen = popen
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.exit: Exit | None = None
        self.peak_memory: int | None = None
        """Peak bytes in memory, of the process or of a child that it waited for. None until it is reaped.

        The process started as a copy of this one, so the value is at least this process's memory at that
        time.
        """

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        env: Environ,
        output: int,
        stdin: int = subprocess.DEVNULL,
        keep: Sequence[int] = (),
    ) -> Process:
        """Start `argv` with stdout and stderr on the descriptor `output`.

        Without `stdin`, its standard input is empty. It inherits the descriptors `keep` under their numbers.
        Raises ScriptNotFoundError, ScriptNotExecutableError, or SpawnError if the kernel lacks a resource.
        """
        try:
            with _default_sigttou():
                popen = subprocess.Popen(
                    argv,
                    env=env,
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=keep,
                )
        except (FileNotFoundError, NotADirectoryError):
            if "/" in argv[0] and Path(argv[0]).exists():
                raise ScriptNotExecutableError(
                    f"cannot start {argv[0]}: its interpreter does not exist", hint="Correct its #! line."
                ) from None
            raise ScriptNotFoundError(f"cannot start {argv[0]}: the program does not exist") from None
        except PermissionError as error:
            raise ScriptNotExecutableError(f"cannot start {argv[0]}: {error.strerror}") from None
        except OSError as error:
            raise _spawn_error(argv[0], error) from None
        try:
            return cls(popen.pid, popen)
        except OSError as error:  # descriptors have run out before the pidfd, so undo the start
            popen.kill()
            popen.wait()
            raise _spawn_error(argv[0], error) from None

    @classmethod
    def adopt(cls, pid: int) -> Process:
        """Return an orphan that leads its own session. This process is its parent now. Raises OSError."""
        process = cls(pid)
        try:
            if read_stat(pid).parent == os.getpid():
                return process
        except ProcessLookupError:
            pass
        os.close(process._pidfd)
        raise ProcessLookupError(f"{pid} is not a child of this process")

    def _left_well(self) -> bool:
        try:
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # another caller reaped it, so the group id may belong to another process
            return True
        if info is None:
            return not read_stat(self.pid).exit
        return info.si_code == os.CLD_EXITED and info.si_status == 0

    def fileno(self) -> int:
        return self._pidfd

    @property
    def ended(self) -> bool:
        """True if the process has ended, reaped or not."""
        if self.exit is not None:
            return True
        return readable(self._pidfd)

    def program(self) -> str:
        """Return the kernel's name of the program, even after its end. It is empty after `reap`."""
        with suppress(ProcessLookupError):
            return read_stat(self.pid).name.strip() if self.exit is None else ""
        return ""

    def signal_group(self, number: int) -> None:
        """Signal the leader and all processes that stayed in its group.

        It works only before `reap`, because until then the kernel does not reuse the group id.
        """
        if self.exit is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def signal_leader(self, number: int) -> None:
        if self.exit is None:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, number)

    def handles(self, number: int) -> bool:
        """Return True if the leader handles or ignores this signal, and so survives it."""
        masks = self._status("SigIgn", "SigCgt")
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)

    def pauses(self) -> int:
        """Return how often the leader's main thread has started to wait so far."""
        return sum(map(int, self._status("voluntary_ctxt_switches")))

    def _status(self, *names: str) -> list[str]:
        """Return these fields of its main thread, or an empty list after its end."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(errors="replace")
        except OSError:
            return []
        fields = (line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        return [value for name, value in fields if name in names]

    def reap(self, *, with_group: bool = False) -> Exit:
        """Return the exit, once the pidfd is readable. The pid is free after this call.

        With `with_group`, the remaining group of a failed leader (data loaders, shells) is killed too. This
        happens before reaping, because afterwards the group id may belong to another process.
        """
        if self.exit is None:
            if with_group and not self._left_well():
                self.signal_group(signal.SIGKILL)
            self.exit = self._wait()
            os.close(self._pidfd)
        return self.exit

    def _wait(self) -> Exit:
        code = 1  # if another caller reaped the process, its code is lost, and it must not count as a success
        with suppress(ChildProcessError):
            pid, status, usage = os.wait4(self.pid, os.WNOHANG if self.ended else 0)
            if pid:
                self.peak_memory = usage.ru_maxrss * 1024  # Linux counts KiB
            else:  # a debugger holds it, and the kernel keeps its pid until the debugger detaches
                status = read_stat(self.pid).exit
            code = os.waitstatus_to_exitcode(status)
        if self._popen is not None:
            self._popen.returncode = code
        return Exit(code)


@contextlib.contextmanager
def _default_sigttou() -> Iterator[None]:
    """Restore the default of SIGTTOU, which this process ignores, so that children do not inherit this."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTTOU, before)


_HINTS = {
    "EAGAIN": "The limit on processes is reached. Raise `ulimit -u`, or the cgroup's pids.max.",
    "EMFILE": "The limit on open files is reached. Raise the limit with `ulimit -n`.",
    "ENFILE": "The system's limit on open files is reached.",
    "ENOMEM": "The system is out of memory.",
    "E2BIG": "The arguments and the environment together are larger than the kernel allows.",
    "ENOEXEC": "The file has no #! line and is not a binary for this machine.",
}


def _spawn_error(program: str, error: OSError) -> LaunchError:
    name = errno.errorcode.get(error.errno or 0, "")
    kind = ScriptNotExecutableError if name == "ENOEXEC" else SpawnError
    return kind(f"cannot start {program}: {error.strerror}", hint=_HINTS.get(name))


def children() -> list[int]:
    """Return the children of this process, including adopted ones. The process must be single-threaded."""
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return [pid for pid in _all_pids() if _parent_of(pid) == os.getpid()]


def _all_pids() -> Iterator[int]:
    with suppress(OSError):  # no descriptor is available
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                yield int(entry.name)


def _parent_of(pid: int) -> int:
    with suppress(ProcessLookupError):
        return read_stat(pid).parent
    return -1


def descendants(but: Collection[int] = ()) -> list[int]:
    """Return all processes below this one, nearest first, without the children `but` and their
    descendants.
    """
    return with_all_below([pid for pid in children() if pid not in but])


def with_all_below(wave: list[int]) -> list[int]:
    found: list[int] = []
    while wave:
        found += wave
        wave = [child for pid in wave for child in children_of(pid) if child not in found]
    return found


def children_of(pid: int) -> list[int]:
    """Return the children of any process of this user, or an empty list after its end."""
    with suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


def kill_marked(mark: str, but: Collection[int] = ()) -> None:
    """Send SIGKILL to descendants whose initial environment contains `NAME=value`, except below the children
    `but`.

    The mark separates a container's daemons from other processes, in whatever session they are. Their
    descendants are killed too, because a run inside a container gives its own containers other marks.
    """
    wanted = mark.encode()
    for pid in descendants(but):
        with suppress(OSError):
            # before reading the environment, so that the kill hits the same process
            pidfd = os.pidfd_open(pid)
            try:
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    below = with_all_below(children_of(pid))  # before it dies and they get another parent
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    signal_all(below, signal.SIGKILL)
            finally:
                os.close(pidfd)


def ask_strays(groups: Collection[int]) -> None:
    """Send SIGTERM to every descendant outside these process groups."""
    for pid in descendants():
        with suppress(OSError):
            if os.getpgid(pid) not in groups:
                os.kill(pid, signal.SIGTERM)


def signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap_adopted(own: Collection[int] = ()) -> None:
    """Reap orphans that ended, except for the processes in `own`, which their handles reap."""
    for pid in children():
        if pid not in own:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def has_children(but: Collection[int] = ()) -> bool:
    """Return True if a child remains after reaping all children that ended.

    The children `but` do not count and are left to their handles.
    """
    if but:
        reap_adopted(but)
        return not set(children()) <= set(but)
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


_BY_THEMSELVES = 0.3  # seconds


def end_descendants(grace: float, but: Collection[int] = ()) -> int:
    """Send SIGTERM to every descendant, and SIGKILL after `grace` seconds, until only `but` and below remain.

    Call it in a sub-reaper whose own children have been reaped or may be reaped. The orphans of each dead
    process become children here, so a pass without children has found the last one.

    Return how many processes needed a signal. Helpers such as multiprocessing's resource tracker end by
    themselves after their parent. The call gives up after five seconds of killing, because a process in
    uninterruptible sleep cannot be ended. It counts rounds and not time, because time passes while the
    launcher is suspended.
    """
    _wait_childless(time.monotonic() + min(grace, _BY_THEMSELVES), but)
    if not has_children(but):
        return 0
    first = descendants(but)
    if grace > 0:
        signal_all(first, signal.SIGTERM)
        signal_all(first, signal.SIGCONT)
        _wait_childless(time.monotonic() + grace, but)
    for _ in range(_ROUNDS):
        if not has_children(but):
            break
        signal_all(descendants(but), signal.SIGKILL)
        _wait_childless(time.monotonic() + 0.01, but)
    return len(set(first) - set(descendants(but)))


def _wait_childless(deadline: float, but: Collection[int]) -> None:
    while has_children(but):
        left = deadline - time.monotonic()
        if left <= 0:
            return
        poll = select.poll()
        fds = []
        for pid in [each for each in children() if each not in but][:256]:
            with suppress(OSError):
                fds.append(os.pidfd_open(pid))
                poll.register(fds[-1], select.POLLIN)
        poll.poll(max(1, min(left, 0.2) * 1000) if fds else 1)
        for fd in fds:
            os.close(fd)
