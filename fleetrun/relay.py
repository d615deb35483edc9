"""Run `python -m fleetrun.relay WORDS`, the helper process with which a node answers a request.

It runs `fleetrun WORDS` and prints the output of this command as lines of JSON. Each line has one compressed
piece and needs a line `more` on stdin. If the asker reads slowly, the command waits when it prints. The
process ends when stdin ends. Other lines are the command's own stdin.
"""

from __future__ import annotations

import io
import json
import os
import select
import sys
import time
import zlib
from base64 import b64encode
from threading import Semaphore, Thread
from typing import Any

from fleetrun.cli import main as command

PIECE = 64 << 10
"""Bytes of a piece before compression. An etcd accepts values of about a megabyte."""

_SIGN_OF_LIFE = 10.0
"""Seconds until an empty piece reports that the command is still computing. It may search a long log."""

_COMPUTES = 0.01  # seconds of processor time, more than the wait for requests takes
_NICE = 10
_LAST_WORDS = 2000


def main(words: list[str]) -> None:
    """Run the command and print its output on request."""
    os.nice(_NICE)  # leaves the processors to the job
    credit = Semaphore(0)
    typed, typing = os.pipe()
    sys.stdin = open(typed)  # noqa: PTH123, SIM115
    Thread(target=_count_requests, args=(credit, typing), daemon=True).start()
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Pieces(credit), PIECE), encoding="utf-8")
    sys.stderr = errors = io.StringIO()
    code = command(words, os.environ, _launch)
    sys.stdout.flush()
    _print(code=code, error=errors.getvalue()[-_LAST_WORDS:])
    os._exit(0)


class _Pieces(io.RawIOBase):
    """The standard output of the command."""

    def __init__(self, credit: Semaphore) -> None:
        self._credit = credit

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """The descriptor that the launcher closes when nobody reads the output."""
        return 1

    def write(self, data: Any) -> int:
        """Print the beginning of the data as one piece, after a request for it. Return its length."""
        piece = bytes(data[:PIECE])
        self._credit.acquire()
        _print(data=b64encode(zlib.compress(piece, 1)).decode())
        return len(piece)


def _count_requests(credit: Semaphore, typing: int) -> None:
    """Count the requests on stdin, pass other lines on, print signs of life, and end this process when stdin
    ends.
    """
    computed, rest = time.process_time(), b""
    while True:
        if select.select([0], [], [], _SIGN_OF_LIFE)[0]:
            requests = os.read(0, 4096)
            if not requests:
                os._exit(1)
            *lines, rest = (rest + requests).split(b"\n")
            for line in lines:
                if line == b"more":
                    credit.release()
                else:
                    os.write(typing, line + b"\n")
        elif time.process_time() - computed > _COMPUTES and credit.acquire(blocking=False):
            computed = time.process_time()
            _print()


def _print(**fields: object) -> None:
    """Print a line. Only a thread that took a credit, and the last call, print."""
    os.write(1, json.dumps(fields).encode() + b"\n")


def _launch(resolved: object) -> int:
    raise AssertionError("a command for another host has launched a job")


if __name__ == "__main__":
    main(sys.argv[1:])
