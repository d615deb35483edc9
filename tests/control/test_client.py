"""Asking: what comes of launchers that are gone, busy, or something else."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetrun.control.client import (
    NoAnswer,
    NoLauncher,
    Question,
    Watched,
    ask,
    ask_all,
    ask_by_signal,
    control_sockets,
    guard_of,
    remove_dead_sockets,
    run_folders,
    running_launches,
    trusted,
)
from fleetrun.files import short_socket_path
from fleetrun.record.journal import Journal, journal_path
from tests.support.serving import serving, status_of
from tests.support.waiting import ended, eventually, state_of


def listening(path: Path) -> socket.socket:
    """Listens, and never answers by itself."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_socket_path(path) as name:
        server.bind(name)
    server.listen()
    return server


def test_nobody_there(tmp_path):
    with pytest.raises(NoLauncher):
        ask(tmp_path / "abcdef.sock", {}, 60)
    with pytest.raises(NoLauncher):
        ask(tmp_path / "folder" / "abcdef.sock", {}, 60)


def test_nobody_there_any_more(tmp_path):
    listening(tmp_path / "abcdef.sock").close()
    with pytest.raises(NoLauncher):
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
        assert not isinstance(silence.value, NoLauncher)


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
        with pytest.raises(NoLauncher):
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
    assert isinstance(answers[1], NoLauncher)
    assert answers[2] == {"n": 2}
    assert isinstance(answers[3], NoLauncher)


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


# ---- Waiting for launchers, and signals for those that cannot be asked. The processes are real.

# A guard by its name, which says what it got, and a launcher below it that stays.
GUARD = """
import os, signal, sys
open("/proc/self/comm", "w").write(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
read, write = os.pipe()
launcher = os.fork()
if launcher == 0:
    os.close(write)
    os.read(read, 1)  # until its guard is gone
    os._exit(0)
print(launcher, flush=True)
got = signal.sigwaitinfo({signal.SIGTERM, signal.SIGCHLD}).si_signo
os.kill(launcher, signal.SIGKILL)
print(signal.Signals(got).name, flush=True)
"""


@pytest.fixture
def guarded():
    """`guarded(name)`: the guard, and the pid of its launcher."""
    made = []

    def start(name: str = "fleetrun-guard") -> tuple[subprocess.Popen, int]:
        popen = subprocess.Popen([sys.executable, "-c", GUARD, name], stdout=subprocess.PIPE, text=True)
        made.append(popen)
        return popen, int(popen.stdout.readline())

    yield start
    for popen in made:
        popen.kill()
        popen.wait()
        popen.stdout.close()


def test_a_guard_is_known_by_its_name(guarded):
    guard, launcher = guarded()
    assert guard_of(launcher) == guard.pid
    other, below = guarded("make")
    assert guard_of(below) == 0
    os.kill(below, signal.SIGKILL)
    other.wait()


def test_what_is_not_there_has_no_guard_and_is_over():
    assert guard_of(1 << 30) == 0
    watched = Watched(1 << 30)
    assert watched.over()
    watched.wait()
    watched.close()


def test_both_have_to_be_gone(guarded):
    guard, launcher = guarded()
    watched = Watched(launcher)
    assert not watched.over()
    assert ask_by_signal(launcher, now=False)
    assert guard.stdout.readline() == "SIGTERM\n"
    watched.wait()
    guard.wait()
    assert watched.over()
    watched.close()


def test_at_once_is_the_end_of_the_launcher_and_the_guard_does_the_rest(guarded):
    guard, launcher = guarded()
    assert ask_by_signal(launcher, now=True)
    assert guard.stdout.readline() == "SIGCHLD\n"
    eventually(lambda: ended(launcher))


@pytest.mark.parametrize("now", [False, True])
def test_the_first_signal_may_be_their_end(guarded, monkeypatch, now):
    """They are gone before the second is sent, and their numbers may be those of others."""
    guard, launcher = guarded()
    watched = Watched(launcher)
    assert not watched.ending()
    sent = []

    def send(pidfd, number):
        sent.append(number)
        signal.pidfd_send_signal(pidfd, number)
        guard.wait()

    told = SimpleNamespace(**vars(signal) | {"pidfd_send_signal": send})
    monkeypatch.setattr("fleetrun.control.client.signal", told)
    assert ask_by_signal(launcher, now)
    assert sent == [signal.SIGKILL if now else signal.SIGTERM, signal.SIGCONT]
    assert watched.ending()
    watched.close()


def test_one_that_is_stopped_is_continued(guarded):
    guard, launcher = guarded()
    guard.send_signal(signal.SIGSTOP)
    eventually(lambda: state_of(guard.pid) == "T")
    assert ask_by_signal(launcher, now=False)
    assert guard.stdout.readline() == "SIGTERM\n"


def test_a_process_without_a_guard_is_left_alone(guarded):
    other, below = guarded("make")
    assert not ask_by_signal(below, now=True)
    assert not ended(below)
    os.kill(below, signal.SIGKILL)
    other.wait()


# ---- Where sockets are, whose folders are believed, and what is taken away.


def dead(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> Path:
    """As a launcher leaves it that was killed."""
    with socket.socket(socket.AF_UNIX, kind) as server, short_socket_path(path) as name:
        server.bind(name)
    return path


def test_a_folder_that_was_chosen_is_the_only_one():
    assert run_folders({"XDG_RUNTIME_DIR": "/somewhere"}) == [Path("/somewhere/fleetrun")]


@pytest.mark.parametrize("login", [True, False])
def test_a_login_and_cron_find_each_others_jobs(login):
    user = os.getuid()
    environ = {"XDG_RUNTIME_DIR": f"/run/user/{user}"} if login else {}
    found = run_folders(environ)
    assert set(found) == {Path(f"/run/user/{user}/fleetrun"), *run_folders({})[:1]}
    assert len(found) == 2


def test_only_sockets_count(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    (folder / "filexx.sock").write_text("")
    (folder / "folder.sock").mkdir()
    (folder / "linkto.sock").symlink_to("nowhere")
    os.mkfifo(folder / "fifoxx.sock")
    for name in ("bbbbbb.sock", "aaaaaa.sock", "aaaaaa.progress", ".newone.sock"):
        dead(folder / name)
    assert [path.name for path in control_sockets(folder)] == ["aaaaaa.sock", "bbbbbb.sock"]


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_write_into_is_not_believed(tmp_path, mode):
    folder = tmp_path / "run"
    folder.mkdir()
    dead(folder / "aaaaaa.sock")
    folder.chmod(0o755)
    assert trusted(folder)
    folder.chmod(mode)
    assert not trusted(folder)
    assert control_sockets(folder) == []


def test_nor_a_link_to_one_nor_one_that_is_not_there(tmp_path):
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to("real")
    assert not trusted(tmp_path / "link")
    assert control_sockets(tmp_path / "none") == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_nor_another_users(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    os.chown(folder, 12345, 12345)
    assert not trusted(folder)


def test_what_a_killed_launcher_left_is_taken_away(tmp_path):
    path = dead(tmp_path / "abcdef.sock")
    dead(tmp_path / "abcdef.progress", socket.SOCK_DGRAM)
    other = dead(tmp_path / "ghijkl.sock")
    remove_dead_sockets(path)
    assert list(tmp_path.iterdir()) == [other]


def test_what_is_in_use_stays(tmp_path):
    with serving(tmp_path / "abcdef.sock", lambda _: {}) as server:
        remove_dead_sockets(server.path)
        assert server.path.exists()


def test_the_reports_of_a_job_that_cannot_be_asked_stay(tmp_path):
    path = dead(tmp_path / "abcdef.sock")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver,
        short_socket_path(tmp_path / "abcdef.progress") as name,
    ):
        receiver.bind(name)
        remove_dead_sockets(path)
    assert [each.name for each in tmp_path.iterdir()] == ["abcdef.progress"]


def test_what_is_no_socket_stays(tmp_path):
    path = tmp_path / "abcdef.sock"
    path.write_text("precious")
    remove_dead_sockets(path)
    assert path.read_text() == "precious"


# ---- Which launches run here, those that do not answer too.

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
