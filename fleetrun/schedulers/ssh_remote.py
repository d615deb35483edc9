"""The far end of an ssh connection. `python -m fleetrun.schedulers.ssh_remote -- COMMAND` runs a command that
ends when the connection does.

The near end (`ssh.py`) writes lines to stdin. The first line is a JSON object (`{"env": {...}, "patience":
10.0, "grace": 20.0}`). A line `signal N` passes on a signal, and empty lines are heartbeats. With --sync, the
command gets the rest of a line `edit REST` as a line on its stdin, which is else empty. When stdin closes, or
is silent for `patience` seconds, the command gets SIGTERM, and SIGKILL `grace` seconds later.

On stderr, two lines start with MARK: `begun` once the command runs, and `ended N` with its exit code after
its end. All other lines belong to the command.

If this process gets SIGTERM, SIGHUP or SIGINT, the command gets SIGTERM, from its first moment on. If this
process is killed, the kernel sends SIGTERM to the command.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from fleetrun.envs.channels import TREE_VARIABLE
from fleetrun.pod import linux

MARK = b"\x1efleetrun "
STARTED = b"begun"
ENDED = b"ended "
_FOR_BOTH = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code as a shell would."""
    words = list(argv[1:] if argv[:1] == ["--"] else argv)
    reader = _Lines(0)
    first = reader.wait()
    if not words or first is None:
        return 2
    orders = json.loads(first)
    # Block these signals until `_RemoteCommand` passes them on. A signal in between would end this process,
    # or be lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_BOTH)
    stdin, edits = os.pipe()
    pid = _started(words, orders["env"], mask, stdin)
    os.close(stdin)
    if TREE_VARIABLE not in os.environ:
        os.close(edits)
    remote = _RemoteCommand(pid, reader, float(orders["patience"]), float(orders["grace"]), edits)
    remote.take_signals(mask)
    _report(STARTED)
    code = remote.hold()
    _report(ENDED + str(code).encode())
    return code


def _report(text: bytes) -> None:
    with suppress(OSError):  # the near end has closed
        os.write(2, MARK + text + b"\n")


def _started(words: list[str], env: dict[str, str], mask: set[int], stdin: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    _become(words, {**os.environ, **env}, mask, parent, stdin)


def _become(words: list[str], env: dict[str, str], mask: set[int], parent: int, stdin: int) -> NoReturn:
    """Become the command, in the fork. Its signals are as this process found them."""
    try:
        linux.die_with_parent(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(143)
        # Signals from sshd or a terminal to the group reach the command only through this process.
        os.setpgid(0, 0)
        os.dup2(stdin, 0)
        # Reset signals to their defaults. Exec keeps ignored signals ignored, and a KeyboardInterrupt before
        # exec would print a traceback of the fork.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvpe(words[0], words, env)
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


class _RemoteCommand:
    """Holds one command. `patience` and `grace` are in seconds."""

    def __init__(self, pid: int, reader: _Lines, patience: float, grace: float, edits: int) -> None:
        self._pid = pid
        self._edits = edits
        self._reader = reader
        self._patience = patience
        self._grace = grace
        self._pidfd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        self._poll.register(0, select.POLLIN)
        self._cut = False
        self._limit = time.monotonic() + patience

    def take_signals(self, mask: set[int]) -> None:
        """Pass these signals on to the command from now on, including signals that were blocked so far."""
        for number in _FOR_BOTH:
            signal.signal(number, lambda *_: self._send(signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def hold(self) -> int:
        """Wait until the command has ended, and return its exit code."""
        while True:
            left = max(0.0, self._limit - time.monotonic())
            ready = {fd for fd, _ in self._poll.poll(left * 1000)}
            if self._pidfd in ready:
                return _code(os.waitpid(self._pid, 0)[1])
            if 0 in ready:
                self._listen()
            elif time.monotonic() >= self._limit:
                self._lost()

    def _listen(self) -> None:
        lines = self._reader.read()
        if lines is None:
            self._lost()
            return
        self._limit = time.monotonic() + self._patience
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"signal" and number.isdigit():
                self._send(int(number))
            elif word == b"edit":
                with suppress(OSError):  # the command has ended
                    os.write(self._edits, number + b"\n")

    def _lost(self) -> None:
        """Signal the command after the connection was lost, and again after the grace period."""
        self._send(signal.SIGKILL if self._cut else signal.SIGTERM)
        if not self._cut:
            self._poll.unregister(0)
        self._cut = True
        self._limit = time.monotonic() + self._grace

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


class _Lines:
    """Whole lines of a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def wait(self) -> bytes | None:
        """Return the first line, or None if the descriptor closes before it."""
        lines: list[bytes] | None = []
        while lines == []:
            lines = self.read()
        if not lines:
            return None
        self._rest = b"\n".join([*lines[1:], self._rest])
        return lines[0]

    def read(self) -> list[bytes] | None:
        """Return the lines that have arrived, or None at the end."""
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
