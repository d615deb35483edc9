"""The embedded store over real sockets on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from fleetrun.elastic.embedded.client import ZmqStore
from fleetrun.elastic.embedded.server import StoreServer
from fleetrun.elastic.embedded.sockets import store_keys
from fleetrun.elastic.store import Ledger
from fleetrun.pod.loop import Loop
from tests.elastic.conformance import StoreConformance

SECRET = "correct horse battery"


class ZmqWorld:
    def __init__(self, loop: Loop, token: str = "", lease: float = 2.0) -> None:
        self.lease = lease
        self.keys = store_keys(token)
        self.ledger = Ledger()
        self.loop = loop
        self.server = StoreServer(
            self.ledger, loop, "127.0.0.1:0", job_id="job", lease=self.lease, keys=self.keys
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealers: list[zmq.Socket[bytes]] = []

    def hurry(self) -> None:
        """Its leases are short anyway: their clock stops while their process is suspended."""

    def client(self, name: str) -> ZmqStore:
        return ZmqStore(
            self.loop, self.server.endpoint, job_id="job", node_id=name, lease=self.lease,
            keys=self.keys, context=self.context,
        )  # fmt: skip

    def vanish(self, store: ZmqStore) -> None:
        store._stop()

    def dealer(self, *options: tuple[int, int]) -> zmq.Socket[bytes]:
        """A zmq client that sends arbitrary messages."""
        made = self.context.socket(zmq.DEALER)
        for option in options:
            made.setsockopt(*option)
        made.connect(f"tcp://{self.server.endpoint}")
        self._dealers.append(made)
        return made

    def close(self) -> None:
        self.server.close()
        for each in self._dealers:
            each.close(linger=0)
        self.context.destroy(linger=0)


class TestZmqStore(StoreConformance):
    @pytest.fixture(params=["", SECRET], ids=["open", "secret"])
    def world(self, loop: Loop, request: pytest.FixtureRequest) -> Iterator[ZmqWorld]:
        made = ZmqWorld(loop, request.param)
        yield made
        made.close()
