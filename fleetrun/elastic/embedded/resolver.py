"""Names to addresses without keeping a loop waiting: a resolver may take 30 s over a name. Knows sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from fleetrun.pod.loop import Loop

Address: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]
"""A family and what `connect` takes."""


class Resolver:
    """Looks a host up, once at a time. `look_up` is what may take long."""

    def __init__(
        self, loop: Loop, host: str, port: int, look_up: Callable[..., Any] = socket.getaddrinfo
    ) -> None:
        self._loop = loop
        self._getaddrinfo = look_up
        self._host = host
        self._port = port
        self._told: int | None = None

    def ask(self, then: Callable[[Sequence[Address], str], None]) -> None:
        """`then(addresses, "")`, or `then((), why not)`; from the loop. An address is itself, at once."""
        if self._is_address():
            found, why = self._look_up()
            self._loop.after(0.0, lambda: then(found, why))
            return
        self.close()
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        answers: list[tuple[Sequence[Address], str]] = []

        def look_up() -> None:
            answers.append(self._look_up())
            os.close(write)  # wakes the loop, or nobody if it no longer wants to know

        def answered() -> None:
            self.close()
            then(*answers[0])

        self._told = read
        self._loop.add(read, answered)
        threading.Thread(target=look_up, name="resolver", daemon=True).start()

    def close(self) -> None:
        """Whatever comes is not told."""
        if self._told is not None:
            self._loop.remove(self._told)
            os.close(self._told)
            self._told = None

    def _is_address(self) -> bool:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(self._host)
            return True
        return False

    def _look_up(self) -> tuple[Sequence[Address], str]:
        try:
            found = self._getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            return (), str(error.strerror if isinstance(error, OSError) else error)
        return tuple(dict.fromkeys((family, tuple(address)) for family, _, _, _, address in found)), ""
