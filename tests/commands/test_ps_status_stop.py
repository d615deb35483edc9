"""ps, status and stop, with launchers that are only sockets."""

import json
import os
import re
import subprocess
import sys

import pytest

from fleetrun.commands import status as status_verb
from fleetrun.commands.find import NoJobError
from fleetrun.errors import LaunchError, UsageError
from fleetrun.verbs import answer
from tests.support.serving import serving, status_of
from tests.support.waiting import eventually, state_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run" / "fleetrun"


@pytest.fixture
def job(folder):
    """One job of two processes, of which one failed."""
    trainers = [
        {
            "name": "trainer.0", "role": "trainer", "rank": 0, "index": 0, "state": "running",
            "alive": True, "pid": os.getpid(), "attempt": 1, "started": 1000.0, "log": "/logs/0",
            "gpus": "", "exit": None, "step": 12, "samples": 24, "loss": float("nan"), "rate": 7.5,
            "activity": None,
        },
        {
            "name": "trainer.1", "role": "trainer", "rank": 1, "index": 1, "state": "failed", "alive": False,
            "pid": None, "attempt": 0, "started": 1000.0, "log": "/logs/1", "gpus": "", "exit": -9,
            "step": None, "samples": None, "loss": None, "rate": None, "activity": None,
        },
    ]  # fmt: skip
    status = status_of("default", "abcdef", containers=trainers, restarts=1)
    with serving(folder / "abcdef.sock", lambda _: status):
        yield


@pytest.fixture
def stopped(folder):
    """A launcher that Ctrl-Z has stopped: its pid."""
    folder.mkdir(0o700, parents=True)
    code = (
        "import os, signal, socket\n"
        "server = socket.socket(socket.AF_UNIX)\n"
        "server.bind('ghijkl.sock')\n"
        "server.listen()\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
    eventually(lambda: state_of(child.pid) == "T")
    yield child.pid
    child.kill()
    child.wait()


def test_ps(job, capsys):
    assert answer("ps", []) == 0
    title, row = capsys.readouterr().out.splitlines()
    assert title.split() == [
        "JOB",
        "POD",
        "MODE",
        "STATE",
        "PROCS",
        "TIME",
        "RESTARTS",
        "STEP",
        "LOSS",
        "LOG",
        "DIR",
    ]
    assert row.split()[:5] == ["default", "abcdef", "collective", "running", "1/2"]
    assert row.split()[-4:] == ["1", "12", "nan", "/logs"]


def test_ps_in_a_pipe_is_not_coloured(job, capsys):
    answer("ps", [])
    assert "\x1b" not in capsys.readouterr().out


def test_ps_for_programs(job, capsys):
    assert answer("ps", ["--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["job"], found["pod"], found["pid"], found["silent"]) == (
        "default",
        "abcdef",
        os.getpid(),
        None,
    )
    assert found["containers"][0]["step"] == 12


def test_ps_without_a_job(folder, capsys):
    assert answer("ps", []) == 0
    assert capsys.readouterr() == ("", "You have no running jobs on this node.\n")
    answer("ps", ["--json"])
    assert json.loads(capsys.readouterr().out) == []


def test_ps_of_one_that_is_stopped(stopped, capsys):
    assert answer("ps", []) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["?", "ghijkl", "stopped"]
    answer("ps", ["--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["pod"], found["pid"], found["silent"]) == ("ghijkl", stopped, "it is stopped (Ctrl-Z)")


def test_status(job, capsys):
    assert answer("status", ["def"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("default (pod abcdef), collective, running, 1 of 2 processes up")
    trainer = dict(zip(lines[2].split(), lines[3].split(), strict=True))
    assert (trainer["PID"], trainer["STATE"], trainer["RESTARTS"]) == (str(os.getpid()), "running", "1")
    assert (trainer["STEP"], trainer["LOSS"], trainer["SAMPLES/S"]) == ("12", "nan", "7.5")
    assert re.fullmatch(r"[\d.]+[MG]", trainer["MEM"])
    assert lines[4].split() == ["trainer.1", "SIGKILL"]


def test_status_for_programs(job, capsys):
    assert answer("status", ["--json"]) == 0
    out = capsys.readouterr().out
    status = json.loads(out, parse_constant=pytest.fail)
    assert out.count("\n") == 1
    first, second = status["containers"]
    assert (first["loss"], second["exit"], second["memory"]) == ("nan", -9, None)
    assert first["memory"] > 1 << 20
    assert first["cpu"] >= 0


def test_status_of_one_that_is_stopped(stopped):
    with pytest.raises(LaunchError, match="does not answer: it is stopped") as error:
        answer("status", ["ghi"])
    assert error.value.exit_code == 3


def test_what_was_the_live_view_names_the_new_one(job):
    with pytest.raises(UsageError, match="--watch is for --json") as error:
        answer("status", ["--watch"])
    assert "fleetrun top" in str(error.value.hint)


def test_the_live_view_needs_a_terminal(job):
    with pytest.raises(UsageError, match="needs a terminal") as error:
        answer("top", [])
    assert "fleetrun status" in str(error.value.hint)


def test_watched_by_a_program_it_is_a_line_each_time_until_the_job_is_over(folder, capsys, monkeypatch):
    """It goes after its third answer. Who looks on is patient."""
    monkeypatch.setattr(status_verb, "_TIMEOUT", 60.0)
    asked = []

    def tell(_):
        asked.append(1)
        if len(asked) == 3:
            (folder / "abcdef.sock").unlink()
        return status_of("default", "abcdef", restarts=len(asked))

    with serving(folder / "abcdef.sock", tell):
        assert answer("status", ["--watch", "--json", "--interval", "0.1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["restarts"] for each in lines] == [2, 3]


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_no_such_job(folder, verb):
    with pytest.raises(NoJobError):
        answer(verb, ["resnet"])


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("ps", ["job"]),
        ("status", ["--interval", "0"]),
        ("status", ["--interval", "nan"]),
        ("status", ["a", "b"]),
        ("stop", ["--force"]),
    ],
)
def test_what_cannot_be_meant(folder, verb, words):
    with pytest.raises(UsageError) as error:
        answer(verb, words)
    assert error.value.hint == f"See fleetrun {verb} --help."


@pytest.mark.parametrize("verb", ["ps", "status", "stop"])
def test_help_has_examples_and_exit_codes(verb, capsys):
    assert answer(verb, ["--help"]) == 0
    out = capsys.readouterr().out
    assert f"fleetrun {verb}" in out
    assert "Exit codes:\n    0" in out
    assert max(map(len, out.splitlines())) <= 80


_TELLS_TWICE = """
import socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen()
    print("ready", flush=True)
    for answer in sys.argv[2:]:
        with server.accept()[0] as caller:
            caller.recv(65536)
            caller.sendall(answer.encode() + b"\\n")
"""


def test_stop_of_one_in_a_container_of_its_own(folder, capsys):
    """Its pid is another's here: this test's, which would be waited for."""
    folder.mkdir(mode=0o700, parents=True)
    said = [status_of("default", "abcdef", pid=os.getpid()), {"stopping": "default"}]
    words = [str(folder / "abcdef.sock"), *map(json.dumps, said)]
    with subprocess.Popen([sys.executable, "-c", _TELLS_TWICE, *words], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"ready\n"
        assert answer("stop", ["default"]) == 0
    assert "has ended" in capsys.readouterr().out


def test_stop_of_what_no_signal_reaches(stopped):
    with pytest.raises(LaunchError, match="does not answer"):
        answer("stop", ["ghijkl"])
    assert state_of(stopped) == "T"
