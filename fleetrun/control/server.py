"""The socket at which a launcher is asked: one line of JSON, one line back, and the connection is over. Knows
nothing of what is asked.

Only this user and root are heard. Nothing here waits: who asks slowly, or does not read the answer, is let go
after a while, and costs the job nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetrun.files import peer, short_socket_path
from fleetrun.pod.loop import READ, WRITE, Loop, Timer
from fleetrun.record.journal import plain

Message = dict[str, Any]
Say = Callable[[Message], None]
Later = Callable[[Say], None]
"""Who will say it when it is known; once."""

Answer = Callable[[Message], Message | Later]

PATIENCE = 10.0  # seconds for a whole conversation
MOST = 64  # conversations at a time; one more, and the oldest is over
LONGEST = 64 << 10  # bytes of a question
_PAUSE = 1.0  # seconds before it listens again, when there was no descriptor for a caller
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server:
    """From its creation on people can ask. Raises OSError when the socket cannot be made."""

    def __init__(self, loop: Loop, path: Path, answer: Answer) -> None:
        self.path = path
        self._loop = loop
        self._answer = answer
        self._talks: dict[_Talk, None] = {}  # the oldest first
        self._pause: Timer | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._made = _listen(self._socket, path)
        except OSError:
            self._socket.close()
            raise
        loop.add(self._socket.fileno(), self._called)

    def close(self) -> None:
        """May be called twice."""
        if self._socket.fileno() < 0:
            return
        for talk in list(self._talks):
            talk.end()
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove(self._socket.fileno())
        self._socket.close()
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._made:
                self.path.unlink()

    def _called(self) -> None:
        try:
            caller, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:  # it would be readable again at once, for ever
                self._loop.remove(self._socket.fileno())
                self._pause = self._loop.after(_PAUSE, self._listen_again)
            return
        if not heard(peer(caller)[1], os.getuid()):
            caller.close()
            return
        if len(self._talks) >= MOST:
            next(iter(self._talks)).end()
        self._talks[_Talk(self._loop, caller, self._answer, self._talks.pop)] = None

    def _listen_again(self) -> None:
        self._loop.add(self._socket.fileno(), self._called)


def _listen(made: socket.socket, path: Path) -> int:
    """Bind and listen, and only then take the name: who meets a socket at which nobody listens takes it away.

    Returns the number of its inode.
    """
    aside = path.with_name(f".{path.name}")
    aside.unlink(missing_ok=True)
    with short_socket_path(aside) as name:
        made.bind(name)
    aside.chmod(0o600)
    made.listen(MOST)
    return aside.rename(path).lstat().st_ino


def heard(uid: int, own: int) -> bool:
    """Whether this user is answered by a launcher of the user `own`."""
    return uid in (0, own)


class _Talk:
    """One caller, from its first byte to the last of the answer."""

    def __init__(
        self, loop: Loop, caller: socket.socket, answer: Answer, over: Callable[[_Talk], None]
    ) -> None:
        self._loop = loop
        self._caller = caller
        self._answer = answer
        self._over = over
        self._asked = bytearray()
        self._left = memoryview(b"")
        self._limit = loop.after(PATIENCE, self.end)
        caller.setblocking(False)
        loop.add(caller.fileno(), self._hear, READ)

    def end(self) -> None:
        """An answer that comes later finds nobody."""
        self._limit.cancel()
        self._loop.remove(self._caller.fileno())
        self._caller.close()
        self._over(self)

    def _hear(self) -> None:
        try:
            data = self._caller.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._asked += data
        line, newline, _ = bytes(self._asked).partition(b"\n")
        if newline or len(self._asked) > LONGEST:
            self._loop.remove(self._caller.fileno())
            answer = _answered(line if newline else None, self._answer)
            if callable(answer):
                answer(self._say)
            else:
                self._say(answer)
        elif not data:
            self.end()

    def _say(self, answer: Message) -> None:
        """Perhaps nobody listens any more."""
        if self._caller.fileno() < 0:
            return
        self._left = memoryview(json.dumps(plain(answer)).encode() + b"\n")
        self._loop.add(self._caller.fileno(), self._send, WRITE)
        self._send()

    def _send(self) -> None:
        try:
            sent = self._caller.send(self._left)
        except BlockingIOError:
            return
        except OSError:  # nobody reads any more
            self.end()
            return
        self._left = self._left[sent:]
        if not self._left:
            self.end()


def _answered(line: bytes | None, answer: Answer) -> Message | Later:
    if line is None:
        return {"error": f"a question has at most {LONGEST} bytes"}
    try:
        question = json.loads(line)
    except (ValueError, RecursionError):
        return {"error": "a question is one line of JSON"}
    if not isinstance(question, dict):
        return {"error": "a question is a JSON object"}
    return answer(question)
