"""The notifier `command`: runs a command of the user's in a shell, with the message on its stdin."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time

from fleetrun.aliases import Fields
from fleetrun.notifiers.base import Undelivered
from fleetrun.pod.process import signal_all, with_all_below

_TIMEOUT = 30.0  # seconds
_TEMPORARY = 75  # the exit code of sysexits.h with which a program asks to be called again

_PIECE = 1 << 16  # bytes: of a command that writes without end the last ones are kept


class Command:
    """`argument` is the command. It finds the sentence in FLEETRUN_TEXT, the event in FLEETRUN_EVENT and the
    message as JSON on its stdin.
    """

    def __init__(self, argument: str) -> None:
        self._command = argument

    def send(self, message: Fields) -> None:
        """It may run for 30 s. Any exit code but 75 is final: the message may have been delivered."""
        told = {"FLEETRUN_TEXT": str(message["sentence"]), "FLEETRUN_EVENT": str(message["event"])}
        with open(os.memfd_create("message"), "w+b") as stdin:  # noqa: PTH123 - it may read none of it
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.seek(0)
            process = subprocess.Popen(
                ("/bin/sh", "-c", self._command),
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **told},
            )  # in the group of this process: the launcher spares that when it stops what the job has left
        try:
            said = _last_words(process, time.monotonic() + _TIMEOUT)
        except subprocess.TimeoutExpired:
            signal_all(with_all_below([process.pid]), signal.SIGKILL)
            process.wait()
            raise Undelivered(f"it did not end within {_TIMEOUT:g} s", again=False) from None
        if process.returncode:
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            why = f"it ended with exit code {process.returncode}{''.join(f': {line[:200]}' for line in last)}"
            raise Undelivered(why, again=process.returncode == _TEMPORARY)


def _last_words(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """The last of what it writes to stderr, to the end of that: `mail` itself ends before what it has started
    to send with. Raises TimeoutExpired if it has not ended at the deadline.
    """
    assert process.stderr is not None
    said = b""
    with process.stderr as stderr:
        readable = select.poll()
        readable.register(stderr, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0 and readable.poll(left * 1000):
            piece = os.read(stderr.fileno(), _PIECE)
            if not piece:
                break
            said = (said + piece)[-_PIECE:]
        process.wait(max(0.0, deadline - time.monotonic()))
    return said
