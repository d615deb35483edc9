"""Keep memory of processes beyond their end.

Processes hand in descriptors of shared memory (memfd_create(2)) by name. A process that starts later on this
node can request them. The bytes do not pass through the launcher. The kernel frees them when the launcher
ends, in whatever way.

A message is one packet of a SOCK_SEQPACKET socket with one JSON object, and so is the answer:

    {"keep": name} with a descriptor  ->  {}
    {"give": prefix}                  ->  {"names": [...], "more": bool} with a descriptor for each name;
                                          while there is more, the same with {"after": name}
    {"drop": name}                    ->  {}
    anything else                     ->  {"error": why}
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
from pathlib import Path

from fleetrun import files
from fleetrun.aliases import Document
from fleetrun.envs.channels import LARGEST_MEMORY_MESSAGE, MEMORY_AT_ONCE
from fleetrun.pod.loop import Loop, Timer

_MOST = 4096  # descriptors, but at most half of the launcher's limit, because it also starts processes
_LONGEST_NAME = 512
_CONNECTIONS = 256
_PAUSE = 1.0  # seconds without a descriptor for another connection


class _Refused(ValueError):
    """The request cannot be served. The text gives the reason."""


class MemoryStore:
    """The memory store of one run, over all its pods."""

    def __init__(self, loop: Loop, path: Path) -> None:
        self._loop = loop
        self._path = path
        self._listener: socket.socket | None = None
        self._pause = Timer()
        self._connections: set[socket.socket] = set()
        self._kept: dict[str, int] = {}

    def open(self) -> OSError | None:
        """Create the directory and the socket. Return the error that prevented it, or None after success."""
        try:
            self._listener = files.socket_at(self._path, socket.SOCK_SEQPACKET)
        except OSError as error:
            return error
        self._listener.listen(_CONNECTIONS)
        self._loop.add(self._listener.fileno(), self._accept)
        return None

    def renew(self) -> None:
        """Create the socket again if it was removed. The kept memory stays."""
        if self._listener is not None and not self._path.exists():
            self._end_listener(self._listener)
            self.open()

    def close(self) -> None:
        """Free all kept memory. You may call it twice."""
        if self._listener is None:
            return
        for each in list(self._connections):
            self._hang_up(each)
        self._end_listener(self._listener)
        self._listener = None
        with contextlib.suppress(OSError):
            self._path.unlink()
        for descriptor in self._kept.values():
            os.close(descriptor)
        self._kept.clear()

    def _end_listener(self, listener: socket.socket) -> None:
        self._pause.cancel()
        self._loop.remove(listener.fileno())
        listener.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has left again, or the launcher lacks a descriptor and needs a pause
            listener = self._listener.fileno()
            self._loop.remove(listener)
            self._pause = self._loop.after(_PAUSE, lambda: self._loop.add(listener, self._accept))
            return
        if files.peer(connection)[1] != os.getuid() or len(self._connections) >= _CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._loop.add(connection.fileno(), lambda: self._read(connection))

    def _hang_up(self, connection: socket.socket) -> None:
        self._loop.remove(connection.fileno())
        self._connections.discard(connection)
        connection.close()

    def _read(self, connection: socket.socket) -> None:
        given: list[int] = []
        try:
            data, given, _, _ = socket.recv_fds(
                connection, LARGEST_MEMORY_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                self._hang_up(connection)
                return
            answer, descriptors = self._answer(data, given)
            socket.send_fds(connection, [json.dumps(answer).encode()], descriptors)
        except BlockingIOError:  # there is no message, or the client does not read its answers
            if given:
                self._hang_up(connection)
        except OSError:
            self._hang_up(connection)
        finally:
            for descriptor in given:
                os.close(descriptor)

    def _answer(self, data: bytes, given: list[int]) -> tuple[Document, list[int]]:
        try:
            asked = json.loads(data)
            if "keep" in asked and given:
                self._keep(_name(asked["keep"]), given)
                return {}, []
            if "give" in asked:
                prefix, after = _name(asked["give"]), _name(asked.get("after", ""))
                names = sorted(name for name in self._kept if name.startswith(prefix) and name > after)
                now = names[:MEMORY_AT_ONCE]
                return {"names": now, "more": len(names) > len(now)}, [self._kept[name] for name in now]
            if "drop" in asked:
                self._drop(_name(asked["drop"]))
                return {}, []
            raise _Refused("not a request")
        except _Refused as error:
            return {"error": str(error)}, []
        except (ValueError, TypeError, RecursionError):
            return {"error": "not a request"}, []

    def _keep(self, name: str, given: list[int]) -> None:
        """Keep a descriptor, and take it out of `given`."""
        before = self._kept.pop(name, None)
        if before is not None:
            os.close(before)
        elif len(self._kept) >= min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2):
            raise _Refused(f"the limit of {len(self._kept)} pieces of memory is reached")
        self._kept[name] = given.pop()

    def _drop(self, name: str) -> None:
        if name in self._kept:
            os.close(self._kept.pop(name))


def _name(given: object) -> str:
    if not isinstance(given, str) or len(given) > _LONGEST_NAME:
        raise _Refused("the name must be text of at most 512 characters")
    return given
