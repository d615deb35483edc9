"""`fleetrun logs` of jobs that ran."""

import errno
import json
import os

import pytest

from fleetrun import verbs
from fleetrun.commands import logs
from fleetrun.errors import LaunchError, UsageError
from fleetrun.record.log_lines import AT_ONCE
from tests.commands.records import BEGAN


@pytest.fixture
def job(past):
    made = past()
    made.prints(0, b"a0\n")
    made.now += 10
    made.prints(1, b"b0 loss\n")
    made.now += 10
    made.prints(0, b"a1 loss\na2\n")
    made.over()
    return made


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """`run("logs")` -> exit code, what it prints, what it complains of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return lambda *words: (verbs.answer(words[0], words[1:]), *capfd.readouterr())


def test_all_logs_in_the_order_of_time_with_their_names(ask, job):
    assert ask("logs").splitlines() == [
        "trainer.0 | a0",
        "trainer.1 | b0 loss",
        "trainer.0 | a1 loss",
        "trainer.0 | a2",
    ]


@pytest.mark.parametrize(
    "words", [("night",), ("abcdef",), ("ni",), ("--log_dir", "log"), ("--log-dir", "log", "night")]
)
def test_the_job_by_its_name_its_pod_its_beginning_and_its_folder(ask, job, words):
    assert len(ask("logs", *words).splitlines()) == 4


def test_one_log_needs_no_names(ask, job):
    assert ask("logs", "--rank", "1") == "b0 loss\n"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("-n", "2"), ["a1 loss", "a2"]),
        (("--grep", "lo.s"), ["b0 loss", "a1 loss"]),
        (("--grep", "loss", "-n", "1"), ["a1 loss"]),
        (("-n", "0"), []),
        (("--rank", "0", "--grep", "^a[01]"), ["a0", "a1 loss"]),
        (("--role", "trainer", "-f"), ["a0", "b0 loss", "a1 loss", "a2"]),
    ],
)
def test_only_some_lines(ask, job, words, shown):
    assert [line.partition("| ")[2] or line for line in ask("logs", *words).splitlines()] == shown


def test_what_cannot_be_read_is_told_and_the_others_are_shown(past, run):
    job = past()
    job.prints(0, b"a0\n")
    for rank in range(2):
        job.event("started", container=f"trainer.{rank}", rank=rank)
    log = job.logs[1]
    log.unlink()
    job.over()
    code, out, err = run("logs")
    assert (code, out) == (1, "trainer.0 | a0\n")
    assert err == f"fleetrun: log/{log.name} cannot be read: No such file or directory\n"


def test_a_process_that_never_began_needs_no_log(ask, past):
    job = past()
    job.logs[1].unlink()
    job.over()
    assert ask("logs") == ""


@pytest.mark.slow
def test_following_a_log_that_cannot_be_read_ends_with_the_job(past, run, monkeypatch):
    job = past(trainers=1)
    log = job.logs[0]
    log.write_bytes(b"x" * (3 * AT_ONCE))
    looks = iter([True] * 3)
    monkeypatch.setattr(logs, "is_running", lambda _: next(looks, False))
    monkeypatch.setattr(os, "pread", broken)
    code, out, err = run("logs", "-f")
    assert (code, out, err) == (
        1,
        "",
        f"fleetrun: log/{log.name} cannot be read: Input/output error\n",
    )


def broken(*_):
    raise OSError(errno.EIO, "Input/output error")


def test_a_job_that_is_over_is_not_waited_for(ask, job):
    assert ask("logs", "-f", "-n", "1") == "trainer.0 | a2\n"


def test_times_and_json_say_when(ask, job):
    first, *_ = ask("logs", "-t").splitlines()
    assert first.split(" | ")[1] == "a0"
    said = [json.loads(line) for line in ask("logs", "--json").splitlines()]
    assert said[0] == {"time": BEGAN, "container": "trainer.0", "rank": 0, "line": "a0"}
    assert [each["time"] - BEGAN for each in said] == pytest.approx([0, 10, 20, 20], abs=0.05)


def test_of_a_progress_bar_the_last_state_is_shown(ask, past):
    job = past(trainers=1)
    job.prints(0, b"10%\r50%\r100%\nnext\r\n\0\0\xff\n")
    job.over()
    assert ask("logs") == "100%\nnext\n\udcff\n"


def test_json_does_nothing_to_a_terminal(ask, past):
    job = past(trainers=1)
    job.prints(0, "\x9b31m\n".encode())
    job.over()
    shown = ask("logs", "--json")
    assert json.loads(shown)["line"] == "\x9b31m"
    assert "\x9b" not in shown


def test_into_a_pipe_bytes_stay_as_they_are(past, ask, capfdbinary):
    job = past(trainers=1)
    job.prints(0, "\x1b[31m训练\x1b[0m\x1b]0;title\x07\n".encode())
    job.over()
    assert ask("logs") == "\x1b[31m训练\x1b[0m\x1b]0;title\x07\n"


def test_a_log_that_was_deleted_takes_nothing_from_the_others(ask, job):
    job.logs[0].unlink()
    assert ask("logs", "--grep", "loss") == "trainer.1 | b0 loss\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--grep", "("), "--grep"),
        (("--since", "soon"), "--since soon"),
        (("--rank", "7"), "--rank 7: this node has no such process"),
        (("-n", "-1"), "-n"),
        (("--bogus",), "bogus"),
    ],
)
def test_a_wrong_option_says_so(ask, job, words, message):
    with pytest.raises(UsageError, match=message):
        ask("logs", *words)


def test_no_such_job(ask, job):
    with pytest.raises(LaunchError, match="nope") as raised:
        ask("logs", "nope")
    assert raised.value.exit_code == 1


def test_a_record_that_names_no_processes(ask, past):
    job = past()
    job.journal.path.write_bytes(b"garbage\n")
    job.journal.close()
    with pytest.raises(UsageError, match="no processes"):
        ask("logs")


def test_help_is_a_page(ask):
    text = ask("logs", "--help")
    assert "Examples:" in text
    assert "Exit codes:" in text
