"""Processes of this host: start, signal, reap, and end whole trees. Knows the operating system and no job.

A process that has already gone is success everywhere here. A process started here leads its own session and
group, so that `signal_group` reaches its children too; what left the group is found as a descendant
(`end_descendants`).
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

_ROUNDS = 500  # of killing, of a hundredth of a second each


@frozen
class Exit:
    """How a process ended. `code` is subprocess's: the exit code, or minus the signal."""

    code: int

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def signal(self) -> int | None:
        return -self.code if self.code < 0 else None

    @property
    def shell_code(self) -> int:
        """What a shell reports: the code, or 128 + the signal."""
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
    """A child of this process: a pidfd that is readable once it has ended, and its group."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self._pidfd = os.pidfd_open(popen.pid)
        self.exit: Exit | None = None
        self.peak_memory: int | None = None
        """Most bytes that it, or one of the children that it waited for, had in memory; known once reaped. It
        began as a copy of this process: it is not less than what this one had then.
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
        """Start `argv` with stdout and stderr on the descriptor `output`, without stdin if none is given. It
        has the descriptors `keep` too, under their numbers.

        Raises ScriptNotFoundError, ScriptNotExecutableError, or SpawnError when the kernel is out of
        something.
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
                    f"cannot start {argv[0]}: its interpreter is not there", hint="See its #! line."
                ) from None
            raise ScriptNotFoundError(f"cannot start {argv[0]}: there is no such program") from None
        except PermissionError as error:
            raise ScriptNotExecutableError(f"cannot start {argv[0]}: {error.strerror}") from None
        except OSError as error:
            raise _spawn_error(argv[0], error) from None
        try:
            return cls(popen)
        except OSError as error:  # no descriptor left for the pidfd: take the child back
            popen.kill()
            popen.wait()
            raise _spawn_error(argv[0], error) from None

    def _left_well(self) -> bool:
        try:
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # somebody else reaped it: its group's id may be another's
            return True
        if info is None:
            return not read_stat(self.pid).exit
        return info.si_code == os.CLD_EXITED and info.si_status == 0

    def fileno(self) -> int:
        return self._pidfd

    @property
    def ended(self) -> bool:
        """Whether it is over, reaped or not."""
        if self.exit is not None:
            return True
        return readable(self._pidfd)

    def program(self) -> str:
        """The kernel's name for what it runs, also once it has ended; empty after `reap`."""
        with suppress(ProcessLookupError):
            return read_stat(self.pid).name.strip() if self.exit is None else ""
        return ""

    def signal_group(self, number: int) -> None:
        """To the leader and all that stayed in its group. Only before `reap`: until then the group's id is
        not reused.
        """
        if self.exit is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def signal_leader(self, number: int) -> None:
        if self.exit is None:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, number)

    def handles(self, number: int) -> bool:
        """Whether the leader has a handler for this signal, or ignores it, so that it does not die of it."""
        masks = self._status("SigIgn", "SigCgt")
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)

    def pauses(self) -> int:
        """How often the main thread of the leader has begun to wait, so far."""
        return sum(map(int, self._status("voluntary_ctxt_switches")))

    def _status(self, *names: str) -> list[str]:
        """These fields of its main thread; none of one that has gone."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(errors="replace")
        except OSError:
            return []
        fields = (line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        return [value for name, value in fields if name in names]

    def reap(self, *, with_group: bool = False) -> Exit:
        """Once the pidfd is readable: the exit. Gives the pid back to the kernel.

        With `with_group` the rest of a failed leader's group (data loaders, shells) is killed with it: before
        the reaping, because from then on the group's id may be another's.
        """
        if self.exit is None:
            if with_group and not self._left_well():
                self.signal_group(signal.SIGKILL)
            self.exit = self._wait()
            os.close(self._pidfd)
        return self.exit

    def _wait(self) -> Exit:
        try:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG if self.ended else 0)
        except ChildProcessError:  # somebody else reaped it
            return Exit(self._popen.wait())
        if pid:
            self.peak_memory = usage.ru_maxrss * 1024  # Linux counts KiB
        else:  # a debugger holds it, and the kernel keeps its pid until that lets it go
            status = read_stat(self.pid).exit
        self._popen.returncode = os.waitstatus_to_exitcode(status)
        return Exit(self._popen.returncode)


@contextlib.contextmanager
def _default_sigttou() -> Iterator[None]:
    """Children do not inherit that this process ignores it."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTTOU, before)


_HINTS = {
    "EAGAIN": "The limit on processes is reached: see `ulimit -u` or the cgroup's pids.max.",
    "EMFILE": "The limit on open files is reached: raise it with `ulimit -n`.",
    "ENFILE": "The system's limit on open files is reached.",
    "ENOMEM": "The system is out of memory.",
    "E2BIG": "The arguments and the environment together are larger than the kernel allows.",
    "ENOEXEC": "It has no #! line and is not a binary for this machine.",
}


def _spawn_error(program: str, error: OSError) -> LaunchError:
    name = errno.errorcode.get(error.errno or 0, "")
    kind = ScriptNotExecutableError if name == "ENOEXEC" else SpawnError
    return kind(f"cannot start {program}: {error.strerror}", hint=_HINTS.get(name))


def children() -> list[int]:
    """The children of this process, adopted ones included (it must be single-threaded)."""
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return [pid for pid in _all_pids() if _parent_of(pid) == os.getpid()]


def _all_pids() -> Iterator[int]:
    with suppress(OSError):  # no descriptor left
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                yield int(entry.name)


def _parent_of(pid: int) -> int:
    with suppress(ProcessLookupError):
        return read_stat(pid).parent
    return -1


def descendants(but: Collection[int] = ()) -> list[int]:
    """All processes below this one, nearest first; without the children `but` and what is below them."""
    return with_all_below([pid for pid in children() if pid not in but])


def with_all_below(wave: list[int]) -> list[int]:
    found: list[int] = []
    while wave:
        found += wave
        wave = [child for pid in wave for child in children_of(pid) if child not in found]
    return found


def children_of(pid: int) -> list[int]:
    """Of any process of this user; none of one that has gone."""
    with suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


def kill_marked(mark: str, but: Collection[int] = ()) -> None:
    """SIGKILL to what is below this process, but not the children `but`, and has `NAME=value` in the
    environment that it was started with.

    This tells a container's daemons from those of others, whatever session they are in. What is below
    them goes too: a launch inside a container gives its own containers marks of their own.
    """
    wanted = mark.encode()
    for pid in descendants(but):
        with suppress(OSError):
            pidfd = os.pidfd_open(pid)  # before the look: what is killed is what was looked at
            try:
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    below = with_all_below(children_of(pid))  # before it dies and they have another parent
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    signal_all(below, signal.SIGKILL)
            finally:
                os.close(pidfd)


def ask_strays(groups: Collection[int]) -> None:
    """SIGTERM to everything below this process that is in none of these process groups."""
    for pid in descendants():
        with suppress(OSError):
            if os.getpgid(pid) not in groups:
                os.kill(pid, signal.SIGTERM)


def signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap_adopted(own: Collection[int] = ()) -> None:
    """Give orphans that ended back to the kernel; leave the processes named in `own` to their handles."""
    for pid in children():
        if pid not in own:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def has_children(but: Collection[int] = ()) -> bool:
    """Whether anything is left below this process, after reaping what has ended. The children `but` do not
    count and are left to their handles.
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
    """SIGTERM to everything below this process, SIGKILL after `grace` seconds, until nothing is left but the
    children `but` and what is below them.

    For a process that is a sub-reaper and whose own children have all been reaped or may be: the orphans of
    what dies become children here, so a pass that finds none has found the last. Returns how many had to be
    asked: helpers such as multiprocessing's resource tracker end by themselves when their parent has. Gives
    up after five seconds of killing (a process in uninterruptible sleep cannot be ended); they are counted in
    rounds, because a suspended launcher has killed nothing meanwhile.
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
