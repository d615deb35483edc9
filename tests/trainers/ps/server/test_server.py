"""A real server on a real port, in a thread; and what strangers may send there."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import zmq

from tests.support.cluster import reserved_endpoints
from tests.support.flood import EMPTY_PARTS, ENDLESS, Flood
from tests.trainers.ps.net.test_wire import mutate
from trainers.errors import ServerError
from trainers.ps.client import Client, Request
from trainers.ps.configs import PsConfigs
from trainers.ps.server.server import Server, ServerPlan
from trainers.ps.tables.rules import Adam, SparseAdam
from trainers.ps.tables.spec import RowOptions, ShrinkPolicy, TableKind, TableSpec, describe_job
from trainers.ps.wire import MAX_FRAME_BYTES, Code, Field, Kind, Message, Part, bytes_part, decode, encode

pytestmark = pytest.mark.slow

CONFIGS = PsConfigs(request_timeout_s=60)
SPECS = {
    0: TableSpec(kind=TableKind.DENSE, name="w", size=6, rule=Adam()),
    1: TableSpec(kind=TableKind.SPARSE, name="e", size=2, rule=SparseAdam()),
    2: TableSpec(
        kind=TableKind.SPARSE, name="s", size=1, rule=SparseAdam(), rows=RowOptions(statistics=True)
    ),
}
KEYS = torch.arange(10)
WANT = (Part(0, Field.WANT, torch.tensor([1])), Part(1, Field.KEYS, KEYS))


def plan(endpoint: str) -> ServerPlan:
    return ServerPlan(endpoints=[endpoint], index=0, trainers=1, sync=False, configs=CONFIGS)


class Port:
    """A served port with one trainer that has joined and pushed."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        server = Server(plan(endpoint))
        self.thread = threading.Thread(target=server.run)
        self.thread.start()
        self.client = Client([endpoint], 0, CONFIGS)
        words = bytes_part(Field.TEXT, describe_job(False, 1, 1, 0).encode())
        specs = [bytes_part(Field.SPEC, spec.encode(), number) for number, spec in SPECS.items()]
        self.ask(Kind.HELLO, words, *specs)
        self.ask(Kind.ASSIGN, Part(0, Field.VALUES, torch.ones(6)), *self.rows(torch.ones(10, 2)))
        self.ask(Kind.READY)
        self.push()

    def ask(self, kind: Kind, *parts: Part) -> Message:
        (reply,) = self.client.ask([Request(server=0, kind=kind, parts=parts)])
        return reply

    def rows(self, values: torch.Tensor) -> tuple[Part, Part]:
        return Part(1, Field.KEYS, KEYS), Part(1, Field.ROWS, values, lr=0.1)

    def push(self) -> None:
        self.ask(Kind.PUSH, Part(0, Field.VALUES, torch.randn(6), lr=0.1), *self.rows(torch.randn(10, 2)))

    def values(self) -> list[torch.Tensor]:
        return [part.data for part in self.ask(Kind.PULL, *WANT).parts]

    def close(self) -> None:
        if self.thread.is_alive():
            self.ask(Kind.LEAVE)
        self.client.close()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def port() -> Iterator[Port]:
    with reserved_endpoints(1) as (endpoint,):
        served = Port(endpoint)
        yield served
        served.close()


@pytest.fixture
def stranger(port: Port) -> Iterator[zmq.Socket[bytes]]:
    """A connection that speaks zmq, without any of our care."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVTIMEO, 100_000)
    dealer.connect(f"tcp://{port.endpoint}")
    yield dealer
    dealer.close()
    context.term()


def test_the_first_line_is_the_one_of_paddles_servers(capfd: pytest.CaptureFixture[str], port: Port) -> None:
    line = (
        r"^I\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ server\.py:\d+\] running server with rank id: 0, endpoint: "
        + re.escape(port.endpoint)
    )
    assert re.search(line, capfd.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_messages_are_refused_and_change_nothing(
    port: Port, stranger: zmq.Socket[bytes], count: int
) -> None:
    rng = random.Random(7)
    before = port.values()
    samples = [valid_frames(port, kind) for kind in Kind if kind < Kind.DONE]
    sent = 0
    while sent < count:
        batch = [mutate(rng, frames) for frames in rng.choices(samples, k=500)]
        broken = [frames for frames in batch if frames and frames not in samples]
        for frames in broken:
            stranger.send_multipart(frames)
        for _ in broken:
            assert decode(stranger.recv_multipart()).kind is Kind.REFUSED
        sent += len(broken)
    assert all(map(torch.equal, before, port.values()))
    port.push()
    assert not torch.equal(before[0], port.values()[0])


def test_a_message_without_an_end_takes_no_memory(port: Port) -> None:
    before = port.values()
    flood = Flood(port.endpoint, 4, ENDLESS, EMPTY_PARTS, 100)
    while not flood.over:
        time.sleep(0.01)
    assert flood.cut == 4
    assert flood.taken < 200 << 20, "of 13 million parts, which take 800 MiB"
    assert all(map(torch.equal, before, port.values()))


def valid_frames(port: Port, kind: Kind) -> list[bytes]:
    """What the trainer itself could send next."""
    message = Message(
        kind=kind,
        incarnation=port.client._incarnation,
        sequence=1 << 40,
        parts=(Part(0, Field.VALUES, torch.randn(6), lr=0.1), *port.rows(torch.randn(10, 2))),
    )
    return [bytes(frame) for frame in encode(message)]


def test_a_stranger_with_valid_messages_is_not_known(port: Port, stranger: zmq.Socket[bytes]) -> None:
    before = port.values()
    frames = encode(Message(kind=Kind.PUSH, incarnation=5, sequence=1, parts=(WANT[0],)))
    stranger.send_multipart(frames)
    assert decode(stranger.recv_multipart()).code is Code.UNKNOWN_CLIENT
    assert all(map(torch.equal, before, port.values()))


def test_a_frame_over_the_limit_is_not_even_read(port: Port, stranger: zmq.Socket[bytes]) -> None:
    """It costs its sender the connection; what comes on the next one is answered again."""
    stranger.send_multipart([b"", bytes(MAX_FRAME_BYTES + 1)], copy=False)
    stranger.setsockopt(zmq.RCVTIMEO, 500)
    for _ in range(100):
        stranger.send_multipart(encode(Message(kind=Kind.PULL, incarnation=5, sequence=1)))
        with contextlib.suppress(zmq.Again):  # lost with the former connection
            assert decode(stranger.recv_multipart()).code is Code.UNKNOWN_CLIENT
            break
    else:
        raise AssertionError("no answer")
    port.push()


def test_garbage_bytes_on_the_port_change_nothing(port: Port) -> None:
    rng = random.Random(11)
    host, _, number = port.endpoint.rpartition(":")
    before = port.values()
    greetings = [b"", b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03", b"GET / HTTP/1.1\r\n\r\n", b"\x01\x00"]
    for _ in range(200):
        with socket.create_connection((host, int(number))) as connection:
            connection.sendall(rng.choice(greetings) + rng.randbytes(rng.randrange(1, 200)))
    assert all(map(torch.equal, before, port.values()))


def test_a_taken_port_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        endpoint = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(ServerError, match=re.escape(f"cannot listen on {endpoint}")):
            Server(plan(endpoint))


def test_an_endpoint_without_a_host_is_named() -> None:
    with pytest.raises(ServerError, match=r"'127\.0\.0\.1:port'"):
        Server(plan("127.0.0.1:port"))


class EndsWhoSpeaks(io.StringIO):
    def write(self, text: str) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def test_it_may_be_ended_as_soon_as_it_says_that_it_runs() -> None:
    before = signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("meant for the server"))
    try:
        with reserved_endpoints(1) as (endpoint,), contextlib.redirect_stderr(EndsWhoSpeaks()) as said:
            Server(plan(endpoint)).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert f"endpoint: {endpoint}\n" in said.getvalue()


def test_a_shrink_goes_on_between_requests_and_by_itself(port: Port) -> None:
    """Of more rows than a slice has."""
    rows = 50_000
    port.ask(
        Kind.PUSH, Part(2, Field.KEYS, torch.arange(rows)), Part(2, Field.ROWS, torch.ones(rows, 1), lr=0.1)
    )
    day = Part(2, Field.VALUES, torch.from_numpy(ShrinkPolicy().numbers()))
    pull = Request(server=0, kind=Kind.PULL, parts=(Part(2, Field.PEEK, torch.arange(rows)),))
    shrunk, pulled = port.client.ask([Request(server=0, kind=Kind.SHRINK, parts=(day,)), pull])
    assert shrunk.number == rows
    assert not pulled.parts[0].data.any()
    assert port.ask(Kind.SHRINK, day).number == 0
