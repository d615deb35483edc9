"""The socket of a launcher: what comes back, who is heard, what bad callers cost."""

import json
import os
import socket
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fleetrun.control.client import Gone, ask
from fleetrun.control.server import LONGEST, MOST, Server, may_ask
from fleetrun.files import short_socket_path
from fleetrun.pod.loop import Loop
from fleetrun.record.journal import plain
from tests.support.serving import serving
from tests.support.waiting import eventually

PATIENT = 100.0  # seconds


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller of this process may be kept waiting by a busy machine."""
    monkeypatch.setattr("fleetrun.control.server.PATIENCE", PATIENT)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The socket of a server that answers with the question."""
    place = tmp_path / "run" / "abcdef.sock"
    with serving(place, lambda question: {"asked": question}):
        yield place


def call(path: Path) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    caller.settimeout(60)
    with short_socket_path(path) as name:
        caller.connect(name)
    return caller


def spoken(path: Path, said: bytes) -> bytes:
    with call(path) as caller:
        caller.sendall(said)
        caller.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: caller.recv(1 << 16), b""))


def test_a_question_is_answered(path):
    assert ask(path, {"ask": "status", "n": 1}, 60) == {"asked": {"ask": "status", "n": 1}}


def test_one_line_and_the_connection_is_over(path):
    answer = spoken(path, b'{"ask": 1}\n{"ask": 2}\n')
    assert json.loads(answer) == {"asked": {"ask": 1}}


def test_a_question_may_come_in_pieces(path):
    with call(path) as caller:
        for byte in b'{"ask": 1}\n':
            caller.sendall(bytes([byte]))
        assert caller.recv(1 << 16) == b'{"asked": {"ask": 1}}\n'


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"status\n", "one line of JSON"),
        (b"\xff\xfe\x00\n", "one line of JSON"),
        (b"[" * 40_000 + b"\n", "one line of JSON"),
        (b"[1]\n", "a JSON object"),
        (b"\n", "one line of JSON"),
        (b"x" * (LONGEST + 1), f"at most {LONGEST} bytes"),
    ],
)
def test_nonsense_is_answered_by_an_error(path, said, error):
    assert error in json.loads(spoken(path, said))["error"]


@pytest.mark.parametrize("said", [b"", b'{"ask": "status"}'])
def test_half_a_question_gets_no_answer(path, said):
    assert spoken(path, said) == b""


def test_only_its_user_reaches_it(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("uid", "own", "answered"), [(7, 7, True), (0, 7, True), (8, 7, False), (7, 0, False)]
)
def test_nobody_else_is_answered(uid, own, answered):
    assert may_ask(uid, own) is answered


def test_who_says_nothing_keeps_nobody_waiting(path):
    silent = [call(path) for _ in range(5)]
    assert ask(path, {}, 60) == {"asked": {}}
    for each in silent:
        each.close()


def test_of_too_many_callers_the_oldest_is_sent_away(path):
    """Not the newest: callers that say nothing would hide the job."""
    silent = [call(path) for _ in range(MOST)]
    assert ask(path, {}, 60) == {"asked": {}}
    assert silent[0].recv(10) == b""
    silent[-1].sendall(b"{}\n")
    assert json.loads(silent[-1].recv(100)) == {"asked": {}}
    for each in silent:
        each.close()


def test_a_slow_caller_is_let_go(path, tmp_path):
    now = [0.0]
    loop = Loop(lambda: now[0])
    slow = Server(loop, tmp_path / "slowly.sock", lambda question: question)
    with call(slow.path) as caller:
        caller.sendall(b'{"ask"')
        turns(loop, 3)
        now[0] += PATIENT + 1
        turns(loop, 2)
        assert caller.recv(10) == b""
    slow.close()
    loop.close()


def turns(loop: Loop, count: int) -> None:
    """So many times around, whatever comes."""
    for _ in range(count):
        loop.after(0, loop.stop)
        loop.run()


def test_a_long_answer_goes_out_in_pieces(tmp_path):
    long = "x" * (8 << 20)
    with serving(tmp_path / "abcdef.sock", lambda _: {"long": long}) as server:
        assert ask(server.path, {}, 60) == {"long": long}


def test_who_does_not_read_a_long_answer_keeps_nobody_waiting(tmp_path):
    with serving(
        tmp_path / "abcdef.sock", lambda q: {"long": "x" * (8 << 20 if "big" in q else 1)}
    ) as server:
        with call(server.path) as deaf:
            deaf.sendall(b'{"big": 1}\n')
            assert ask(server.path, {}, 60) == {"long": "x"}
        assert ask(server.path, {}, 60) == {"long": "x"}


def test_a_path_may_be_longer_than_an_address(tmp_path):
    deep = tmp_path.joinpath(*["long" * 12] * 6)
    deep.mkdir(parents=True)
    with serving(deep / "abcdef.sock", lambda _: {"deep": True}) as server:
        assert len(str(server.path)) > 300
        assert ask(server.path, {}, 60) == {"deep": True}


def test_it_takes_its_socket_away_and_may_be_closed_twice(tmp_path):
    with serving(tmp_path / "abcdef.sock", lambda _: {}) as server:
        assert list(tmp_path.iterdir()) == [server.path]
    assert list(tmp_path.iterdir()) == []
    server.close()
    with pytest.raises(Gone):
        ask(server.path, {}, 60)


def test_what_is_not_its_own_stays(tmp_path):
    with serving(tmp_path / "abcdef.sock", lambda _: {}) as server:
        server.path.unlink()
        server.path.write_text("somebody else's")
    assert server.path.read_text() == "somebody else's"


def test_without_a_descriptor_it_does_not_spin_and_comes_back(tmp_path):
    now = [0.0]
    loop = Loop(lambda: now[0])
    server = Server(loop, tmp_path / "abcdef.sock", lambda question: {"fine": True})
    with call(server.path) as caller:
        caller.sendall(b"{}\n")
        with no_descriptor_left():
            turns(loop, 1)
        turns(loop, 4)  # there is one again, but it looks later
        caller.setblocking(False)
        with pytest.raises(BlockingIOError):
            caller.recv(10)
        now[0] += 2
        turns(loop, 4)
        assert caller.recv(100) == b'{"fine": true}\n'
    server.close()
    loop.close()


class no_descriptor_left:
    def __enter__(self) -> None:
        import resource

        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, self._limits[1]))

    def __exit__(self, *_: object) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


def test_numbers_that_json_does_not_have_are_words(tmp_path):
    assert plain({"a": [float("nan"), (float("-inf"), 1.5)], 3: None}) == {
        "a": ["nan", ["-inf", 1.5]],
        "3": None,
    }


def test_an_answer_may_come_later(tmp_path):
    """And only once to each; who did not wait is missed by nobody, and who has said all that he has to say is
    answered all the same.
    """
    waiting = []
    with serving(tmp_path / "run" / "abcdef.sock", lambda question: waiting.append) as server:
        callers = [call(server.path) for _ in range(3)]
        for caller in callers:
            caller.sendall(b'{"ask": 1}\n')
        callers[1].shutdown(socket.SHUT_WR)
        callers[2].close()
        eventually(lambda: len(waiting) == 3)
        for number, say in enumerate(waiting):
            server._loop.after(0.0, partial(say, {"number": number}))
        with call(server.path) as another:
            another.sendall(b"{}\n")  # wakes the loop
            found = sorted(caller.recv(1 << 16) for caller in callers[:2])
        assert len(found) == 2
        assert all(json.loads(line)["number"] in range(3) for line in found)
        for caller in callers[:2]:
            assert caller.recv(1) == b""
            caller.close()


def test_an_answer_that_comes_too_late_finds_nobody(tmp_path):
    waiting = []
    with serving(tmp_path / "run" / "abcdef.sock", lambda question: waiting.append) as server:
        with call(server.path) as caller:
            caller.sendall(b"{}\n")
            eventually(lambda: waiting)
            next(iter(server._talks))._limit.fire()
            assert caller.recv(1 << 16) == b""
        waiting[0]({"late": True})
        assert not server._talks
