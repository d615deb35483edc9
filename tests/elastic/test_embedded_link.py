"""Connecting to the embedded store, losing it and reconnecting: in one process, over loopback."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from fleetrun.elastic.embedded.client import ZmqStore
from fleetrun.elastic.embedded.server import StoreServer
from fleetrun.elastic.embedded.sockets import store_keys
from fleetrun.elastic.store import Entry, Ledger
from fleetrun.errors import StoreError
from fleetrun.host.network import Ports
from fleetrun.pod.loop import Loop
from tests.elastic.conformance import Answers, Recorder, run_for, steady_loop, until
from tests.elastic.proxy import Proxy
from tests.elastic.test_embedded_store import SECRET, ZmqWorld

LEASE = 2.0
PATIENT = 30.0
"""A lease that does not matter, and a grace for whom has lost its connection: a busy machine is slow."""


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = steady_loop()
    yield made
    made.close()


@pytest.fixture
def port() -> Iterator[int]:
    ports = Ports()
    yield ports.any()
    ports.close()


Joined = tuple[ZmqStore, Recorder]
Join = Callable[..., Joined]


@pytest.fixture
def join(loop: Loop) -> Iterator[Join]:
    """`store, seen = join(endpoint)`: a client that is open."""
    with ExitStack() as stack:

        def make(endpoint: str, token: str = "", job: str = "job", lease: float = LEASE) -> Joined:
            keys = store_keys(token)
            store = ZmqStore(loop, endpoint, job_id=job, node_id="a", lease=lease, keys=keys)
            stack.callback(store.close)
            seen = Recorder(store)
            store.open(seen)
            return store, seen

        yield make


@contextmanager
def serving(loop: Loop, endpoint: str, lease: float = LEASE) -> Iterator[StoreServer]:
    server = StoreServer(Ledger(), loop, endpoint, job_id="job", lease=lease)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def world(loop: Loop) -> Iterator[ZmqWorld]:
    made = ZmqWorld(loop)
    yield made
    made.close()


@pytest.fixture
def patient(loop: Loop) -> Iterator[ZmqWorld]:
    made = ZmqWorld(loop, lease=PATIENT)
    made.server._service._grace = PATIENT
    yield made
    made.close()


# ---- where it is


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", socket.gethostname()])
def test_addresses_and_names(loop: Loop, join: Join, port: int, host: str) -> None:
    with serving(loop, f"{host}:{port}") as server:
        assert server.endpoint == f"{host}:{port}"
        _, seen = join(f"{host}:{port}")
        until(loop, lambda: seen.ups)


def test_an_address_is_bound_and_no_other(loop: Loop, port: int) -> None:
    with serving(loop, f"127.0.0.1:{port}"):
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("192.0.2.1:6768", "nodes cannot join at 192.0.2.1:6768: Cannot assign requested address"),
        ("no-such-host.invalid:6768", "nodes cannot join at no-such-host.invalid:6768: "),
    ],
)
def test_where_it_cannot_listen(loop: Loop, endpoint: str, words: str) -> None:
    with pytest.raises(StoreError) as caught, serving(loop, endpoint):
        pass
    assert caught.value.message.startswith(words)
    assert caught.value.exit_code == 125


def test_a_port_that_is_taken(loop: Loop, world: ZmqWorld) -> None:
    with pytest.raises(StoreError, match="Address already in use"), serving(loop, world.server.endpoint):
        pass


@pytest.mark.slow
def test_a_name_that_does_not_resolve_is_said_and_asked_for_again(loop: Loop, join: Join) -> None:
    _, seen = join("no-such-host.invalid:6768")
    until(loop, lambda: seen.downs)
    assert seen.downs[0].startswith("no-such-host.invalid:6768: ")
    assert len(seen.downs[0]) > len("no-such-host.invalid:6768: ")
    run_for(loop, LEASE)
    assert seen.errors == []


# ---- what is there instead


def answering(listener: socket.socket, words: bytes) -> None:
    """Say this to everybody, and hang up."""
    while True:
        try:
            with listener.accept()[0] as client:
                client.sendall(words)
        except OSError:
            return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "why"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "not fleetrun"), (b"", "not fleetrun")],
    ids=["other", "hangs up"],
)
@pytest.mark.parametrize("token", ["", SECRET], ids=["open", "secret"])
def test_another_program_is_not_taken_for_a_store_with_another_secret(
    loop: Loop, join: Join, token: str, words: bytes, why: str
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=answering, args=(listener, words))
    thread.start()
    _, seen = join(f"127.0.0.1:{listener.getsockname()[1]}", token)
    until(loop, lambda: seen.downs and why in seen.downs[-1])
    run_for(loop, 2.0)
    assert seen.errors == []
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(60)


@pytest.mark.slow
def test_somebody_who_says_nothing_is_said(loop: Loop, join: Join) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _, seen = join(f"127.0.0.1:{listener.getsockname()[1]}", SECRET)
        until(
            loop,
            lambda: seen.downs and seen.downs[-1].endswith("sends nothing"),
        )
        assert seen.errors == []


# ---- coming up late, and going


@pytest.mark.slow
def test_a_store_that_starts_last_is_found(loop: Loop, join: Join, port: int) -> None:
    store, seen = join(f"127.0.0.1:{port}")
    answers = Answers()
    store.put("k", b"x", then=answers)
    until(loop, lambda: seen.downs)
    run_for(loop, 1.5)
    assert (seen.downs, answers, seen.errors) == ([f"127.0.0.1:{port}: Connection refused"], [], [])
    with serving(loop, f"127.0.0.1:{port}"):
        until(loop, lambda: answers)
    assert (answers, seen.ups) == ([True], [True])


def test_a_store_that_was_started_again_is_another(loop: Loop, join: Join, port: int) -> None:
    with serving(loop, f"127.0.0.1:{port}"):
        _, seen = join(f"127.0.0.1:{port}")
        until(loop, lambda: seen.ups)
    with serving(loop, f"127.0.0.1:{port}"):
        until(loop, lambda: seen.errors)
    assert "a new store" in seen.errors[0].message
    assert "etcd" in str(seen.errors[0].hint)
    assert seen.ups == [True]


@pytest.mark.slow
def test_a_store_that_is_gone_is_lost_after_a_second(loop: Loop, join: Join, port: int) -> None:
    endpoint = f"127.0.0.1:{port}"
    with serving(loop, endpoint, lease=30):
        _, seen = join(endpoint)
        until(loop, lambda: seen.ups)
        closed_at = loop.clock()
    until(loop, lambda: seen.errors)
    assert loop.clock() - closed_at >= 1.0
    (error,) = seen.errors
    assert endpoint in error.message
    assert "has ended" in error.message
    assert "etcd" in str(error.hint)


@pytest.mark.parametrize("job", ["job", "other"])
def test_who_belongs_to_another_job_is_refused(loop: Loop, world: ZmqWorld, join: Join, job: str) -> None:
    _, seen = join(world.server.endpoint, job=job)
    until(loop, lambda: seen.ups or seen.errors)
    if job == "job":
        assert (seen.ups, seen.errors) == ([True], [])
    else:
        expected = (
            f"the rendezvous store {world.server.endpoint} refuses this node: "
            "it belongs to job 'job', this node to job 'other'"
        )
        assert ([error.message for error in seen.errors], seen.ups) == ([expected], [])


# ---- what was underway


def test_the_outcome_of_a_write_is_unknown_when_its_connection_broke(
    loop: Loop, patient: ZmqWorld, join: Join
) -> None:
    with Proxy(patient.server.endpoint) as proxy:
        store, seen = join(proxy.endpoint)
        until(loop, lambda: seen.ups)
        answers, found = Answers(), list[Entry | None]()
        patient.ledger.put("here", b"x")
        proxy.cut()
        store.put("k", b"1", then=answers)
        store.delete("k", then=answers)
        store.read("here", found.append)
        run_for(loop, 0.1)
        assert (answers, found) == ([], [])
        proxy.reset()
        until(loop, lambda: answers == [False, False])
        store.put("k", b"2", then=answers)
        proxy.heal()
        until(loop, lambda: len(answers) == 3 and found)
        assert answers == [False, False, True]
        assert found == [Entry(b"x", 1, 1)]
        entry = patient.ledger.get("k")
        assert entry is not None
        assert entry.value == b"2"
        store.close()


def test_what_changed_while_the_connection_was_broken_is_not_missed(
    loop: Loop, patient: ZmqWorld, join: Join
) -> None:
    with Proxy(patient.server.endpoint) as proxy:
        store, seen = join(proxy.endpoint)
        store.watch("k/")
        for key in ("k/stays", "k/goes", "k/changes"):
            patient.ledger.put(key, b"1")
        until(loop, lambda: len(seen.values) == 3)
        del seen.changes[:]
        proxy.cut()
        proxy.reset()
        patient.ledger.delete("k/goes")
        patient.ledger.put("k/changes", b"2")
        patient.ledger.put("k/comes", b"2")
        run_for(loop, 0.1)
        assert seen.changes == []
        proxy.heal()
        expected = {"k/stays": b"1", "k/changes": b"2", "k/comes": b"2"}
        until(loop, lambda: seen.values == expected)
        assert seen.ups == [True, False]
        assert seen.changes == [expected], "it never saw half of it"
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_connections_all_see_the_same_in_the_end(
    loop: Loop, patient: ZmqWorld, join: Join, seed: int
) -> None:
    rng = random.Random(seed)
    with Proxy(patient.server.endpoint) as proxy:
        ledger, peers = patient.ledger, patient.server._service._peers
        clients = [join(proxy.endpoint) for _ in range(4)]
        for store, _ in clients:
            store.watch("k/")
        for number in range(300):
            key = f"k/{rng.randrange(8)}"
            store, _ = rng.choice(clients)
            if rng.random() < 0.3:
                store.delete(key)
            else:
                store.put(key, str(number).encode())
            if rng.random() < 0.05:
                proxy.reset()
            elif rng.random() < 0.05 and peers._by_address:
                peers.forget(rng.choice(list(peers._by_address.values())))
            if rng.random() < 0.3:
                run_for(loop, rng.random() * 0.02)
        answers = Answers()
        until(loop, lambda: all(store._welcome for store, _ in clients))
        for store, _ in clients:
            store.put("k/end", b"", then=answers)
        until(loop, lambda: len(answers) == len(clients))  # nothing is on its way any more
        wanted = ledger.range("k/")
        for store, seen in clients:
            until(loop, lambda store=store: store.mirror == wanted)  # type: ignore[misc]
            assert (seen.errors, True in seen.ups[1:]) == ([], False)
        for store, _ in clients:
            store.close()


@pytest.mark.slow
def test_a_connection_that_leads_nowhere_is_given_up_in_time(loop: Loop, join: Join) -> None:
    """As after a firewall has forgotten it: no error is sent, and only a new connection would get through."""
    with contextlib.closing(ZmqWorld(loop, lease=6)) as world, Proxy(world.server.endpoint) as proxy:
        store, seen = join(proxy.endpoint, lease=world.lease)
        store.put("n/a", b"", leased=True)
        until(loop, lambda: world.ledger.get("n/a") is not None)
        proxy.freeze()
        until(loop, lambda: seen.ups[1:])
        assert seen.ups == [True, False]
        run_for(loop, 0.7 * world.lease)  # what it had when the connection froze is over then
        assert world.ledger.get("n/a") == Entry(b"", 1, 1), "its lease went on"
        assert seen.errors == []
        store.close()


@pytest.mark.slow
def test_the_lease_of_the_store_counts(loop: Loop, world: ZmqWorld, join: Join) -> None:
    _, seen = join(world.server.endpoint, lease=100 * world.lease)
    until(loop, lambda: seen.ups)
    run_for(loop, 2 * world.lease)
    assert (world.server.connected, seen.ups) == (1, [True])


def test_the_host_learns_when_everybody_has_gone(loop: Loop, world: ZmqWorld, join: Join) -> None:
    told: list[str] = []
    world.server.when_idle(lambda: told.append("no client yet"))
    until(loop, lambda: told)
    first, seen = join(world.server.endpoint)
    second, seen_too = join(world.server.endpoint)
    until(loop, lambda: seen.ups and seen_too.ups)
    assert world.server.connected == 2
    world.server.when_idle(lambda: told.append("all gone"))
    first.close()
    until(loop, lambda: world.server.connected == 1)
    assert told == ["no client yet"]
    second.close()
    until(loop, lambda: len(told) == 2)
    assert told[-1] == "all gone"


@pytest.mark.slow
def test_a_large_value_for_many(loop: Loop, patient: ZmqWorld, join: Join) -> None:
    value = bytes(range(256)) * (20 << 12)  # 20 MB
    store, _ = join(patient.server.endpoint)
    answers, found = Answers(), list[Entry | None]()
    store.put("topology/1", value, then=answers)
    until(loop, lambda: answers == [True])
    readers = [join(patient.server.endpoint)[0] for _ in range(10)]
    for reader in readers:
        reader.read("topology/1", found.append)
    until(loop, lambda: len(found) == 10)
    assert all(entry is not None and entry.value == value for entry in found)
    assert len(patient.server._large) == 1, "copied once"


def test_a_context_of_many_costs_no_threads_of_its_own(loop: Loop, world: ZmqWorld) -> None:
    clients = [world.client(f"n{number}") for number in range(5)]
    before = set(threading.enumerate())
    for store in clients:
        store.open(Recorder(store))
        store.close()
    assert set(threading.enumerate()) <= before
    assert not world.context.closed
    assert isinstance(world.context, zmq.Context)
