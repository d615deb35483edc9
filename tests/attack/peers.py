"""Strangers at every port and socket of a job: garbage, half messages, huge lengths, slow connections, scans,
and the right protocol with a wrong key. The job ends as if nobody had called.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from random import Random

import zmq

from fleetrun.elastic.embedded import wire as store_wire
from fleetrun.envs.curve import curve_keys
from tests.attack.arena import (
    PATIENCE,
    Arena,
    Counting,
    check_clean_text,
    check_spotless,
    containers,
    launcher,
    listening,
    until_training,
)
from tests.elastic.test_embedded_hostile import NULL, OPENINGS, READY
from tests.support.command import Launch
from tests.support.ports import free_port
from trainers.ps.wire import Kind, Message, encode

TOKEN = "the right secret of this job"
OTHER = "a wrong secret of nobody here"


def garbage(random: Random) -> bytes:
    opening = random.choice([*OPENINGS.values(), NULL + READY])
    size = random.choice([0, 1, 10, 300, 5000])
    frame = bytes([random.choice([0, 1, 2, 3, 4, 6])]) + random.randbytes(8)
    return opening + random.choice([b"", frame]) + random.randbytes(size)


class Strangers:
    """What they hold open until `close`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._random = arena.random
        self._open: list[socket.socket] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealers: list[zmq.Socket[bytes]] = []

    def call(self, address: str, port: int) -> None:
        act = self._random.choice([self._scan, self._garbage, self._slow, self._protocol, self._flood])
        self._arena.note(f"{act.__name__} at {address}:{port}")
        with contextlib.suppress(OSError):
            act(address if address not in ("0.0.0.0", "::") else "127.0.0.1", port)

    def _connect(self, address: str, port: int) -> socket.socket:
        made = socket.create_connection((address, port), timeout=5)
        self._open.append(made)
        return made

    def _scan(self, address: str, port: int) -> None:
        for _ in range(50):
            socket.create_connection((address, port), timeout=5).close()

    def _garbage(self, address: str, port: int) -> None:
        for _ in range(20):
            self._connect(address, port).sendall(garbage(self._random))

    def _slow(self, address: str, port: int) -> None:
        made, data = self._connect(address, port), garbage(self._random) + b"x"
        for number in range(min(20, len(data))):
            made.sendall(data[number : number + 1])
            time.sleep(0.01)

    def _flood(self, address: str, port: int) -> None:
        """More bytes than anyone wants; whoever does not read them ends it by its buffer."""
        made = self._connect(address, port)
        made.settimeout(0.5)
        made.sendall(NULL + READY + b"\x02" + (1 << 40).to_bytes(8, "big"))
        made.sendall(bytes(8 << 20))

    def _protocol(self, address: str, port: int) -> None:
        """zmq, without a key or with a wrong one, and messages of this project's own."""
        dealer = self._context.socket(zmq.DEALER)
        self._dealers.append(dealer)
        dealer.linger = 0
        if self._random.random() < 0.5:
            server, client = self._random.choice([(b"server", b"trainer"), (b"store", b"node")])
            keys = curve_keys(OTHER, server, client)
            assert keys is not None
            dealer.curve_serverkey = keys.server.public
            dealer.curve_publickey, dealer.curve_secretkey = keys.client.public, keys.client.secret
        dealer.connect(f"tcp://{address}:{port}")
        for _ in range(20):
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart(self._message(), zmq.NOBLOCK)

    def _message(self) -> list[bytes]:
        random = self._random
        if random.random() < 0.3:
            hello = store_wire.Hello(store_wire.PROTOCOL, "0.0", "job", "stranger", "5" * 32)
            return [random.choice([store_wire.encode(hello), store_wire.encode(store_wire.Bye()), b"{", b""])]
        kind = random.choice([kind for kind in Kind if kind is not Kind.HELLO])
        made = Message(kind, random.randrange(4), random.randbytes(7)[0], random.randrange(9), 0, parts=())
        frames = [bytes(frame) for frame in encode(made)]
        if random.random() < 0.7:
            at = bytearray(frames[0])
            at[random.randrange(len(at))] ^= 1 << random.randrange(8)
            frames[0] = bytes(at)
        return frames + [random.randbytes(30) for _ in range(random.randrange(3))]

    def datagrams(self, path: str) -> None:
        self._arena.note(f"datagrams to {path}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made, contextlib.suppress(OSError):
            made.setblocking(False)
            for _ in range(50):
                made.sendto(
                    self._random.choice([b"", b"{", b'{"step": 1e999}', b"[" * 3000, os.urandom(900)]), path
                )

    def control(self, path: Path) -> None:
        self._arena.note(f"control {path.name}")
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._open.append(made)
        with contextlib.suppress(OSError):
            made.settimeout(0.5)
            made.connect(str(path))
            said = [
                b"\n",
                b"{}\n",
                b"null\n",
                b'{"ask": 1}\n',
                b"[" * 5000 + b"\n",
                os.urandom(500),
                b"x" * (1 << 20),
            ]
            made.sendall(self._random.choice(said))

    def close(self) -> None:
        for made in self._open:
            made.close()
        for dealer in self._dealers:
            dealer.close(linger=0)
        self._context.term()


def visit(arena: Arena, launch: Launch, roles: tuple[str, ...]) -> None:
    """Some calls at what listens now."""
    strangers = Strangers(arena)
    try:
        for address, port, _ in listening(launch, roles):
            for _ in range(arena.random.randrange(1, 4)):
                strangers.call(address, port)
        for path in progress_sockets(launch):
            strangers.datagrams(path)
        for path in sorted((arena.folder / "run").rglob("*")):
            if path.is_socket() and arena.random.random() < 0.8:
                strangers.control(path)
        arena.pause(1.0)
    finally:
        strangers.close()


def progress_sockets(launch: Launch) -> set[str]:
    found = set()
    for pid in containers(launch).values():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {
                word.decode().partition("=")[2] for word in words if word.startswith(b"FLEETRUN_PROGRESS=")
            }
    return found


def servers(arena: Arena) -> None:
    """Parameter servers, with and without a secret."""
    env = {"FLEETRUN_TOKEN": TOKEN} if arena.random.random() < 0.5 else {}
    job = Counting(arena, 60, words=("--max_restart", "0"), env=env, options={"pause_ms": 20})
    launch = job.start()
    until_training(arena, launch)
    while launch.popen.poll() is None and len(arena.story) < 60:
        visit(arena, launch, ("ps",))
    launch.wait(PATIENCE)
    check_spotless(launch)
    job.check(launch)


def nodes(arena: Arena) -> None:
    """The store of a job on two nodes, its sockets and its metrics."""
    env = {"FLEETRUN_TOKEN": TOKEN} if arena.random.random() < 0.5 else {}
    script = arena.fleetrun.script("tell('ready', os.getpid())\nwait_for_go()\ntell('done')")
    master = ("--nnodes", "2", "--master", f"127.0.0.1:{free_port()}", "--heartbeat_timeout", "10")
    launches = [
        arena.fleetrun.start(
            *master, "--metrics_port", str(free_port()), "--log_dir", f"log{n}", script, env=env
        )
        for n in range(2)
    ]
    if arena.random.random() < 0.5:  # while they meet
        visit(arena, launches[0], ())
    for launch in launches:
        launch.until_ready(1)
    for launch in launches:
        for pid in [launcher(launch)]:
            assert pid is not None, launch
        visit(arena, launch, ())
        launch.go()
    codes = [launch.wait(PATIENCE) for launch in launches]
    assert codes == [0, 0], launches
    for launch in launches:
        check_spotless(launch)
        check_clean_text(launch)
        assert len(launch.told(" done")) == 1, launch


ATTACKS = (nodes, servers)
