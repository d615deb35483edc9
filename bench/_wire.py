"""What a process says on the wire to some endpoints: messages as zmq gets them, bytes as the kernel counts.

Bytes are those of the TCP streams, with zmq's framing and heartbeats, without TCP's own headers: from
TCP_INFO of this process's sockets (linux/tcp.h, struct tcp_info: two 64-bit counters after 8 bytes, 24 words
of 32 bits and two of 64).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

_COUNTERS = struct.Struct("=QQ")
_COUNTERS_AT = 8 + 24 * 4 + 2 * 8
Traffic = dict[str, int]


class Wire:
    """Counts from its making on."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._ports = {int(endpoint.rpartition(":")[2]) for endpoint in endpoints}
        self._sent = self._received = 0
        self._watch_zmq()
        self._before = self._bytes()

    def since(self) -> Traffic:
        sent, received = self._bytes()
        return {
            "sent_messages": self._sent,
            "received_messages": self._received,
            "sent_bytes": sent - self._before[0],
            "received_bytes": received - self._before[1],
        }

    def _watch_zmq(self) -> None:
        send, receive = zmq.Socket.send, zmq.Socket.recv

        def counting_send(this: Any, data: Any, flags: int = 0, **options: Any) -> Any:
            done = send(this, data, flags, **options)
            self._sent += this.type == zmq.DEALER and not flags & zmq.SNDMORE
            return done

        def counting_receive(this: Any, *args: Any, **options: Any) -> Any:
            frame = receive(this, *args, **options)
            self._received += this.type == zmq.DEALER and not frame.more
            return frame

        zmq.Socket.send = counting_send  # type: ignore[method-assign]
        zmq.Socket.recv = counting_receive  # type: ignore[method-assign]

    def _bytes(self) -> tuple[int, int]:
        """(sent, received) so far by all sockets connected to the endpoints."""
        sent = received = 0
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # no socket, or gone since
                duplicate = socket.socket(fileno=os.dup(int(entry.name)))
                with duplicate:
                    if duplicate.getpeername()[1] in self._ports:
                        out, into = _counters(duplicate)
                        sent, received = sent + out, received + into
        return sent, received


def _counters(connection: socket.socket) -> tuple[int, int]:
    """(bytes acknowledged by the peer, bytes received)."""
    size = _COUNTERS_AT + _COUNTERS.size
    content = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    acked, received = _COUNTERS.unpack_from(content, _COUNTERS_AT)
    return acked, received
