"""One ssh client: a host's output by lines, signals to its fleetrun, and its end. Knows no other host."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fleetrun.errors import LaunchError
from fleetrun.pod.loop import Loop
from fleetrun.schedulers.leash import BEGUN, ENDED, MARK

_LONGEST_LINE = 1 << 16
_REMEMBERED = 8  # lines of what a host said before its fleetrun began


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the far end is told first; see `leash.py`."""

    env: dict[str, str] = field(default_factory=dict, repr=False)
    patience: float
    grace: float

    def line(self) -> bytes:
        text = json.dumps({"env": self.env, "patience": self.patience, "grace": self.grace})
        return text.encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Farewell:
    """How a connection ended. `code` is that of the fleetrun there, None when it could not tell; `client` is
    that of ssh itself, `said` what was said before anything began. `cut`: from this side.
    """

    begun: bool
    code: int | None
    client: int
    said: tuple[str, ...] = ()
    cut: bool = False


class Link:
    """`show(stream, lines)` gets whole lines of stream 1 or 2, `over` is called once at the end."""

    def __init__(
        self, host: str, show: Callable[[int, bytes], None], over: Callable[[Link, Farewell], None]
    ) -> None:
        self.host = host
        self.begun = False
        self.alive = False
        self._show = show
        self._over = over
        self._code: int | None = None
        self._said: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._rest = {1: b"", 2: b""}
        self._paused = False
        self._cut = False

    def open(self, loop: Loop, argv: Sequence[str], orders: Orders) -> None:
        """Start the client. Raises LaunchError when there is none."""
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
            )
        except OSError as error:
            raise LaunchError(f"cannot run {argv[0]}: {error.strerror}", hint="Is it installed?") from None
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._fds = [stream.fileno() for stream in streams if stream is not None]
        for fd in self._fds:
            os.set_blocking(fd, False)
        self.alive = True
        self._loop = loop
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add(self._pidfd, self._ended)
        loop.add(self._fds[1], partial(self._readable, 1))
        loop.add(self._fds[2], partial(self._readable, 2))
        self._write(orders.line())

    def pause(self) -> None:
        """Read no more of the job's output for now: nobody takes it."""
        if self.alive and not self._paused:
            self._paused = True
            self._loop.remove(self._fds[1])

    def resume(self) -> None:
        if self.alive and self._paused:
            self._paused = False
            self._loop.add(self._fds[1], partial(self._readable, 1))

    def beat(self) -> None:
        """A sign of life."""
        self._write(b"\n")

    def signal(self, number: int) -> None:
        """To the fleetrun there; a host where none has begun is given up."""
        if self.begun:
            self._write(b"signal %d\n" % number)
        else:
            self.cut()

    def cut(self) -> None:
        """End the connection; the far end sees to the rest."""
        if self.alive:
            self._cut = True
            self._process.kill()

    def _write(self, data: bytes) -> None:
        if self.alive:
            with contextlib.suppress(OSError):  # a link that takes nothing will be noticed at its end
                os.write(self._fds[0], data)

    def _readable(self, stream: int) -> None:
        self._read(stream)

    def _read(self, stream: int) -> bool:
        """Whether there was anything."""
        try:
            data = os.read(self._fds[stream], 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove(self._fds[stream])
            return False
        whole, newline, self._rest[stream] = (self._rest[stream] + data).rpartition(b"\n")
        if len(self._rest[stream]) > _LONGEST_LINE:
            whole, newline, self._rest[stream] = whole + newline + self._rest[stream], b"\n", b""
        if newline:
            self._take(stream, whole + newline)
        return True

    def _take(self, stream: int, lines: bytes) -> None:
        if stream == 1:
            self._show(1, lines)
            return
        kept = [line for line in lines.splitlines(keepends=True) if not self._is_ours(line)]
        if kept and self.begun:
            self._show(2, b"".join(kept))
        elif kept:
            self._said.extend(kept)

    def _is_ours(self, line: bytes) -> bool:
        """Whether the leash said it."""
        if not line.startswith(MARK):
            return False
        word = line.removeprefix(MARK).rstrip()
        if word == BEGUN:
            self.begun = True
        elif word.startswith(ENDED):
            text = word.removeprefix(ENDED)
            if text.isdigit() and len(text) <= 3:  # anything else a script has printed
                self._code = int(text)
        return True

    def _ended(self) -> None:
        for stream in (1, 2):
            while self._read(stream):
                pass
            if self._rest[stream]:
                self._take(stream, self._rest[stream] + b"\n")
                self._rest[stream] = b""
        for fd in (self._pidfd, *self._fds[1:]):
            self._loop.remove(fd)
        self.alive = False
        client = self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            if file is not None:
                file.close()
        os.close(self._pidfd)
        said = tuple(line.decode(errors="replace").strip() for line in self._said)
        self._over(self, Farewell(self.begun, self._code, client, tuple(filter(None, said)), self._cut))
