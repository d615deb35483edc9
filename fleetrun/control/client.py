"""Running launches as commands see them: finds their sockets, asks them within a limit of time, and waits for
their end, or ends by signal those that do not answer. Knows no command.

A launcher that was killed leaves its sockets; a command that finds one without a listener removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from fleetrun import files
from fleetrun.aliases import Document, Environ, Fields
from fleetrun.files import peer, short_socket_path
from fleetrun.frozen import frozen_by_name
from fleetrun.proc import read_stat, readable
from fleetrun.record.history import names

# ---- Asking a running launcher

_LONGEST = 64 << 20


STOPPED = "it is stopped (Ctrl-Z)"
"""Why a launcher does not answer that only has to be continued."""


class NoAnswer(Exception):
    """Why a launcher did not answer. `pid` is its process, 0 when that is not known."""

    def __init__(self, why: str, pid: int = 0) -> None:
        super().__init__(why)
        self.pid = pid


class Gone(NoAnswer):
    """There is no launcher, or it has ended."""


def ask(path: Path, request: Fields, timeout: float) -> Document:
    """What the launcher with this control socket answers within `timeout` seconds. Raises NoAnswer."""
    return Question(path, request, time.monotonic() + timeout).answer()


def ask_all(paths: Sequence[Path], request: Fields, timeout: float) -> list[Document | NoAnswer]:
    """The same of several, in their order, within one `timeout`: all are asked before the first is waited
    for.
    """
    deadline = time.monotonic() + timeout
    asked: list[Question | NoAnswer] = []
    for path in paths:
        try:
            asked.append(Question(path, request, deadline))
        except NoAnswer as reason:
            asked.append(reason)
    found: list[Document | NoAnswer] = []
    for each in asked:
        try:
            found.append(each.answer() if isinstance(each, Question) else each)
        except NoAnswer as reason:
            found.append(reason)
    return found


class Question:
    """Asked, and perhaps not yet answered. Raises NoAnswer."""

    def __init__(self, path: Path, request: Fields, deadline: float) -> None:
        self.pid = 0
        self._deadline = deadline
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._ask(path, request)
        except NoAnswer:
            self._socket.close()
            raise

    def _ask(self, path: Path, request: Fields) -> None:
        self._patience()
        try:
            with short_socket_path(path) as name:
                self._socket.connect(name)
        except (ConnectionRefusedError, FileNotFoundError, NotADirectoryError):
            raise Gone("no launcher listens there") from None
        except (TimeoutError, BlockingIOError):
            raise NoAnswer("it is busy or stopped") from None
        except OSError as error:
            raise NoAnswer(error.strerror or str(error)) from None
        self.pid, uid, _ = peer(self._socket)
        if uid not in (0, os.getuid()):
            raise NoAnswer(f"it belongs to another user ({uid})")
        if not self.pid:
            raise NoAnswer("it runs in another container, whose processes are not visible from here")
        if _stopped(self.pid):
            raise NoAnswer(STOPPED, self.pid)
        with suppress(OSError):  # then it has gone, which the answer shows
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def answer(self) -> Document:
        """Wait for it; only once."""
        with self._socket:
            line = self._line()
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise NoAnswer("its protocol version is incompatible", self.pid) from None
        if not isinstance(answer, dict):
            raise NoAnswer("its protocol version is incompatible", self.pid)
        if "error" in answer:
            raise NoAnswer(str(answer["error"]), self.pid)
        return _seen_from_here(answer, self.pid)

    def _line(self) -> bytes:
        said = bytearray()
        while not said.endswith(b"\n") and len(said) < _LONGEST:
            self._patience()
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError:
                raise NoAnswer("it is busy or stopped", self.pid) from None
            except OSError:
                data = b""
            if not data:
                raise Gone("it has just ended", self.pid)
            said += data
        return bytes(said)

    def _patience(self) -> None:
        """Of the socket, for the next step: what is left, or a look without waiting."""
        self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))


def _seen_from_here(answer: Document, pid: int) -> Document:
    """A launcher in a container of its own (another pid namespace) calls processes by numbers that are those
    of others here. The kernel knows its own, `pid`; the others are not known then.
    """
    said = answer.get("pid")
    if said == pid or not isinstance(said, int) or not 0 < said < 1 << 31:
        return answer
    there = answer.get("containers")
    if isinstance(there, list):
        unknown = [{**each, "pid": None} if isinstance(each, dict) else each for each in there]
        answer = {**answer, "containers": unknown}
    return {**answer, "pid": pid}


def _stopped(pid: int) -> bool:
    """Whether this process is stopped, so that waiting for it is useless."""
    try:
        return read_stat(pid).state in "Tt"
    except ProcessLookupError:
        return False


# ---- Sockets of running launches. A launcher that was killed leaves its sockets; a client that finds no
# listener removes them

SUFFIX = ".sock"


def run_folders(environ: Environ) -> list[Path]:
    """Where this user's launches may be: a login, cron and sudo do not agree about XDG_RUNTIME_DIR.

    A folder that somebody chose is the only one.
    """
    first = files.run_folder(environ)
    login = Path(f"/run/user/{os.getuid()}/fleetrun")
    plain = files.run_folder({})
    return list(dict.fromkeys((first, login, plain))) if first in (login, plain) else [first]


def trusted(folder: Path) -> bool:
    """Whether it is a folder of this user that no other user can write to."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def control_sockets(folder: Path) -> list[Path]:
    """The control sockets in it, in the order of their names; of a folder that cannot be trusted none."""
    if not trusted(folder):
        return []
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    return [each for each in paths if each.suffix == SUFFIX and each.name[0] != "." and _is_socket(each)]


def _is_socket(path: Path) -> bool:
    with suppress(OSError):
        return stat.S_ISSOCK(path.lstat().st_mode)
    return False


def remove_dead_sockets(path: Path) -> None:
    """Remove what a dead launcher has left: its control socket, on which no process listens, and those for
    progress and memory.
    """
    for left in (path, path.with_suffix(".progress"), path.with_suffix(".memory")):
        if _is_socket(left) and _dead(left):
            with suppress(OSError):
                left.unlink()


def _dead(path: Path) -> bool:
    """Whether no process has this socket open."""
    kind = {SUFFIX: socket.SOCK_STREAM, ".memory": socket.SOCK_SEQPACKET}.get(path.suffix, socket.SOCK_DGRAM)
    with socket.socket(socket.AF_UNIX, kind) as probe, suppress(OSError):
        probe.setblocking(False)
        try:
            with files.short_socket_path(path) as name:
                probe.connect(name)
        except ConnectionRefusedError:
            return True
    return False


# ---- Running launches of this user

TIMEOUT = 6.0
"""Seconds in which all launchers answer, unless they are very busy: a disk may hold one up for three."""


@frozen_by_name
class Running:
    """One launch. Times are seconds since the epoch.

    `status` is its answer, empty when there was none; `silence` says why then, and what is known of it was
    found from outside: `job` may be empty.
    """

    job: str
    pod: str
    log_dir: Path
    socket: Path
    pid: int
    started: float | None = None
    status: Fields = field(default_factory=dict)
    silence: str = ""

    @property
    def script(self) -> str:
        return str(self.status.get("script") or "")

    @property
    def cwd(self) -> str:
        """Where it was started."""
        return str(self.status.get("cwd") or "")

    @property
    def record(self) -> Path:
        """The journal of this launch."""
        from fleetrun.record.journal import journal_path

        return journal_path(self.log_dir, self.job, self.pod)


def running_launches(environ: Environ, timeout: float = TIMEOUT) -> list[Running]:
    """All of them, the oldest first. What launchers that were killed have left is taken away."""
    paths = [path for folder in run_folders(environ) for path in control_sockets(folder)]
    found = []
    for path, answer in zip(paths, ask_all(paths, {"ask": "status"}, timeout), strict=True):
        if isinstance(answer, Gone):
            remove_dead_sockets(path)
        elif isinstance(answer, NoAnswer):
            found.append(_silent(path, answer.pid, str(answer)))
        else:
            found.append(_answered(path, answer))
    return sorted(found, key=lambda each: (each.started or 0.0, each.pod))


def _answered(path: Path, status: Document) -> Running:
    """One that says something else than the name of its socket is somebody's joke, and not listened to."""
    job, log_dir, started = status.get("job"), status.get("log_dir"), status.get("started")
    pid = status.get("pid")
    sound = isinstance(job, str) and isinstance(log_dir, str) and isinstance(pid, int) and 0 < pid < 1 << 31
    if not sound or status.get("pod") != path.stem:
        return _silent(path, 0, "its protocol version is incompatible")
    return Running(
        job=str(job),
        pod=path.stem,
        log_dir=Path(str(log_dir)),
        socket=path,
        pid=int(str(pid)),
        started=float(started) if isinstance(started, int | float) and 0 <= started < 1e12 else None,
        status=status,
    )


def _silent(path: Path, pid: int, why: str) -> Running:
    """Its record is open in the launcher: that tells its name and place."""
    record = _record_of(pid, path.stem)
    known = names(record) if record is not None else None
    return Running(
        job=known[0] if known is not None else "",
        pod=path.stem,
        log_dir=record.parent if record is not None else Path(),
        socket=path,
        pid=pid,
        started=files.modified(Path(f"/proc/{pid}")),
        silence=why,
    )


def _record_of(pid: int, pod: str) -> Path | None:
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = entry.readlink()
            known = names(target)
            if known is not None and known[1] == pod:
                return target
    except OSError:
        return None
    return None


# ---- The end of a launcher and its guard; asking by signal


class Watched:
    """A launcher and the guard that is its parent, from a moment at which both ran. A pid that is not there
    is over already.
    """

    def __init__(self, launcher: int) -> None:
        self._pidfds: list[int] = []
        for pid in (launcher, guard_of(launcher)):
            if pid > 1:
                with suppress(OSError):
                    self._pidfds.append(os.pidfd_open(pid))

    def wait(self) -> None:
        """Until both are gone: the guard ends what the launcher left."""
        for fd in self._pidfds:
            readable(fd, -1)

    def ending(self) -> bool:
        """Whether one of them is gone since: the other follows."""
        return any(map(readable, self._pidfds))

    def over(self) -> bool:
        return all(map(readable, self._pidfds))

    def close(self) -> None:
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds.clear()


def guard_of(launcher: int) -> int:
    """The parent of this process, if it is a guard; else 0."""
    try:
        parent = read_stat(read_stat(launcher).parent)
    except ProcessLookupError:
        return 0
    return parent.pid if parent.name == "fleetrun-guard" else 0


def ask_by_signal(launcher: int, now: bool) -> bool:
    """End a launcher that cannot be asked; False when it cannot be reached. It is continued if it is stopped.

    By SIGTERM to the guard, which hands it on. `now`: by SIGKILL to the launcher, and the guard kills what
    that leaves. The first signal may be the end of both before the second is sent.
    """
    with contextlib.ExitStack() as stack:
        try:
            it = _held(launcher, stack)  # first: from here on the pid cannot be reused
            guard = guard_of(launcher)
            if guard <= 1:
                return False
            its_guard = _held(guard, stack)
            signal.pidfd_send_signal(it if now else its_guard, signal.SIGKILL if now else signal.SIGTERM)
        except OSError:
            return False
        with suppress(OSError):
            signal.pidfd_send_signal(its_guard, signal.SIGCONT)
        return True


def _held(pid: int, stack: contextlib.ExitStack) -> int:
    """A pidfd, closed with the stack."""
    pidfd = os.pidfd_open(pid)
    stack.callback(os.close, pidfd)
    return pidfd
