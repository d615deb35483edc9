"""Ports for those who bind them later."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Sequence

_turns = itertools.count(os.getpid() * 97)


def free_port(addresses: Sequence[str] = ("127.0.0.1",)) -> int:
    """Free at all these addresses, and likely to stay so: below the ports that the kernel gives to clients,
    never the same as before, and far from those of the next worker.
    """
    for turn in itertools.islice(_turns, 8000):
        port = 12_000 + turn % 8000
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for address in addresses:
                stack.enter_context(socket.socket()).bind((address, port))
            return port
    raise AssertionError("no port is free")
