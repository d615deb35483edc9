"""Connect a user to pdb in a process of a job, in a terminal or a notebook. `probe/inside/fleetrun_debug.py`
describes the protocol.
"""

from __future__ import annotations

import json
import os
import readline
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from fleetrun.aliases import Callback
from fleetrun.files import peer, short_socket_path

_DELIMITERS = " \t\n`@#$%^&*()=+[{]}\\|;:'\",<>?"
"""As in pdb. A word may contain dots."""


Read = Callable[[], bytes]
"""Returns the next message of the process as a line, or nothing at the end."""
Send = Callable[[bytes], object]


def debug(path: Path, wait: Callback, talk: Callable[[Read, Send, Callback], str]) -> str:
    """Debug a process with `talk`, which also gets a call that interrupts the process. Return how that ended.
    Until pdb listens at `path`, call `wait`.
    """
    with socket.socket(socket.AF_UNIX) as connected:
        while True:
            try:
                with short_socket_path(path) as name:
                    connected.connect(name)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                wait()
        try:
            pid, uid, _ = peer(connected)
        except ProcessLookupError:
            return "ended"
        if uid not in (0, os.getuid()):
            return f"refused, because it belongs to another user ({uid})"
        return talk(
            connected.makefile("rb").readline, connected.sendall, partial(os.kill, pid, signal.SIGINT)
        )


def relay(read: Read, send: Send, interrupt: Callback) -> str:
    """Debug a process for a user on another node, who reads stdout and writes stdin."""

    def pass_on() -> None:
        for line in sys.stdin:
            interrupt() if line == "interrupt\n" else send(line.encode())

    Thread(target=pass_on, daemon=True).start()
    while line := read():
        print(line.decode(), end="", flush=True)  # noqa: T201
    return "ended"


def at_terminal(read: Read, send: Send, interrupt: Callback) -> str:
    """Let the user at this terminal debug a process, with completion and a history."""
    client = _Client(read, send, interrupt)
    history = Path.home() / ".fleetrun_debug_history" if sys.stdin and sys.stdin.isatty() else None
    if history is not None:
        readline.set_completer_delims(_DELIMITERS)
        readline.set_completer(client.complete)
        readline.parse_and_bind("tab: complete")
        with suppress(OSError):
            readline.read_history_file(history)
    try:
        return client.talk()
    except (ConnectionError, ProcessLookupError):
        return "ended"
    except KeyboardInterrupt:
        return "disconnected; it waits again at its next breakpoint"
    finally:
        if history is not None:
            with suppress(OSError):
                readline.write_history_file(history)


class _Client:
    _runs = False
    """True while the process executes a command that Ctrl-C can interrupt, and has not interrupted yet."""
    _words: Any = ()

    def __init__(self, read: Read, write: Send, interrupt: Callback) -> None:
        self._read = read
        self._write = write
        self._interrupt = interrupt

    def talk(self) -> str:
        prompt = ""
        while "bye" not in (message := self._next()):
            if "read" in message:
                self._send(line=_typed(prompt))
                self._runs, prompt = message["read"], ""
            else:
                lines, newline, prompt = (prompt + message["out"]).rpartition("\n")
                print(lines, end=newline, flush=True)  # noqa: T201
        return str(message["bye"])

    def _next(self) -> Any:
        try:
            line = self._read()
        except KeyboardInterrupt:
            if not self._runs:
                raise
            self._runs = False
            self._interrupt()
            return self._next()
        if not line:
            raise ConnectionError
        return json.loads(line)

    def _send(self, **message: object) -> None:
        self._write(json.dumps(message).encode() + b"\n")

    def complete(self, text: str, number: int) -> str | None:
        if number == 0:
            line, begin, end = readline.get_line_buffer(), readline.get_begidx(), readline.get_endidx()
            self._send(complete=[text, line, begin, end])
            self._words = iter(self._next().get("words", ()))
        return next(self._words, None)


def _typed(prompt: str) -> str:
    """Return a line of the user, or EOF at the end of the input."""
    while True:
        try:
            return input(prompt)
        except (EOFError, RuntimeError, KeyboardInterrupt) as end:  # a notebook may have no input
            print()  # noqa: T201
            if not isinstance(end, KeyboardInterrupt):
                return "EOF"
