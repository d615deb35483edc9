"""Find the sockets of running launches, send them requests within a time limit, and wait for their end. A
launcher that does not answer can be ended by signal. This module defines no commands.

A killed launcher leaves its sockets. A command that finds a socket without a listener removes it.
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
from fleetrun.decoding import read_object
from fleetrun.files import peer, short_socket_path
from fleetrun.frozen import frozen_by_name
from fleetrun.proc import read_stat, readable
from fleetrun.record.history import names

# ---- Requests to a running launcher

_LONGEST = 64 << 20


STOPPED = "it is stopped (Ctrl-Z)"
"""The reason of a launcher that is stopped and does not answer. `fg` or SIGCONT continues it."""


class NoAnswer(Exception):
    """The launcher did not answer, for the reason in the message. `pid` is its process, or 0 if unknown."""

    def __init__(self, why: str, pid: int = 0) -> None:
        super().__init__(why)
        self.pid = pid


class NoLauncher(NoAnswer):
    """The launcher does not exist, or has ended."""


def ask(path: Path, request: Fields, timeout: float) -> Document:
    """Return the answer of the launcher with this control socket. Raises NoAnswer after `timeout` seconds."""
    return Question(path, request, time.monotonic() + timeout).answer()


def ask_all(paths: Sequence[Path], request: Fields, timeout: float) -> list[Document | NoAnswer]:
    """Ask several launchers within one `timeout`, and return their answers in order. All requests go out
    before the first wait.
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
    """A request that was sent, perhaps without an answer so far. Raises NoAnswer."""

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
            raise NoLauncher("no launcher listens at its socket") from None
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
        with suppress(OSError):  # if the launcher has ended, the answer shows this
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def answer(self) -> Document:
        """Wait for the answer. You may call it only once."""
        with self._socket:
            line = self._line()
        answer = read_object(line)
        if answer is None:
            raise NoAnswer("its protocol version is incompatible", self.pid)
        if "error" in answer:
            raise NoAnswer(str(answer["error"]), self.pid)
        return _seen_from_here(answer, self.pid)

    def _line(self) -> bytes:
        content = bytearray()
        while not content.endswith(b"\n") and len(content) < _LONGEST:
            self._patience()
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError:
                raise NoAnswer("it is busy or stopped", self.pid) from None
            except OSError:
                data = b""
            if not data:
                raise NoLauncher("it has just ended", self.pid)
            content += data
        return bytes(content)

    def _patience(self) -> None:
        """Set the socket's timeout for the next step: the remaining time, or a look without waiting."""
        self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))


def _seen_from_here(answer: Document, pid: int) -> Document:
    """Correct the process IDs in an answer.

    A launcher in another pid namespace uses IDs that belong to other processes here. The kernel reports the
    ID of the launcher here, `pid`. The IDs of the other processes are then unknown.
    """
    reported = answer.get("pid")
    if reported == pid or not isinstance(reported, int) or not 0 < reported < 1 << 31:
        return answer
    there = answer.get("containers")
    if isinstance(there, list):
        unknown = [{**each, "pid": None} if isinstance(each, dict) else each for each in there]
        answer = {**answer, "containers": unknown}
    return {**answer, "pid": pid}


def _stopped(pid: int) -> bool:
    """Return True if this process is stopped, which makes a wait for it useless."""
    try:
        return read_stat(pid).state in "Tt"
    except ProcessLookupError:
        return False


# ---- Sockets of running launches. A killed launcher leaves its sockets. A client that finds a socket without
# a listener removes it.

SUFFIX = ".sock"


def run_folders(environ: Environ) -> list[Path]:
    """Return the directories with this user's launches. A login, cron and sudo set XDG_RUNTIME_DIR
    differently.

    A directory that somebody chose is the only one.
    """
    first = files.run_folder(environ)
    login = Path(f"/run/user/{os.getuid()}/fleetrun")
    plain = files.run_folder({})
    return list(dict.fromkeys((first, login, plain))) if first in (login, plain) else [first]


def trusted(folder: Path) -> bool:
    """Return True if only this user can write to this directory."""
    try:
        return files.only_ours(folder.lstat())
    except OSError:
        return False


def control_sockets(folder: Path) -> list[Path]:
    """Return the control sockets in a directory, sorted by name. An untrusted directory has none."""
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
    """Remove the sockets of a dead launcher: the control socket, and the sockets for progress and memory. A
    socket is dead if no process listens.
    """
    for left in (path, path.with_suffix(".progress"), path.with_suffix(".memory")):
        if _is_socket(left) and _dead(left):
            with suppress(OSError):
                left.unlink()


def _dead(path: Path) -> bool:
    """Return True if no process has this socket open."""
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
"""Seconds in which all launchers answer, unless they are very busy. A disk may delay a launcher for three."""


@frozen_by_name
class Running:
    """A running launch. Times are seconds since the epoch.

    `status` is the answer of the launcher. Without an answer, `status` is empty and `silence` gives the
    reason. The other fields then come from outside, and `job` may be empty.
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
        """The directory in which the launch was started."""
        return str(self.status.get("cwd") or "")

    @property
    def record(self) -> Path:
        """The event log of this launch."""
        from fleetrun.record.journal import journal_path

        return journal_path(self.log_dir, self.job, self.pod)


def running_launches(environ: Environ, timeout: float = TIMEOUT) -> list[Running]:
    """Return all running launches, oldest first. Remove the sockets of killed launchers."""
    paths = [path for folder in run_folders(environ) for path in control_sockets(folder)]
    found = []
    for path, answer in zip(paths, ask_all(paths, {"ask": "status"}, timeout), strict=True):
        if isinstance(answer, NoLauncher):
            remove_dead_sockets(path)
        elif isinstance(answer, NoAnswer):
            found.append(_silent(path, answer.pid, str(answer)))
        else:
            found.append(_answered(path, answer))
    return sorted(found, key=lambda each: (each.started or 0.0, each.pod))


def _answered(path: Path, status: Document) -> Running:
    """Return the launch of an answer. An answer with another name than its socket is not trusted."""
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
    """Return a launch without an answer. The event log, open in the launcher, shows its name and
    directory.
    """
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


# ---- The end of a launcher and its guard, and requests by signal


class Watched:
    """A launcher and the guard that is its parent, from a moment at which both ran. A missing process counts
    as ended.
    """

    def __init__(self, launcher: int) -> None:
        self._pidfds: list[int] = []
        for pid in (launcher, guard_of(launcher)):
            if pid > 1:
                with suppress(OSError):
                    self._pidfds.append(os.pidfd_open(pid))

    def wait(self) -> None:
        """Wait until both have ended, because the guard ends the remaining processes of the launcher."""
        for fd in self._pidfds:
            readable(fd, -1)

    def ending(self) -> bool:
        """Return True if one of them has ended. The other one follows."""
        return any(map(readable, self._pidfds))

    def over(self) -> bool:
        return all(map(readable, self._pidfds))

    def close(self) -> None:
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds.clear()


def guard_of(launcher: int) -> int:
    """Return the parent of this process, if the parent is a guard, else 0."""
    try:
        parent = read_stat(read_stat(launcher).parent)
    except ProcessLookupError:
        return 0
    return parent.pid if parent.name == "fleetrun-guard" else 0


def ask_by_signal(launcher: int, now: bool) -> bool:
    """End a launcher that does not answer. Return False if the launcher cannot be reached. A stopped launcher
    continues.

    The guard gets SIGTERM and passes it on. `now`: the launcher gets SIGKILL, and the guard kills the rest.
    The first signal may end both before the second signal is sent.
    """
    with contextlib.ExitStack() as stack:
        try:
            it = _held(launcher, stack)  # first, because from here on the pid cannot be reused
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
    """Return a pidfd that closes with the stack."""
    pidfd = os.pidfd_open(pid)
    stack.callback(os.close, pidfd)
    return pidfd
