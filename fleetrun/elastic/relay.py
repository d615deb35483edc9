"""Run `python -m fleetrun.elastic.relay WORDS`, the helper process with which a node answers a request of
another host.

The relay runs `fleetrun WORDS` and prints its output as lines of JSON. It prints one line, with one
compressed piece, for each line `more` on stdin. A slow reader therefore delays only the relay. The relay ends
when stdin ends.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import zlib
from base64 import b64encode
from pathlib import Path

from fleetrun.aliases import Document

PIECE = 64 << 10
"""Bytes of a piece before compression. An etcd accepts values of about a megabyte."""

_SIGN_OF_LIFE = 10.0
"""Seconds until an empty piece reports that the command is still computing. It may search a long log."""

_NICE = 10
_LAST_WORDS = 2000


def main(words: list[str]) -> None:
    """Run the command and print its output on request, until stdin ends."""
    os.nice(_NICE)  # leaves the processors to the job
    command = [sys.executable, "-P", "-m", "fleetrun", *words]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.fileno(), process.stderr.fileno()
        errors = b""
        credit = 0
        open_fds = {out, err}
        worked = 0
        while open_fds:
            wanted = [fd for fd in open_fds if fd == err or credit > 0]
            ready = select.select([0, *wanted], [], [], _SIGN_OF_LIFE)[0]
            if not ready and credit > 0 and (now := _ticks(process.pid)) > worked:
                worked = now
                credit -= 1
                _say({})
            if 0 in ready:
                asked = os.read(0, 4096)
                if not asked:
                    process.kill()
                    return
                credit += asked.count(b"\n")
            if err in ready:
                data = os.read(err, PIECE)
                errors = (errors + data)[-_LAST_WORDS:]
                open_fds -= set() if data else {err}
            if out in ready:
                data = os.read(out, PIECE)
                open_fds -= set() if data else {out}
                if data:
                    credit -= 1
                    _say({"data": b64encode(zlib.compress(data, 1)).decode()})
        _say({"code": process.wait(), "error": errors.decode(errors="replace")})


def _ticks(pid: int) -> int:
    """Return the processor time of a process, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    return int(fields[11]) + int(fields[12])


def _say(fields: Document) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
