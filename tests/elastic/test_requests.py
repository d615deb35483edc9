"""Requests of commands to nodes, in simulated jobs: who is answered, and that no keys remain. What a node
runs for a request is in tests/e2e/test_hosts_asking.py.
"""

import json
import queue
import threading

import pytest

from fleetrun.elastic import guest
from fleetrun.elastic.guest import read_address
from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.requests import (
    MOST_ANSWERS,
    Piece,
    Request,
    Requests,
    pack_piece,
    pack_request,
    unpack_piece,
    unpack_request,
)
from fleetrun.errors import UsageError
from tests.support.simulation import BreakableStore, SimulatedJob

SECRET = "correct horse battery staple"
STOP = Request(verb="stop", options={}, by="alice on h9")


class Quiet:
    """The listener of a command that looks for itself."""

    def changed(self):
        pass

    def up(self, *, fresh):
        pass

    def down(self, why):
        pass


class Asked:
    """A job of two nodes that have met, and a command at its store. `stopped` has the commands to end."""

    def __init__(self, token="") -> None:
        self.job = SimulatedJob(fewest=2, most=2)
        self.stopped: list[tuple[str, str, bool]] = []
        self.restarted: list[tuple[str, str, str]] = []
        self.nodes = [self.add(token) for _ in range(2)]
        self.job.until(self.job.all_run())
        self.store = BreakableStore(self.job.ledger, self.job.loop, "guest-1", lease=10.0)
        self.store.open(Quiet())
        self.store.watch(records.answers_prefix("1"))

    def add(self, token):
        player = self.job.add()
        me = player.node.id

        def stop(command, now):
            self.stopped.append((me, command, now))

        def restart(name, command):
            self.restarted.append((me, name, command))
            return "" if name == "ps.0" else "it does not run"

        requests = Requests(self.job.loop, me, "abcdef", set(), token, stop, restart)
        requests.membership = player.membership
        player.membership.when_looked.append(requests.look)
        return me

    def ask(self, request=STOP, token="", name="1"):
        self.put(pack_request(name, request, token), name)

    def put(self, value, name="1"):
        self.store.put(records.request_key(name), value, leased=True)
        self.settle()

    def settle(self):
        self.job.loop.run_for(0.1)

    def pieces(self):
        """Those that are there, by node, and take them."""
        found = {}
        for key, entry in list(self.store.mirror.items()):
            found[key.rpartition("/")[2]] = unpack_piece(entry.value)
            self.store.delete(key)
        self.settle()
        return found

    def left(self):
        return [*self.job.ledger.range(records.REQUESTS_PREFIX), *self.job.ledger.range("answers/")]


def test_a_node_writes_the_next_piece_when_the_last_one_was_taken():
    asked = Asked()
    asked.ask()
    assert asked.pieces() == dict.fromkeys(asked.nodes, Piece(number=0))
    assert asked.stopped == []
    assert asked.pieces() == dict.fromkeys(asked.nodes, Piece(number=1, code=0))
    assert sorted(asked.stopped) == sorted(
        (node, "`fleetrun stop` of alice on h9", False) for node in asked.nodes
    )
    asked.store.close()
    asked.settle()
    assert asked.left() == []
    assert all("answers/" not in each for one in asked.job.players for each in one.store._mirror.prefixes)


@pytest.mark.parametrize(("name", "last"), [("ps.0", (0, "")), ("ps.7", (1, "it does not run"))])
def test_a_node_starts_a_process_again_or_says_why_not(name, last):
    asked = Asked()
    asked.ask(Request(verb="restart", options={"name": name}, nodes=(asked.nodes[1],), by="alice on h9"))
    asked.pieces()
    (piece,) = asked.pieces().values()
    assert (piece.code, piece.error) == last
    assert asked.restarted == [(asked.nodes[1], name, "`fleetrun top` of alice on h9")]


def test_only_the_nodes_that_are_meant_answer():
    asked = Asked()
    asked.ask(Request(verb="stop", options={"now": True}, nodes=(asked.nodes[1],)))
    asked.pieces()
    asked.pieces()
    assert asked.stopped == [(asked.nodes[1], "`fleetrun stop --now` on another host", True)]


def test_who_asks_for_a_stop_writes_one_line_without_effects():
    asked = Asked()
    asked.ask(Request(verb="stop", options={}, by="\x1b[2Ja\nLAUNCH ERROR\x85" + "x" * 10_000))
    asked.pieces()
    asked.pieces()
    command = asked.stopped[0][1]
    assert command.startswith("`fleetrun stop` of ?[2Ja?LAUNCH ERROR?xxx")
    assert len(command) < 200


def test_many_requests_that_are_refused_do_not_use_up_the_watches_of_a_node():
    asked = Asked()
    for number in range(100):
        asked.ask(Request(verb="nonsense", options={}), name=f"s{number}")
    for one in asked.job.players:
        prefixes = [each for each in one.store._mirror.prefixes if "answers/" in each]
        assert len(prefixes) == MOST_ANSWERS
    for number in range(100):
        asked.store.delete(records.request_key(f"s{number}"))
    asked.settle()
    asked.ask()
    assert asked.pieces().keys() >= set(asked.nodes)


def test_a_command_that_asks_again_drops_what_it_asked_before(monkeypatch):
    asked = Asked()
    made = BreakableStore(asked.job.ledger, asked.job.loop, "guest-2", lease=10.0)
    monkeypatch.setattr(guest, "open_as_guest", lambda *_: made)
    heard = queue.SimpleQueue()
    client = guest._Client(guest.Address(master="h1", job="a"), heard, threading.Event())
    client._loop.close()
    client._loop = asked.job.loop
    for prefix in (records.ROUND_KEY, records.NODES_PREFIX):
        made.watch(prefix)
    made.open(client)
    asked.settle()
    for number in range(3):
        client.ask(STOP, {asked.nodes[0]: 0}, 60.0)
        asked.job.loop.run_until(lambda: not heard.empty(), within=4.0)
        assert heard.get(timeout=0).piece == Piece(number=1, code=0), number
        asked.settle()
    assert [each for each in made._mirror.prefixes if "answers/" in each] == [
        records.answers_prefix(f"{client._name}.3")
    ]
    assert list(asked.job.ledger.range(records.REQUESTS_PREFIX)) == [records.request_key(f"{client._name}.3")]
    made.cut()
    client.ask(STOP, {asked.nodes[0]: 0}, 60.0)
    asked.job.loop.run_until(lambda: not heard.empty(), within=20.0)
    assert "cannot be reached" in heard.get(timeout=0).gone


def test_a_command_that_is_gone_leaves_nothing():
    asked = Asked()
    asked.ask()
    assert len(asked.left()) == 3
    asked.store.cut()
    asked.job.loop.run_for(30.0)
    assert asked.left() == []


@pytest.mark.parametrize(("own", "theirs"), [(SECRET, ""), (SECRET, SECRET[::-1]), ("", SECRET)])
def test_a_request_with_another_secret_is_not_answered(own, theirs):
    asked = Asked(own)
    asked.ask(token=theirs)
    assert asked.pieces() == {}
    if own:
        asked.put(pack_request("2", STOP, own))  # under another name
        assert asked.pieces() == {}
    asked.ask(token=own)
    assert asked.pieces().keys() == set(asked.nodes)


@pytest.mark.parametrize(
    "value",
    [
        b"", b"\xff", b"[]", b"3", b"{}", b'{"request": 3, "signed": ""}', b'{"request": "{}", "signed": ""}',
        b"[" * 20_000, b'{"request": "' + b"x" * 20_000 + b'", "signed": ""}',
        json.dumps({"request": json.dumps({"do": 1, "with": 2, "nodes": 3, "by": 4}), "signed": ""}).encode(),
    ],
)  # fmt: skip
def test_garbage_is_not_answered(value):
    asked = Asked()
    asked.put(value)
    asked.put(value, "x" * 100)
    assert asked.pieces() == {}


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("up", {}),
        ("logs", {"log_dir": "/etc"}),
        ("logs", {"grep": 3}),
        ("logs", {"lines": True}),
        ("logs", {"follow": "yes"}),
        ("bundle", {"output": "/etc/passwd"}),
        ("logs", {"role": "a\0b"}),
        ("logs", {"role": "a\nb"}),
        ("logs", {"grep": "\ud800"}),
    ],
)
def test_what_is_not_listed_reaches_no_command_line(verb, options):
    request = Request(verb=verb, options=options)
    with pytest.raises(ValueError, match=verb):
        request.words("abcdef", secret=True)
    asked = Asked()
    asked.ask(request)
    asked.pieces()
    assert {each.code for each in asked.pieces().values()} == {2}


def test_values_stay_values():
    request = Request(verb="logs", options={"grep": "--log_dir=/etc", "since": "-f"})
    words = ["logs", "abcdef", "--here", "--grep=--log_dir=/etc", "--since=-f"]
    assert request.words("abcdef", secret=True) == [*words, "--most_bytes", str(16 << 20)]
    assert request.words("abcdef", secret=False) == [*words, "--most_read", str(256 << 10)]


def test_without_a_secret_records_are_not_told():
    asked = Asked()
    asked.ask(Request(verb="report", options={"record": True}))
    asked.pieces()
    assert all("FLEETRUN_TOKEN" in each.error for each in asked.pieces().values())


def test_a_request_is_read_as_it_was_written():
    request = Request(verb="logs", options={"grep": "ä", "lines": 3}, nodes=("a",), by="h1")
    assert unpack_request("n", pack_request("n", request, SECRET), SECRET) == request


@pytest.mark.parametrize(
    "value", [b"", b"{}", b'{"n": "1", "code": null, "error": ""}\n', b"[]\n", b"\xff\n"]
)
def test_a_piece_that_no_node_writes(value):
    assert unpack_piece(value) is None
    assert unpack_piece(pack_piece(Piece(number=1)) + b"not compressed") is None


@pytest.mark.parametrize(
    ("text", "master", "job"),
    [
        ("h1", "h1:6768", "default"),
        ("h1:7000/night", "h1:7000", "night"),
        ("h1,h2:7000,h3/night", "h1:6768,h2:7000,h3:6768", "night"),
        ("[fe80::1]:7000/a", "[fe80::1]:7000", "a"),
        ("[fe80::1]/a", "[fe80::1]:6768", "a"),
        ("etcd://h9:2379/night?user=me", "etcd://h9:2379?user=me", "night"),
        ("etcd://a:1,b:2", "etcd://a:1,b:2", "default"),
    ],
)
def test_addresses(text, master, job):
    found = read_address(text, SECRET)
    assert (found.master, found.job, found.token) == (master, job, SECRET)


@pytest.mark.parametrize("text", ["", "/night", "http://h1/night", "h1/a/b"])
def test_no_addresses(text):
    with pytest.raises(UsageError, match="--job"):
        read_address(text, "")
