"""A node's part in a check before a start (--check): `python -m fleetrun.doctor.check`.

It reads one line of JSON and measures. It prints a line once it has measured the link to its partner, and
another line with all results. It imports little, because other nodes wait for it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from fleetrun.aliases import Callback, Document, Fields
from fleetrun.doctor.facts import Link
from fleetrun.doctor.links import LinkError, greeting, measure_link, open_door, serve_link

_ROUNDS, _BLOCK = 12, 8 << 20
_ENOUGH = 1.0
"""Seconds after which no further block starts."""

_COPIED = 64 << 20
_LONGEST, _TIMES = 0.05, 4
"""Seconds of sending in each direction, and the number of repetitions."""

_RETRY = 0.02
_GREETED = 0.3
"""Seconds that a visitor has to identify itself."""


class _LateError(Exception):
    """The time is up, wherever the process waits."""


def compute(rounds: int) -> float:
    """Return the seconds for a block, the fastest of several, so that a short load of the node does not
    matter. A slow processor computes fewer blocks.
    """
    data = bytes(_BLOCK)
    seconds: list[float] = []
    while len(seconds) < rounds and sum(seconds) < _ENOUGH:
        began = time.perf_counter()
        hashlib.blake2b(data)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def memory(rounds: int) -> tuple[float, str]:
    """Return the bytes/s of a copy, and an error text or an empty string."""
    source = bytearray(os.urandom(1 << 20) * (_COPIED >> 20))
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        copy = bytes(source)
        seconds.append(time.perf_counter() - began)
        if copy != source:
            return 0.0, "a copy in memory differs from what was copied"
    return _COPIED / min(seconds), ""


def gpus(count: int) -> tuple[float, str]:
    """Return the seconds for matrix products on the slowest GPU, and an error text or an empty string."""
    import torch

    slowest = 0.0
    for number in range(count):
        try:
            matrix = torch.randn(4096, 4096, device=torch.device("cuda", number))
            expected = matrix @ matrix
            began = time.perf_counter()
            # also waits for the result
            same = [bool(torch.equal(matrix @ matrix, expected)) for _ in range(10)]
            slowest = max(slowest, time.perf_counter() - began)
        except RuntimeError as error:
            return 0.0, f"GPU {number}: {str(error).splitlines()[0]}"
        if not all(same):
            return 0.0, f"GPU {number} computes differently each time"
    return slowest, ""


def way(request: Fields, seconds: float) -> tuple[float, str]:
    """Return the bytes/s of the slower direction as seen by the visitor, and an error text or an empty
    string.
    """
    met = False

    def late(number: int, frame: object) -> None:
        raise _LateError("it is too slow to be measured" if met else "no answer")

    def meet() -> None:
        nonlocal met
        met = True

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        if request["visit"] is not None:
            return _visit(tuple(request["visit"]), request["ticket"], meet), ""
        if request["serve"] is not None:
            _serve(tuple(request["serve"]), request["ticket"], meet)
    except (LinkError, _LateError) as error:
        return 0.0, str(error)
    except OSError as error:
        return 0.0, error.strerror or str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return 0.0, ""


def _visit(address: tuple[str, int], ticket: str, meet: Callback) -> float:
    while True:
        try:
            with socket.create_connection(address) as sock:
                sock.sendall(f"{ticket}\n".encode())
                if sock.recv(1) == b"!":
                    meet()
                    return fastest([measure_link(sock, longest=_LONGEST) for _ in range(_TIMES)])
        except (ConnectionRefusedError, ConnectionResetError):  # it does not listen yet
            pass
        time.sleep(_RETRY)


def fastest(found: Sequence[Link]) -> float:
    """Return the speed of the slower direction, in the best of several measurements, because a node may be
    busy during one.
    """
    return max(min(each.there, each.back) for each in found)


def _serve(address: tuple[str, int], ticket: str, meet: Callback) -> None:
    """Serve the partner. Visitors without the ticket are sent away."""
    with open_door(*address) as door:
        while True:
            sock, _ = door.accept()
            with sock:
                sock.settimeout(_GREETED)
                try:
                    greeted = greeting(sock)
                except OSError:
                    continue
                if hmac.compare_digest(greeted, ticket.encode()):
                    meet()
                    sock.settimeout(None)
                    sock.sendall(b"!")
                    for _ in range(_TIMES):
                        serve_link(sock, longest=_LONGEST)
                    return


def main() -> None:
    request = json.loads(sys.stdin.readline())
    full = request["full"]
    found: Document = {}
    began = time.perf_counter()
    found["link"], found["link_error"] = way(request, request["within"])
    found["waited"] = time.perf_counter() - began
    _report(found)
    found["compute"] = compute(_ROUNDS * (4 if full else 1))
    found["memory"], found["error"] = memory(3)
    if full and request["gpus"] and not found["error"]:
        found["gpu"], found["error"] = gpus(request["gpus"])
    _report(found)


def _report(found: Fields) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
