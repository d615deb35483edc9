"""Answers libzmq's question whether a node's public key is the job's (rfc.zeromq.org/spec/27), in our own
loop.
"""

from __future__ import annotations

import hmac

import zmq
from zmq.utils import z85

from fleetrun.elastic.embedded.keys import StoreKeys
from fleetrun.elastic.embedded.sockets import DOMAIN, Context, Frames, Watched
from fleetrun.pod.loop import Loop

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Gate:
    """Stands before all sockets of one context. Must be there before they are bound."""

    def __init__(self, loop: Loop, context: Context, keys: StoreKeys) -> None:
        self._allowed = z85.decode(keys.node.public)
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ADDRESS)
        self._watched = Watched(loop, socket, self._answer)

    def close(self) -> None:
        self._watched.close()

    def _answer(self, frames: Frames) -> None:
        asked = [frame.bytes for frame in frames]
        start = asked.index(b"") + 1
        version, number, domain, _, _, mechanism, *credentials = asked[start:]
        welcome = (
            version == _VERSION
            and domain == DOMAIN
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and hmac.compare_digest(credentials[0], self._allowed)
        )
        verdict = [_VERSION, number, b"200" if welcome else b"400", b"", b"", b""]
        self._watched.socket.send_multipart([*asked[:start], *verdict])
        self._watched.look_again()
