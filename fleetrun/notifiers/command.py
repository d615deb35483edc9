"""The notifier `command` runs a command of the user in a shell, with the message on its stdin."""

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
_TEMPORARY = 75  # exit code of sysexits.h with which a program requests another attempt

_PIECE = 1 << 16  # bytes; only the end of longer output is kept


class Command:
    """Runs a command. `argument` is the command.

    The command receives the sentence in FLEETRUN_TEXT, the event in FLEETRUN_EVENT and the message as JSON on
    its stdin.
    """

    def __init__(self, argument: str) -> None:
        self._command = argument

    def send(self, message: Fields) -> None:
        """Run the command for at most 30 s.

        Exit codes other than 75 are final, because the message may have been delivered.
        """
        variables = {"FLEETRUN_TEXT": str(message["sentence"]), "FLEETRUN_EVENT": str(message["event"])}
        with open(os.memfd_create("message"), "w+b") as stdin:  # noqa: PTH123 (it may read none of it)
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.seek(0)
            process = subprocess.Popen(
                ("/bin/sh", "-c", self._command),
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **variables},
                # In the group of this process, because the launcher spares it when it stops remaining
                # processes.
            )
        try:
            output = _last_words(process, time.monotonic() + _TIMEOUT)
        except subprocess.TimeoutExpired:
            signal_all(with_all_below([process.pid]), signal.SIGKILL)
            process.wait()
            raise Undelivered(f"the command did not end within {_TIMEOUT:g} s", again=False) from None
        if process.returncode:
            last = output.decode(errors="replace").strip().splitlines()[-1:]
            why = f"exit code {process.returncode}{''.join(f': {line[:200]}' for line in last)}"
            raise Undelivered(why, again=process.returncode == _TEMPORARY)


def _last_words(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Return the last output on stderr, read to its end, because `mail` exits before the program that sends.

    Raises TimeoutExpired if the command has not ended at the deadline.
    """
    assert process.stderr is not None
    output = b""
    with process.stderr as stderr:
        readable = select.poll()
        readable.register(stderr, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0 and readable.poll(left * 1000):
            piece = os.read(stderr.fileno(), _PIECE)
            if not piece:
                break
            output = (output + piece)[-_PIECE:]
        process.wait(max(0.0, deadline - time.monotonic()))
    return output
