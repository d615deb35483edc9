"""Which launches run here, those that do not answer too."""

import os
import socket

import pytest

from fleetrun.control.client import running_launches
from fleetrun.files import short_socket_path
from fleetrun.record.journal import Journal, journal_path
from tests.support.serving import serving, status_of

PATIENCE = 60.0


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "fleetrun"
    made.mkdir(0o700)
    return made


@pytest.fixture
def environ(tmp_path):
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def test_nobody(environ):
    assert running_launches(environ, PATIENCE) == []


def test_the_oldest_first(folder, environ):
    young = serving(folder / "aaaaaa.sock", lambda _: status_of("young", "aaaaaa", started=20.0))
    with young, serving(folder / "bbbbbb.sock", lambda _: status_of("old", "bbbbbb", started=10.0)):
        found = running_launches(environ, PATIENCE)
    assert [each.job for each in found] == ["old", "young"]
    assert found[0].pid == os.getpid()
    assert str(found[0].record) == "/logs/old.bbbbbb.events.jsonl"
    assert found[0].silence == ""


def test_what_a_killed_one_left_is_taken_away(folder, environ):
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server,
        short_socket_path(folder / "abcdef.sock") as name,
    ):
        server.bind(name)
        server.listen()
    assert running_launches(environ, PATIENCE) == []
    assert list(folder.iterdir()) == []


def test_one_that_does_not_answer_is_known_by_its_open_record(folder, environ, tmp_path):
    journal = Journal(journal_path(tmp_path, "my.job", "abcdef"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        with short_socket_path(folder / "abcdef.sock") as name:
            server.bind(name)
        server.listen()
        (found,) = running_launches(environ, timeout=0.01)
    journal.close()
    assert (found.job, found.pod, found.pid, found.log_dir) == ("my.job", "abcdef", os.getpid(), tmp_path)
    assert found.silence == "it is busy or stopped"
    assert found.status == {}
    assert found.started is not None


@pytest.mark.parametrize(
    "answer",
    [
        {},
        status_of("job", "another"),
        {**status_of("job", "abcdef"), "job": 3},
        {**status_of("job", "abcdef"), "log_dir": None},
        {**status_of("job", "abcdef"), "pid": "1"},
        {"error": "no"},
    ],
)
def test_an_answer_that_cannot_be_is_no_answer(folder, environ, answer):
    with serving(folder / "abcdef.sock", lambda _: answer):
        (found,) = running_launches(environ, PATIENCE)
    assert found.silence
    assert found.status == {}


@pytest.mark.parametrize("odd", [{"pid": 1 << 80}, {"pid": 0}, {"job": 5}, {"pod": "zzzzzz"}])
def test_one_that_answers_nonsense_is_not_listened_to(folder, environ, odd):
    with serving(folder / "abcdef.sock", lambda _: {**status_of("x", "abcdef"), **odd}):
        (found,) = running_launches(environ, PATIENCE)
    assert (found.pod, found.silence) == ("abcdef", "its protocol version is incompatible")


def test_a_beginning_that_cannot_be_is_unknown(folder, environ):
    with serving(folder / "abcdef.sock", lambda _: {**status_of("x", "abcdef"), "started": 1e300}):
        (found,) = running_launches(environ, PATIENCE)
    assert (found.job, found.started) == ("x", None)
