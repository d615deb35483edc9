"""Invalid and hostile messages: the embedded store drops them and continues to serve."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import zmq

from fleetrun import __version__
from fleetrun.elastic.embedded import wire
from fleetrun.elastic.embedded.client import ZmqStore
from fleetrun.elastic.embedded.sockets import store_keys
from fleetrun.envs.curve import CurveKeys, KeyPair
from fleetrun.pod.loop import Loop
from tests.elastic.conformance import Answers, Recorder, run_for, steady_loop, until
from tests.elastic.proxy import Proxy
from tests.elastic.test_embedded_store import SECRET, ZmqWorld
from tests.support.flood import EMPTY_PARTS, ENDLESS, HANDSHAKE, Flood

Dealer = zmq.Socket[bytes]
HELLO = wire.Hello(wire.PROTOCOL, __version__, "job", "raw", "5" * 32)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = steady_loop()
    yield made
    made.close()


LEASE = 60.0
"""It does not end within a test, however slow the machine is: most clients here do not renew it."""


@pytest.fixture
def world(loop: Loop) -> Iterator[ZmqWorld]:
    made = ZmqWorld(loop, lease=LEASE)
    yield made
    made.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def guarded(loop: Loop) -> Iterator[ZmqWorld]:
    made = ZmqWorld(loop, SECRET, LEASE)
    yield made
    made.close()


def works(loop: Loop, world: ZmqWorld) -> None:
    """A node comes, writes and goes."""
    store, answers = world.client("probe"), Answers()
    store.put("probe", b"x", then=answers)
    store.open(Recorder(store))
    until(loop, lambda: answers == [True])
    store.delete("probe")
    store.close()
    until(loop, lambda: world.ledger.get("probe") is None)


def connection(world: ZmqWorld) -> socket.socket:
    host, _, port = world.server.endpoint.rpartition(":")
    return socket.create_connection((host, int(port)))


def said(loop: Loop, dealer: Dealer) -> dict[str, object]:
    until(loop, lambda: dealer.poll(0))
    answer: dict[str, object] = json.loads(dealer.recv_multipart()[0])
    return answer


def greeted(loop: Loop, world: ZmqWorld, hello: wire.Hello = HELLO) -> Dealer:
    dealer = world.dealer()
    dealer.send(wire.encode(hello))
    assert said(loop, dealer)["is"] == "welcome"
    return dealer


# ---- bytes

SIGNATURE = b"\xff" + b"\0" * 8 + b"\x7f"
NULL = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
OPENINGS = {
    "random": b"",
    "http": b"GET /state/round HTTP/1.1\r\nHost: h1\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "zmtp1": b"\x01\x00\x03\x00",
    "zmtp2": SIGNATURE + b"\x01\x05\x00\x00",
    "zmtp3": NULL,
    "curve": SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32,
    "huge": NULL + READY + b"\x02" + (2**63 - 1).to_bytes(8, "big"),
}


@pytest.mark.slow
@pytest.mark.parametrize("secret", [False, True])
def test_garbage_reaches_no_client(loop: Loop, request: pytest.FixtureRequest, secret: bool) -> None:
    world = request.getfixturevalue("guarded" if secret else "world")
    rng = random.Random(7)
    for number in range(2000):
        with connection(world) as sent:
            opening = list(OPENINGS.values())[number % len(OPENINGS)]
            sent.sendall(opening + rng.randbytes(rng.randrange(1, 300)))
        if number % 100 == 0:
            run_for(loop, 0.0)
    works(loop, world)
    assert world.server._service.wrong == 0, "none of it was taken for a message"
    assert sorted(world.ledger.range("")) == []


def test_those_who_are_turned_away_are_told_of_rarely(loop: Loop) -> None:
    with ExitStack() as stack:
        world = ZmqWorld(loop, SECRET)
        stack.callback(world.close)
        notices: list[str] = []
        world.server._notice = notices.append
        for _ in range(20):
            with connection(world) as sent:
                sent.sendall(NULL)
        until(loop, lambda: world.server.refused >= 20)
        assert len(notices) == 1
        assert world.server.endpoint in notices[0]
        assert "token" in notices[0]


def test_a_handshake_of_a_stranger_takes_no_memory(loop: Loop, guarded: ZmqWorld) -> None:
    flood = Flood(guarded.server.endpoint, 6, HANDSHAKE, bytes(1 << 20), 60)
    until(loop, lambda: flood.over)
    assert flood.cut == 6
    assert flood.taken < 150 << 20, "of 360 MiB"
    works(loop, guarded)


def test_a_message_without_end_takes_no_memory(loop: Loop, world: ZmqWorld) -> None:
    flood = Flood(world.server.endpoint, 1, ENDLESS, EMPTY_PARTS, 256)
    until(loop, lambda: flood.over)
    assert flood.cut == 1
    assert flood.taken < 100 << 20, "of 8 million parts, which take 512 MiB"
    works(loop, world)


@pytest.mark.slow
def test_a_thousand_silent_connections_change_nothing_and_end(loop: Loop, world: ZmqWorld) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path has its own descriptor
    with ExitStack() as stack:
        silent = [stack.enter_context(connection(world)) for _ in range(1000)]
        works(loop, world)
        works(loop, world)
        for each in silent:
            each.settimeout(60)
            while each.recv(100):  # its greeting; then it hangs up
                pass
    works(loop, world)
    until(loop, lambda: len(os.listdir("/proc/self/fd")) <= before + 5)  # noqa: PTH208


# ---- messages

REQUESTS = [
    wire.Put(1, "k", None, False), wire.Delete(1, "k", None), wire.Clear(1, ""), wire.Read(1, "k"),
    wire.Watch(1, ""), wire.Unwatch(""), wire.Alive(0), wire.Bye(),
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__.lower())
def test_who_has_not_greeted_is_a_stranger(loop: Loop, world: ZmqWorld, request_: object) -> None:
    world.ledger.put("k", b"before")
    dealer = world.dealer()
    body = [b"x"] if isinstance(request_, wire.Put) else []
    dealer.send_multipart([wire.encode(request_), *body])
    assert said(loop, dealer) == {"is": "stranger"}
    assert {key: entry.value for key, entry in world.ledger.range("").items()} == {"k": b"before"}
    assert world.ledger.revision == 1


DEEP = b"[" * 5000
OFF_SCHEMA = [
    [b""], [b"\xff\xfe"], [b"null"], [b"[]"], [b"{}"], [DEEP], [b"1e999"], [b"9" * 5000],
    [b'{"is":[]}'], [b'{"is":"drop"}'], [b'{"is":"welcome"}'], [b'{"is":"put"}'], [b'{"is":"bye","x":1}'],
    [b'{"is":"put","n":1,"key":"k","expect":null,"leased":false}'],
    [b'{"is":"put","n":1,"key":"k","expect":null,"leased":false}', b"x", b"y"],
    [b'{"is":"put","n":-1,"key":"k","expect":null,"leased":false}', b"x"],
    [b'{"is":"put","n":1.5,"key":"k","expect":null,"leased":false}', b"x"],
    [b'{"is":"put","n":true,"key":"k","expect":null,"leased":false}', b"x"],
    [b'{"is":"put","n":1,"key":7,"expect":null,"leased":false}', b"x"],
    [b'{"is":"put","n":1,"key":"\\ud800","expect":null,"leased":false}', b"x"],
    [b'{"is":"put","n":1,"key":"a\\u0000b","expect":null,"leased":false}', b"x"],
    [b'{"is":"put","n":1,"key":"' + b"k" * 2000 + b'","expect":null,"leased":false}', b"x"],
    [b'{"is":"put","n":1,"key":"k","expect":"1","leased":false}', b"x"],
    [b'{"is":"put","n":1,"key":"k","expect":null,"leased":0}', b"x"],
    [b'{"is":"put","n":1e400,"key":"k","expect":null,"leased":false}', b"x"],
    [b'{"is":"put","n":' + b"9" * 30 + b',"key":"k","expect":null,"leased":false}', b"x"],
    [b'{"is":"alive","got":"' + b"x" * 10_000 + b'"}'],
    [b'{"is":"watch","n":1,"prefix":null}'], [b'{"is":"bye"}', b"x"],
]  # fmt: skip


@pytest.mark.parametrize("frames", OFF_SCHEMA, ids=range(len(OFF_SCHEMA)))
def test_what_is_no_message_is_answered_once_and_changes_nothing(
    loop: Loop, world: ZmqWorld, frames: list[bytes]
) -> None:
    dealer = greeted(loop, world)
    for _ in range(2):
        dealer.send_multipart(frames)
    assert said(loop, dealer)["is"] == "wrong"
    dealer.send(wire.encode(wire.Alive(0)))
    assert said(loop, dealer)["is"] == "stranger"
    assert world.ledger.revision == 0


@pytest.mark.slow
def test_random_messages(loop: Loop, world: ZmqWorld) -> None:
    """Of right and wrong pieces: never a traceback, and nothing leaves the schema."""
    rng = random.Random(11)
    pieces: list[object] = [
        None,
        True,
        -1,
        0,
        1,
        2**70,
        1.5,
        "",
        "k",
        "a/",
        "\ud800",
        [],
        {},
        ["k", 1, 1, 1],
        "job",
    ]
    fields = sorted({field for kind in wire.REQUESTS.values() for field in kind._fields} - {"protocol"})
    for _ in range(40):
        dealer = greeted(loop, world)
        for _ in range(50):
            name = rng.choice([*wire.REQUESTS, *wire.ANSWERS])
            kind = wire.REQUESTS.get(name)
            names = kind._fields if kind and rng.random() < 0.8 else rng.sample(fields, rng.randrange(4))
            message = {"is": name, **{field: rng.choice(pieces) for field in names}}
            body = [rng.randbytes(3) for _ in range(rng.randrange(3))]
            dealer.send_multipart([json.dumps(message).encode(), *body])
        run_for(loop, 0.001)
        dealer.close()
    works(loop, world)
    for key, entry in world.ledger.range("").items():
        assert key in ("", "k", "a/", "job")
        assert len(entry.value) == 3


def test_one_connection_has_one_lease(loop: Loop, world: ZmqWorld) -> None:
    dealer = greeted(loop, world)
    for number in range(50):
        dealer.send(wire.encode(HELLO._replace(session=f"{number:032}")))
        assert said(loop, dealer)["is"] == "welcome"
    assert world.server.connected == 1


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (HELLO._replace(job="other"), "it belongs to job 'job', this node to job 'other'"),
        (HELLO._replace(job="other", node="guest-1"), "the job there is 'job'; use --job HOST:PORT/job"),
        (HELLO._replace(version="9.9"), f"it runs fleetrun {__version__}, this node 9.9"),
        (HELLO._replace(protocol=99), f"it uses protocol {wire.PROTOCOL}, this node 99"),
    ],
    ids=["job", "job of a command", "version", "protocol"],
)
def test_a_greeting_that_does_not_fit_is_refused_with_both_values(
    loop: Loop, world: ZmqWorld, hello: wire.Hello, words: str
) -> None:
    dealer = world.dealer()
    dealer.send(wire.encode(hello))
    assert said(loop, dealer) == {"is": "refused", "text": words}
    assert world.server.connected == 0


def test_a_protocol_of_tomorrow_is_refused_however_it_looks(loop: Loop, world: ZmqWorld) -> None:
    dealer = world.dealer()
    dealer.send(b'{"is":"hello","protocol":99,"planet":"mars"}')
    assert "protocol 1, this node 99" in str(said(loop, dealer)["text"])


# ---- clients that do not read


@pytest.mark.slow
def test_who_does_not_read_is_dropped_and_others_are_served(loop: Loop, stack: ExitStack) -> None:
    world = ZmqWorld(loop, lease=6.0)
    stack.callback(world.close)
    dealer = world.dealer((zmq.RCVHWM, 1), (zmq.RCVBUF, 1))
    dealer.send(wire.encode(HELLO))
    dealer.send(wire.encode(wire.Watch(1, "big/")))
    store = world.client("reader")
    seen = Recorder(store)
    store.watch("big/")
    store.open(seen)
    until(loop, lambda: world.server.connected == 2 and seen.ups)
    peers = world.server._service._peers._by_address
    before = rss()
    for number in range(3000):
        world.ledger.put("big/value", str(number).encode() * 20_000)
        run_for(loop, 0.0)
        if len(peers) == 1:
            break
    assert len(peers) == 1, "the slow one has no session's connection any more"
    assert rss() - before < 200 << 20
    until(loop, lambda: seen.values.get("big/value", b"").startswith(str(number).encode()))
    until(loop, lambda: world.server.connected == 1)  # its lease has ended too
    store.close()


def rss() -> int:
    with open("/proc/self/statm") as statm:  # noqa: PTH123 - short
        return int(statm.read().split()[1]) * 4096


@pytest.mark.slow
def test_a_client_that_was_dropped_begins_anew(loop: Loop, stack: ExitStack) -> None:
    world = ZmqWorld(loop, lease=4.0)
    stack.callback(world.close)
    store = world.client("a")
    seen = Recorder(store)
    store.watch("k/")
    store.open(seen)
    until(loop, lambda: seen.ups)
    peers = world.server._service._peers
    peers.forget(next(iter(peers._by_address.values())))
    world.ledger.put("k/1", b"missed")
    until(loop, lambda: seen.values == {"k/1": b"missed"})
    assert seen.ups == [True, False]
    store.close()


# ---- the secret


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "mine", "words"),
    [
        ("", SECRET, "has a token, and the rendezvous store has another token or none"),
        (SECRET, "", "has no token, and the rendezvous store has one"),
        (
            SECRET,
            "another secret of the same kind",
            "has a token, and the rendezvous store has another token or none",
        ),
    ],
    ids=["superfluous", "missing", "wrong"],
)
def test_another_secret_is_told_as_such(
    loop: Loop, stack: ExitStack, theirs: str, mine: str, words: str
) -> None:
    world = ZmqWorld(loop, theirs)
    stack.callback(world.close)
    world.keys = store_keys(mine)
    store = world.client("a")
    seen = Recorder(store)
    store.put("k", b"x")
    store.open(seen)
    until(loop, lambda: seen.errors)
    (error,) = seen.errors
    assert words in error.message
    assert world.server.endpoint in error.message
    assert "FLEETRUN_TOKEN" in str(error.hint)
    assert "--token_file" in str(error.hint)
    assert error.exit_code == 125
    assert (mine or theirs) not in f"{error.message}{error.hint}"
    run_for(loop, 0.05)
    assert (len(seen.errors), seen.ups, world.ledger.revision) == (1, [], 0)


@pytest.mark.parametrize(
    ("name", "words"), [("a", "their tokens differ"), ("guest-1", "rejects this command: the token differs")]
)
def test_only_the_nodes_own_key_gets_in(loop: Loop, guarded: ZmqWorld, name: str, words: str) -> None:
    """A client with the store's public key, but without the secret."""
    assert guarded.keys is not None
    forged = CurveKeys(guarded.keys.server, KeyPair(*zmq.curve_keypair()))
    store = ZmqStore(
        loop, guarded.server.endpoint, job_id="job", node_id=name, lease=guarded.lease, keys=forged,
        context=guarded.context,
    )  # fmt: skip
    seen = Recorder(store)
    store.put("k", b"x")
    store.open(seen)
    until(loop, lambda: seen.errors)
    assert words in seen.errors[0].message
    assert (seen.ups, guarded.ledger.revision, guarded.server.connected) == ([], 0, 0)


def test_recorded_bytes_are_of_no_use(loop: Loop, guarded: ZmqWorld) -> None:
    with Proxy(guarded.server.endpoint) as proxy:
        store = ZmqStore(
            loop, proxy.endpoint, job_id="job", node_id="a", lease=guarded.lease, keys=guarded.keys,
            context=guarded.context,
        )  # fmt: skip
        answers = Answers()
        store.put("k", b"secret plans", then=answers)
        store.open(Recorder(store))
        until(loop, lambda: answers)
        store.close()
        until(loop, lambda: guarded.server.connected == 0)
        recorded = [bytes(each) for each in proxy.heard]
    assert sum(map(len, recorded)) > 500
    assert not any(b"secret plans" in each or b"nodes" in each for each in recorded)
    revision = guarded.ledger.revision
    for each in recorded:
        with connection(guarded) as sent:
            sent.sendall(each)
            run_for(loop, 0.05)
    works(loop, guarded)
    assert guarded.ledger.revision == revision + 2, "only what works() has written"


# ---- many


@pytest.mark.slow
def test_a_thousand_clients_know_of_a_change(loop: Loop, world: ZmqWorld) -> None:
    world.context.set(zmq.MAX_SOCKETS, 10_000)
    clients = [world.client(f"n{number}") for number in range(1000)]
    recorders = [Recorder(store) for store in clients]
    for store, seen in zip(clients, recorders, strict=True):
        store.watch("state/")
        store.open(seen)
    until(loop, lambda: all(seen.ups for seen in recorders))
    world.ledger.put("state/round", b"1")
    until(loop, lambda: all(seen.values == {"state/round": b"1"} for seen in recorders))
    assert all(seen.ups == [True] for seen in recorders)
    for store in clients:
        store.close()
    until(loop, lambda: world.server.connected == 0)
