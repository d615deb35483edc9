"""Jobs with a secret: who has it gets in, who has another or none gets nothing."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import zmq

from fleetrun.pod.events import servers_named_in
from fleetrun.pod.policy import is_symptom
from fleetrun.pod.process import Exit
from tests.support.cluster import reserved_endpoints
from tests.support.flood import HANDSHAKE, Flood
from trainers.errors import ServerError, UsageError
from trainers.ps.client import Client, Request
from trainers.ps.configs import PsConfigs
from trainers.ps.server.server import Server, ServerPlan
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.spec import TableKind, TableSpec, describe_job
from trainers.ps.transport import (
    TOKEN,
    Authenticator,
    CurveKeys,
    Newcomers,
    bind_to,
    client_socket,
    keys_of,
    server_socket,
)
from trainers.ps.wire import Field, Kind, Message, Part, bytes_part

SECRET = "correct horse battery"
SPEC = TableSpec(kind=TableKind.DENSE, name="w", size=3, rule=SGD())
SILENCE_S = 1.0


def keys(token: str | None) -> CurveKeys | None:
    return keys_of({} if token is None else {TOKEN: token})


class Guarded:
    """A server of a job with a secret, and its one trainer, which has joined."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        configs = PsConfigs(request_timeout_s=60)
        plan = ServerPlan(
            endpoints=[endpoint], index=0, trainers=1, sync=False, configs=configs, keys=keys(SECRET)
        )
        server = Server(plan)
        self.thread = threading.Thread(target=server.run)
        self.thread.start()
        self.client = Client([endpoint], 0, configs, keys=keys(SECRET))
        self.ask(Kind.HELLO, *hello())
        self.ask(Kind.ASSIGN, Part(0, Field.VALUES, torch.arange(3.0)))
        self.ask(Kind.READY)

    def ask(self, kind: Kind, *parts: Part) -> Message:
        (reply,) = self.client.ask([Request(server=0, kind=kind, parts=parts)])
        return reply

    def values(self) -> list[float]:
        (part,) = self.ask(Kind.PULL, Part(0, Field.WANT, torch.tensor([1]))).parts
        return part.data.tolist()

    def close(self) -> None:
        self.ask(Kind.LEAVE)
        self.client.close()
        self.thread.join(60)
        assert not self.thread.is_alive()


def hello() -> tuple[Part, ...]:
    words = bytes_part(Field.TEXT, describe_job(False, 1, 1, 0).encode())
    return words, bytes_part(Field.SPEC, SPEC.encode())


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    with reserved_endpoints(1) as (endpoint,):
        served = Guarded(endpoint)
        yield served
        served.close()


@pytest.mark.slow
def test_who_has_the_secret_trains(guarded: Guarded) -> None:
    assert guarded.values() == [0, 1, 2]
    guarded.ask(Kind.PUSH, Part(0, Field.VALUES, torch.ones(3), lr=1.0))
    assert guarded.values() == [-1, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("token", [None, "another secret of the same kind"])
def test_who_has_not_gets_no_word_and_changes_nothing(guarded: Guarded, token: str | None) -> None:
    stranger = Client([guarded.endpoint], 0, PsConfigs(request_timeout_s=SILENCE_S), keys=keys(token))
    stranger._incarnation = guarded.client._incarnation  # it even knows the name of the trainer
    for request in (
        Request(server=0, kind=Kind.HELLO, parts=hello()),
        Request(server=0, kind=Kind.PUSH, parts=(Part(0, Field.VALUES, torch.ones(3), lr=1.0),)),
    ):
        started = time.monotonic()
        with pytest.raises(ServerError, match=f"server 0 at {guarded.endpoint} did not answer"):
            stranger.ask([request])
        assert time.monotonic() - started >= SILENCE_S
        stranger._pending.clear()
    stranger.close()
    assert guarded.values() == [0, 1, 2]


@pytest.mark.slow
def test_a_trainer_with_a_secret_says_nothing_to_a_server_without() -> None:
    """It does not fall back to talking in the clear."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with reserved_endpoints(1) as (endpoint,):
        impostor = context.socket(zmq.ROUTER)
        impostor.setsockopt(zmq.LINGER, 0)
        impostor.bind(f"tcp://{endpoint}")
        client = Client([endpoint], 0, PsConfigs(request_timeout_s=SILENCE_S), keys=keys(SECRET))
        with pytest.raises(ServerError, match="did not answer HELLO") as found:
            client.ask([Request(server=0, kind=Kind.HELLO, parts=hello())])
        assert is_symptom(Exit(1), str(found.value)), "the launcher looks for the server that failed"
        assert servers_named_in(str(found.value)) == {0}
        assert impostor.poll(0) == 0
        client.close()
        impostor.close()
    context.term()


def test_garbage_on_a_guarded_port_changes_nothing(guarded: Guarded) -> None:
    rng = random.Random(3)
    host, _, port = guarded.endpoint.rpartition(":")
    signature = b"\xff" + b"\0" * 8 + b"\x7f"
    greetings = [
        b"",
        signature + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32,
        signature + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32,
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    for _ in range(200):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(rng.choice(greetings) + rng.randbytes(rng.randrange(1, 300)))
    assert guarded.values() == [0, 1, 2]


def test_a_handshake_of_a_stranger_takes_no_memory(guarded: Guarded) -> None:
    flood = Flood(guarded.endpoint, 6, HANDSHAKE, bytes(1 << 20), 60)
    while not flood.over:
        time.sleep(0.01)
    assert flood.cut == 6
    assert flood.taken < 150 << 20, "of 360 MiB"
    assert guarded.values() == [0, 1, 2]


def test_the_first_message_of_a_trainer_may_be_large() -> None:
    """It sends what it waits for again when its connection was lost."""
    ours = keys(SECRET)
    assert ours is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = server_socket(context, ours)
    authenticator = Authenticator(server, ours)
    with reserved_endpoints(1) as (endpoint,):
        bind_to(server, endpoint)
        client = client_socket(context, endpoint, b"trainer-0", 60, ours)
        for _ in range(5):
            client.send(bytes(20 << 20))
        assert [len(server.recv_multipart()[1]) for _ in range(5)] == [20 << 20] * 5
        client.close()
        authenticator.close()
    context.term()


def test_so_it_may_without_a_secret_and_while_the_server_is_busy() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = server_socket(context)
    newcomers = Newcomers(server)
    with reserved_endpoints(1) as (endpoint,):
        bind_to(server, endpoint)
        for number in range(10):
            client = client_socket(context, endpoint, b"trainer-0", 60)
            client.send(bytes(20 << 20))
            client.send(bytes([number]))
            sizes = []
            while len(sizes) < 3:
                newcomers.check()
                if server.poll(10):
                    time.sleep(0.02)  # the server is busy, and a check is due while a message waits
                    newcomers.check()
                    frames = server.recv_multipart(copy=False)
                    sizes.append((newcomers.greets(frames[1:]), len(frames[-1].buffer)))
            assert sizes == [(True, 0), (False, 20 << 20), (False, 1)]
            client.close()
        newcomers.close()
    context.term()


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(UsageError, match=r"FLEETRUN_TOKEN has 15 characters.*at least 16"):
        keys("x" * 15)
    assert keys("x" * 16) is not None
    assert keys_of({TOKEN: ""}) is None


def test_keys_depend_on_the_secret_and_on_the_role_and_on_nothing_else() -> None:
    one, again, other = keys(SECRET), keys(SECRET), keys(SECRET + ".")
    assert one is not None
    assert other is not None
    assert one == again
    pairs = [one.server, one.client, other.server, other.client]
    assert len({pair.public for pair in pairs} | {pair.secret for pair in pairs}) == 8
