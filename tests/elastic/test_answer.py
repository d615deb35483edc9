"""Requests of commands to nodes, in simulated jobs: who is answered, and that no keys remain. The output of
commands is in tests/e2e/test_hosts_asking.py and tests/test_relay.py.
"""

import json
import zlib
from base64 import b64encode

import pytest

from fleetrun.elastic import answer, ask
from fleetrun.elastic.answer import LINGER, MOST_PROCESSES, Answers
from fleetrun.elastic.ask import read_address
from fleetrun.elastic.ask_wire import (
    Piece,
    Request,
    decompressed,
    pack_piece,
    pack_request,
    unpack_piece,
    unpack_request,
)
from fleetrun.elastic.rendezvous import records
from fleetrun.errors import UsageError
from fleetrun.pod.process import Exit
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


class Helper:
    """A helper process that prints what a test says."""

    def __init__(self, loop, companions, argv, *, received, ended):
        self.argv, self.print, self.end = argv, received, ended
        self.asked = 0
        self.closed = False

    def write(self, line):
        self.asked += 1

    def close(self):
        self.closed = True


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

        Answers(
            self.job.loop, player.membership, me, "abcdef", set(), token,
            state=lambda brief, most: me.encode(), ranks=pytest.fail, stop=stop, restart=restart,
        )  # fmt: skip
        return me

    def helpers(self, monkeypatch):
        """The helper processes that start from now on."""
        made = []

        def start(*how, **more):
            made.append(Helper(*how, **more))
            return made[-1]

        monkeypatch.setattr(answer, "Companion", start)
        return made

    def end(self, name="1"):
        """End a request, as its command does."""
        self.store.delete(records.request_key(name))
        self.settle()

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


def test_a_node_writes_the_next_piece_when_the_last_one_was_taken(monkeypatch):
    asked = Asked()
    helpers = asked.helpers(monkeypatch)
    asked.ask(Request(verb="logs", options={"lines": 3}))
    assert asked.pieces() == dict.fromkeys(asked.nodes, Piece(number=0))
    words = ["logs", "abcdef", "--here", "--lines=3", "--most_read", str(256 << 10)]
    assert [each.argv[-6:] for each in helpers] == [words, words]
    assert [each.asked for each in helpers] == [1, 1]
    for each in helpers:
        each.print(b'{"data": "aGVsbG8="}')
        each.print(b"not JSON")
        each.print(b'{"code": 1, "error": "last words"}')
        each.end(Exit(0))
    asked.settle()
    assert [each.asked for each in helpers] == [1, 1]
    assert asked.pieces() == dict.fromkeys(asked.nodes, Piece(number=1, data=b"hello"))
    assert asked.pieces() == dict.fromkeys(asked.nodes, Piece(number=2, code=1, error="last words"))
    assert asked.pieces() == {}
    assert all("answers/" not in each for one in asked.job.players for each in one.store._mirror.prefixes)
    asked.store.close()
    asked.settle()
    assert asked.left() == []


def test_the_end_of_a_helper_process_ends_the_answer(monkeypatch):
    asked = Asked()
    helpers = asked.helpers(monkeypatch)
    asked.ask(Request(verb="logs", options={}, nodes=(asked.nodes[0],)))
    helpers[0].end(Exit(-9))
    asked.pieces()
    (piece,) = asked.pieces().values()
    assert (piece.code, "SIGKILL" in piece.error) == (1, True)


def test_a_request_that_ends_ends_its_helper_processes(monkeypatch):
    asked = Asked()
    helpers = asked.helpers(monkeypatch)
    asked.ask(Request(verb="logs", options={"follow": True}))
    asked.end()
    assert [each.closed for each in helpers] == [True, True]
    assert asked.left() == []


def test_a_stop_follows_when_its_command_has_all_answers():
    asked = Asked()
    asked.ask()
    assert asked.pieces() == dict.fromkeys(asked.nodes, Piece(number=0, code=0))
    assert asked.stopped == []
    asked.end()
    assert sorted(asked.stopped) == sorted(
        (node, "`fleetrun stop` of alice on h9", False) for node in asked.nodes
    )
    asked.job.loop.run_for(LINGER)
    assert len(asked.stopped) == 2, "once"


def test_a_stop_waits_for_no_silent_node():
    asked = Asked()
    asked.ask(Request(verb="stop", options={"now": True}, nodes=(asked.nodes[1], "a lost node")))
    asked.job.loop.run_for(LINGER)
    assert asked.stopped == [(asked.nodes[1], "`fleetrun stop --now` on another host", True)]


@pytest.mark.parametrize(("name", "last"), [("ps.0", (0, "")), ("ps.7", (1, "it does not run"))])
def test_a_node_starts_a_process_again_or_says_why_not(name, last):
    asked = Asked()
    asked.ask(Request(verb="restart", options={"name": name}, nodes=(asked.nodes[1],), by="alice on h9"))
    (piece,) = asked.pieces().values()
    assert (piece.code, piece.error) == last
    assert asked.restarted == [(asked.nodes[1], name, "`fleetrun top` of alice on h9")]


def test_who_asks_for_a_stop_writes_one_line_without_effects():
    asked = Asked()
    asked.ask(Request(verb="stop", options={}, by="\x1b[2Ja\nLAUNCH ERROR\x85" + "x" * 10_000))
    asked.end()
    command = asked.stopped[0][1]
    assert command.startswith("`fleetrun stop` of ?[2Ja?LAUNCH ERROR?xxx")
    assert len(command) < 200


def test_many_requests_do_not_use_up_the_watches_and_the_processes_of_a_node(monkeypatch):
    asked = Asked()
    helpers = asked.helpers(monkeypatch)
    for verb in ("nonsense", "logs"):
        for number in range(20):
            asked.ask(Request(verb=verb, options={}), name=f"{verb}{number}")
    assert len(helpers) == 2 * MOST_PROCESSES
    for one in asked.job.players:
        prefixes = [each for each in one.store._mirror.prefixes if "answers/" in each]
        assert len(prefixes) == MOST_PROCESSES
    asked.ask(Request(verb="logs", options={}))
    assert {"8 other requests" in each.error for each in asked.pieces().values()} == {True}
    asked.end("logs0")
    asked.ask(Request(verb="logs", options={}))
    assert len(helpers) == 2 * MOST_PROCESSES + 2


def guest(asked, monkeypatch, token=""):
    """The thread of a command, in the loop of the simulation, after it has met the nodes."""
    made = BreakableStore(asked.job.ledger, asked.job.loop, "guest-2", lease=10.0)
    monkeypatch.setattr(ask, "open_as_guest", lambda *_: made)
    client = ask._Client(ask.Address(master="h1", job="a", token=token))
    client._loop.close()
    client._loop = asked.job.loop
    for prefix in (records.ROUND_KEY, records.NODES_PREFIX):
        made.watch(prefix)
    made.open(client)
    asked.settle()
    assert client.met.is_set()
    return client, made


def test_a_command_that_asks_again_drops_what_it_asked_before(monkeypatch):
    asked = Asked()
    asked.helpers(monkeypatch)
    client, made = guest(asked, monkeypatch)
    logs = Request(verb="logs", options={}, nodes=(asked.nodes[0],))
    for _ in range(3):
        client.ask(logs, {asked.nodes[0]: 0}, 60.0)
        asked.settle()
    assert [each for each in made._mirror.prefixes if "answers/" in each] == [
        records.answers_prefix(f"{client._name}.3")
    ]
    assert list(asked.job.ledger.range(records.REQUESTS_PREFIX)) == [records.request_key(f"{client._name}.3")]
    made.close()
    asked.settle()
    assert asked.left() == []


def test_a_command_that_has_all_answers_leaves_no_keys(monkeypatch):
    asked = Asked(SECRET)
    client, made = guest(asked, monkeypatch, SECRET)
    client.ask(STOP, {id_: rank for rank, id_ in enumerate(asked.nodes)}, 60.0)
    asked.settle()
    found = [client.received.get(timeout=0) for _ in range(2)]
    assert sorted((each.rank, each.piece.code, each.last) for each in found) == [(0, 0, True), (1, 0, True)]
    assert asked.left() == []
    assert not [each for each in made._mirror.prefixes if "answers/" in each]
    assert len(asked.stopped) == 2


def test_a_command_gets_the_output_of_a_node(monkeypatch):
    asked = Asked()
    helpers = asked.helpers(monkeypatch)
    client, _ = guest(asked, monkeypatch)
    client.ask(Request(verb="logs", options={}, nodes=(asked.nodes[0],)), {asked.nodes[0]: 0}, 60.0)
    asked.settle()
    helpers[0].print(json.dumps({"data": b64encode(zlib.compress(b"some lines")).decode()}).encode())
    helpers[0].print(b'{"data": "bm90IGNvbXByZXNzZWQ="}')
    asked.settle()
    assert client.received.get(timeout=0).piece.data == b"some lines"
    asked.settle()
    assert client.received.empty(), "the first piece is unread"
    client.taken(0)
    asked.settle()
    assert client.received.get(timeout=0) == ask.Received(rank=0, ended=ask._DAMAGED)


def test_a_piece_that_a_node_writes_twice_is_received_once(monkeypatch):
    asked = Asked()
    asked.helpers(monkeypatch)
    client, _ = guest(asked, monkeypatch)
    client.ask(Request(verb="logs", options={}, nodes=(asked.nodes[0],)), {asked.nodes[0]: 0}, 60.0)
    asked.settle()
    key = records.answers_prefix(f"{client._name}.1") + asked.nodes[0]
    for number in (0, 1, 1, 0):
        asked.store.put(key, pack_piece(Piece(number=number)))
        asked.settle()
        client.taken(0)
        asked.settle()
        assert asked.job.ledger.get(key) is None
    assert client.received.get(timeout=0).piece.number == 1
    assert client.received.empty()


def test_a_command_names_the_reason_of_a_silence(monkeypatch):
    asked = Asked()
    client, made = guest(asked, monkeypatch)
    client.ask(STOP, {"a lost node": 5}, 60.0)
    asked.settle()
    assert client.received.get(timeout=0) == ask.Received(rank=5, ended="it has left the job")
    made.cut()
    client.ask(STOP, {asked.nodes[0]: 0}, 60.0)
    asked.job.loop.run_until(lambda: not client.received.empty(), within=20.0)
    assert "cannot be reached" in client.received.get(timeout=0).ended
    made.heal()
    for one in asked.job.players:
        one.membership.when_looked.clear()
    client.ask(STOP, {asked.nodes[0]: 0}, 60.0)
    asked.job.loop.run_until(lambda: not client.received.empty(), within=20.0)
    assert client.received.get(timeout=0).ended == "no answer within 5 s"


@pytest.mark.parametrize("verb", ["state", "logs"])
def test_a_command_that_was_killed_leaves_nothing(monkeypatch, verb):
    asked = Asked()
    asked.helpers(monkeypatch)
    asked.ask(Request(verb=verb, options={}))
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
    assert asked.left() == [records.request_key("1")]


def test_a_request_whose_answer_could_have_no_key_is_not_answered():
    asked = Asked()
    asked.ask(name="x" * 64)
    asked.ask(name="x" * 65)
    assert len(asked.left()) == 4


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
    assert {each.code for each in asked.pieces().values()} == {2}


def test_values_stay_values():
    request = Request(verb="logs", options={"grep": "--log_dir=/etc", "since": "-f"})
    words = ["logs", "abcdef", "--here", "--grep=--log_dir=/etc", "--since=-f"]
    assert request.words("abcdef", secret=True) == [*words, "--most_bytes", str(16 << 20)]
    assert request.words("abcdef", secret=False) == [*words, "--most_read", str(256 << 10)]


def test_without_a_secret_records_are_not_told():
    asked = Asked()
    asked.ask(Request(verb="report", options={"record": True}))
    assert all("FLEETRUN_TOKEN" in each.error for each in asked.pieces().values())


def test_a_request_is_read_as_it_was_written():
    request = Request(verb="logs", options={"grep": "ä", "lines": 3}, nodes=("a",), by="h1")
    assert unpack_request("n", pack_request("n", request, SECRET), SECRET) == request


@pytest.mark.parametrize(
    "value", [b"", b"{}", b'{"n": "1", "code": null, "error": ""}\n', b"[]\n", b"\xff\n"]
)
def test_a_piece_that_no_node_writes(value):
    assert unpack_piece(value) is None


def test_output_that_is_not_compressed():
    assert decompressed(b"not compressed") is None
    assert (decompressed(b""), decompressed(zlib.compress(b"a"))) == (b"", b"a")


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
