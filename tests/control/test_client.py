"""Asking: what comes of launchers that are gone, busy, or something else."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleetrun.control.client import Gone, NoAnswer, Question, ask, ask_all
from fleetrun.files import short_socket_path
from tests.support.serving import serving
from tests.support.waiting import eventually, state_of


def listening(path: Path) -> socket.socket:
    """Listens, and never answers by itself."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_socket_path(path) as name:
        server.bind(name)
    server.listen()
    return server


def test_nobody_there(tmp_path):
    with pytest.raises(Gone):
        ask(tmp_path / "abcdef.sock", {}, 60)
    with pytest.raises(Gone):
        ask(tmp_path / "folder" / "abcdef.sock", {}, 60)


def test_nobody_there_any_more(tmp_path):
    listening(tmp_path / "abcdef.sock").close()
    with pytest.raises(Gone):
        ask(tmp_path / "abcdef.sock", {}, 60)


def test_a_file_that_is_no_socket(tmp_path):
    (tmp_path / "abcdef.sock").write_text("x")
    with pytest.raises(NoAnswer):
        ask(tmp_path / "abcdef.sock", {}, 60)


def test_one_that_does_not_answer_has_a_pid(tmp_path):
    with listening(tmp_path / "abcdef.sock"):
        with pytest.raises(NoAnswer, match="busy or stopped") as silence:
            ask(tmp_path / "abcdef.sock", {}, 0.01)
        assert silence.value.pid == os.getpid()
        assert not isinstance(silence.value, Gone)


def test_one_with_a_full_backlog_is_busy(tmp_path):
    with listening(tmp_path / "abcdef.sock") as server:
        server.listen(0)
        callers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
        for each in callers:
            each.setblocking(False)
            with short_socket_path(tmp_path / "abcdef.sock") as name:
                each.connect_ex(name)
        with pytest.raises(NoAnswer):
            ask(tmp_path / "abcdef.sock", {}, 0.01)
        for each in callers:
            each.close()


@pytest.mark.parametrize("said", [b"hello\n", b"[1]\n", b"\xff\n", b"[" * 100_000 + b"\n"])
def test_another_language(tmp_path, said):
    with listening(tmp_path / "abcdef.sock") as server:
        question = asked_by_hand(tmp_path / "abcdef.sock")
        caller, _ = server.accept()
        caller.sendall(said)
        with pytest.raises(NoAnswer, match="incompatible"):
            question.answer()
        caller.close()


@pytest.mark.parametrize("said", [b"", b'{"half": '])
def test_one_that_ends_before_its_answer_is_gone(tmp_path, said):
    with listening(tmp_path / "abcdef.sock") as server:
        question = asked_by_hand(tmp_path / "abcdef.sock")
        caller, _ = server.accept()
        caller.sendall(said)
        caller.recv(1000)
        caller.close()
        with pytest.raises(Gone):
            question.answer()


def asked_by_hand(path):
    return Question(path, {"ask": "status"}, time.monotonic() + 60)


def test_an_error_is_why_there_is_no_answer(tmp_path):
    unwilling = serving(tmp_path / "abcdef.sock", lambda _: {"error": "not today"})
    with unwilling as server, pytest.raises(NoAnswer, match="not today"):
        ask(server.path, {}, 60)


@pytest.mark.parametrize("pid", [2, None, "x", 1 << 80])
def test_in_a_container_of_its_own_a_launcher_calls_processes_by_other_numbers(tmp_path, pid):
    said = {"pid": pid, "containers": [{"name": "trainer.0", "pid": 7}, 5]}
    with serving(tmp_path / "abcdef.sock", lambda _: said) as server:
        answer = ask(server.path, {}, 60)
    other = {"pid": os.getpid(), "containers": [{"name": "trainer.0", "pid": None}, 5]}
    assert answer == (other if pid == 2 else said), "what is no pid is left to who reads it"


def test_a_launcher_that_is_seen_from_here_is_believed(tmp_path):
    said = {"pid": os.getpid(), "containers": [{"name": "trainer.0", "pid": 7}]}
    with serving(tmp_path / "abcdef.sock", lambda _: said) as server:
        assert ask(server.path, {}, 60) == said


def test_several_are_asked_at_once_and_keep_their_order(tmp_path):
    names = [tmp_path / f"{pod}.sock" for pod in ("aaaaaa", "bbbbbb", "cccccc")]
    silent = listening(names[1])

    def last(_: object) -> dict[str, object]:
        silent.close()  # the silent one lasts until the one behind it has been asked
        return {"n": 2}

    with serving(names[0], lambda _: {"n": 0}), serving(names[2], last):
        answers = ask_all([*names, tmp_path / "dddddd.sock"], {}, 60)
    assert answers[0] == {"n": 0}
    assert isinstance(answers[1], Gone)
    assert answers[2] == {"n": 2}
    assert isinstance(answers[3], Gone)


def test_the_question_is_one_line(tmp_path):
    with listening(tmp_path / "abcdef.sock") as server:
        question = asked_by_hand(tmp_path / "abcdef.sock")
        caller, _ = server.accept()
        assert json.loads(caller.recv(1000)) == {"ask": "status"}
        caller.sendall(b"{}\n")
        assert question.answer() == {}
        caller.close()


def test_one_that_is_stopped_is_not_waited_for(tmp_path):
    """Nor is what it would have answered: the time is an hour."""
    code = (
        "import os, signal, socket\n"
        "server = socket.socket(socket.AF_UNIX)\n"
        "server.bind('abcdef.sock')\n"
        "server.listen()\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    try:
        eventually(lambda: state_of(child.pid) == "T")
        with pytest.raises(NoAnswer, match="stopped") as silence:
            ask(tmp_path / "abcdef.sock", {}, 3600)
        assert silence.value.pid == child.pid
    finally:
        child.kill()
        child.wait()
