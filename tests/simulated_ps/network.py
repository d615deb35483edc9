"""The sockets of zmq that servers and trainers use, between simulated processes.

A connection delivers in order. What is on its way may be lost when the connection breaks. Faults drop
messages, delay them, deliver a late copy, and break connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import zmq

from tests.simulated_ps.world import Process, World, current

Frames = list[bytes]


@dataclass
class NetworkFaults:
    """How often each fault strikes a message, and delays in seconds."""

    drop: float = 0.0
    double: float = 0.0
    breaks: float = 0.0
    delay: float = 0.001
    long_delay: float = 0.0
    """How often a message takes `100 * delay`."""


class Frame:
    def __init__(self, content: bytes, more: bool) -> None:
        self.bytes, self.more = content, more
        self.buffer = memoryview(bytearray(content))

    def get(self, option: int) -> int:
        return 0


class _Socket:
    def __init__(self, network: Network) -> None:
        task = current()
        assert task is not None
        self.network, self.process = network, task.process
        self.inbox: deque[Frames] = deque()
        self.waiters: list[Callable[[], None]] = []
        self.closed = False
        self._frames: Frames = []
        self._reading: Frames = []
        self.process.at_end.append(self.close)

    def getsockopt(self, option: int) -> int:
        return 0

    def put(self, frames: Frames) -> None:
        self.inbox.append(frames)
        self.wake()

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for each in waiters:
            each()

    @property
    def readable(self) -> bool:
        return bool(self.inbox)

    def recv(self, copy: bool = False) -> Frame:
        self.process.check()
        if not self._reading:
            self._reading = list(self.inbox.popleft())
        content = self._reading.pop(0)
        return Frame(content, bool(self._reading))

    def send(self, frame: Any, flags: int = 0, copy: bool = False) -> None:
        self.process.check()
        self._frames.append(bytes(frame))
        if not flags & zmq.SNDMORE:
            frames, self._frames = self._frames, []
            self.send_all(frames)

    def send_all(self, frames: Frames) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


class Router(_Socket):
    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.peers: dict[bytes, Connection] = {}
        self.address = ""

    def bind(self, address: str) -> None:
        assert address not in self.network.bound, f"{address} is in use"
        self.address = address
        self.network.bound[address] = self

    def send_all(self, frames: Frames) -> None:
        route, *rest = frames
        connection = self.peers.get(route)
        if connection is None:
            self._frames = []
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        connection.deliver(rest, to_server=False)

    def send(self, frame: Any, flags: int = 0, copy: bool = False) -> None:
        if not self._frames and bytes(frame) not in self.peers:  # refused at the routing id, as by libzmq
            self.process.check()
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        super().send(frame, flags, copy)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.network.bound.pop(self.address, None)
            for connection in list(self.peers.values()):
                connection.break_off()


class Dealer(_Socket):
    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.routing_id = b""
        self.unsent: deque[Frames] = deque()
        self.connection: Connection | None = None
        self._pause = 0.05

    def connect(self, address: str) -> None:
        self._address = address
        self.network.world.after(self.network.latency(), self.attempt)

    def attempt(self) -> None:
        if self.closed or self.connection is not None:
            return
        server = self.network.bound.get(self._address)
        if server is None or self.network.cut:
            self._pause = min(2.0, 2 * self._pause)
            self.network.world.after(self._pause, self.attempt)
            return
        self._pause = 0.05
        old = server.peers.get(self.routing_id)
        self.connection = Connection(self.network, self, server)
        server.peers[self.routing_id] = self.connection
        if old is not None:
            old.break_off()
        while self.unsent and self.connection is not None:
            self.connection.deliver(self.unsent.popleft(), to_server=True)

    def send_all(self, frames: Frames) -> None:
        self.process.count_down()
        if self.connection is not None:
            self.connection.deliver(frames, to_server=True)
        elif len(self.unsent) < 1000:
            self.unsent.append(frames)
        else:
            raise zmq.Again

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self.connection is not None:
                self.connection.break_off()


class Connection:
    """A TCP connection of a trainer to a server."""

    def __init__(self, network: Network, dealer: Dealer, router: Router) -> None:
        self._network, self._dealer, self._router = network, dealer, router
        self._last = {True: 0.0, False: 0.0}
        self._whole = True
        self._arrives = False
        """True if what was on its way to the server arrives after the connection broke, as from the buffers
        of a process that was killed.
        """

    def deliver(self, frames: Frames, *, to_server: bool) -> None:
        world, faults = self._network.world, self._network.faults
        if world.random.random() < faults.breaks:
            world.note(f"the connection of {self._dealer.process.name} breaks")
            self.break_off()
            return
        if world.random.random() >= faults.drop:
            self._last[to_server] = max(self._last[to_server] + 1e-9, world.now + self._network.latency())
            world.after(self._last[to_server] - world.now, lambda: self._arrive(frames, to_server))
        if world.random.random() < faults.double:  # at any time, as from a former connection
            world.after(3 * world.random.random() ** 3, lambda: self._arrive(frames, to_server))

    def _arrive(self, frames: Frames, to_server: bool) -> None:
        if not self._whole and not (to_server and self._arrives):
            return
        if to_server and not self._router.closed:
            self._router.put([self._dealer.routing_id, *frames])
        elif not to_server and not self._dealer.closed:
            self._dealer.put(frames)

    def break_off(self) -> None:
        if not self._whole:
            return
        self._whole, self._arrives = False, self._network.world.random.random() < 0.5
        if self._router.peers.get(self._dealer.routing_id) is self:
            del self._router.peers[self._dealer.routing_id]
        if self._dealer.connection is self:
            self._dealer.connection = None
            if not self._dealer.closed:
                self._network.world.after(0.05 + self._network.latency(), self._dealer.attempt)


class Wake:
    """One end of a socket pair."""

    def __init__(self, process: Process) -> None:
        self.other: Wake
        self.pending = 0
        self.waiters: list[Callable[[], None]] = []

    def setblocking(self, flag: bool) -> None:
        pass

    def fileno(self) -> Wake:
        return self

    @property
    def readable(self) -> bool:
        return bool(self.pending)

    def send(self, content: bytes) -> None:
        self.other.pending += 1
        waiters, self.other.waiters = self.other.waiters, []
        for each in waiters:
            each()

    def recv(self, most: int) -> bytes:
        count, self.pending = self.pending, 0
        return b"w" * count

    def close(self) -> None:
        pass


class Newcomers:
    """Stands for the check of strangers, who have no part in this."""

    def __init__(self, socket: Router) -> None:
        self._socket = socket
        task = current()
        assert task is not None
        self.events = Wake(task.process)

    def greets(self, frames: object) -> bool:
        return False

    def check(self) -> float:
        return 0.0

    def close(self) -> None:
        self._socket.close()


@dataclass
class Network:
    """All connections. While it is `cut`, nobody can connect."""

    world: World
    faults: NetworkFaults
    bound: dict[str, Router] = field(default_factory=dict)
    cut: bool = False

    def latency(self) -> float:
        random = self.world.random
        longer = 100 if random.random() < self.faults.long_delay else 1
        return self.faults.delay * longer * random.random()

    def break_all(self) -> None:
        for router in list(self.bound.values()):
            for connection in list(router.peers.values()):
                connection.break_off()

    def zmq(self) -> SimpleNamespace:
        network, world = self, self.world

        class Context:
            def socket(self, kind: int) -> _Socket:
                return Router(network) if kind == zmq.ROUTER else Dealer(network)

            def term(self) -> None:
                pass

        class Poller:
            def __init__(self) -> None:
                self._all: list[Any] = []

            def register(self, each: Any, flags: int = 0) -> None:
                self._all.append(each)

            def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
                until = None if timeout is None else world.now + timeout / 1000
                while True:
                    task = current()
                    assert task is not None
                    task.process.check()
                    ready = [(each, zmq.POLLIN) for each in self._all if each.readable]
                    if ready or (until is not None and world.now >= until):
                        return ready
                    waiters: list[Callable[[], None]] = []
                    for each in self._all:
                        each.waiters = [lambda waiters=waiters: [call() for call in waiters]]
                    task.process.idle = task is task.process.main
                    world.wait(waiters, None if until is None else until - world.now)
                    task.process.idle = False

        public = {name: getattr(zmq, name) for name in dir(zmq) if not name.startswith("__")}
        return SimpleNamespace(**{**public, "Context": Context, "Poller": Poller})

    def socketpair(self) -> tuple[Wake, Wake]:
        task = current()
        assert task is not None
        one, other = Wake(task.process), Wake(task.process)
        one.other, other.other = other, one
        return one, other
