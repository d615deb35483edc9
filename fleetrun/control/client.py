"""Asks running launchers. Waits as long as it is told and no longer; knows no command."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetrun.files import peer, short_socket_path

_LONGEST = 64 << 20


STOPPED = "it is stopped (Ctrl-Z)"
"""Why a launcher does not answer that only has to be continued."""


class NoAnswer(Exception):
    """Why a launcher did not answer. `pid` is its process, 0 when that is not known."""

    def __init__(self, why: str, pid: int = 0) -> None:
        super().__init__(why)
        self.pid = pid


class Gone(NoAnswer):
    """There is no launcher (any more)."""


def ask(path: Path, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """What the launcher with this control socket answers within `timeout` seconds. Raises NoAnswer."""
    return Question(path, request, time.monotonic() + timeout).answer()


def ask_all(
    paths: Sequence[Path], request: Mapping[str, Any], timeout: float
) -> list[dict[str, Any] | NoAnswer]:
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
    found: list[dict[str, Any] | NoAnswer] = []
    for each in asked:
        try:
            found.append(each.answer() if isinstance(each, Question) else each)
        except NoAnswer as reason:
            found.append(reason)
    return found


class Question:
    """Asked, and perhaps not yet answered. Raises NoAnswer."""

    def __init__(self, path: Path, request: Mapping[str, Any], deadline: float) -> None:
        self.pid = 0
        self._deadline = deadline
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._ask(path, request)
        except NoAnswer:
            self._socket.close()
            raise

    def _ask(self, path: Path, request: Mapping[str, Any]) -> None:
        self._patience()
        try:
            with short_socket_path(path) as name:
                self._socket.connect(name)
        except (ConnectionRefusedError, FileNotFoundError, NotADirectoryError):
            raise Gone("nobody listens there") from None
        except (TimeoutError, BlockingIOError):
            raise NoAnswer("it is busy or stopped") from None
        except OSError as error:
            raise NoAnswer(error.strerror or str(error)) from None
        self.pid, uid, _ = peer(self._socket)
        if uid not in (0, os.getuid()):
            raise NoAnswer(f"it belongs to another user ({uid})")
        if not self.pid:
            raise NoAnswer("it runs in another container, whose processes are not seen from here")
        if _stopped(self.pid):
            raise NoAnswer(STOPPED, self.pid)
        with contextlib.suppress(OSError):  # then it has gone, which the answer shows
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        """Wait for it; only once."""
        with self._socket:
            line = self._line()
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise NoAnswer("it speaks another language", self.pid) from None
        if not isinstance(answer, dict):
            raise NoAnswer("it speaks another language", self.pid)
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


def _seen_from_here(answer: dict[str, Any], pid: int) -> dict[str, Any]:
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
    """Whether nobody need wait for this process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
