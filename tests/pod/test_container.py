"""One process over all its attempts: its log, its error record, what is told of its end."""

import dataclasses
import json
import os
import select
import signal
import socket
import stat
from pathlib import Path

import pytest

from fleetrun.envs.channels import ErrorRecord, write_error
from fleetrun.envs.contract import Role
from fleetrun.errors import LaunchError, ScriptNotFoundError
from fleetrun.pod.container import Container, Status, move, read_dismissed, read_error
from fleetrun.pod.process import Exit, signal_name
from tests.support.pods import spec_of

RECORD = (
    """{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "T", "time_ns": 5000000000}}}"""
)


class Times:
    """A clock that is read: 100, 101, 102, ..."""

    def __init__(self):
        self._now = 99.0

    def __call__(self):
        self._now += 1
        return self._now


@pytest.fixture
def container(tmp_path):
    made = []

    def make(script, role=Role.TRAINER):
        made.append(Container(spec_of(tmp_path, script, role), wall=Times()))
        made[-1].prepare()
        return made[-1]

    yield make
    for each in made:
        if each.alive:
            each.process.signal_group(signal.SIGKILL)
            each.process.reap()


def ended(container, *, out_of_memory=False):
    assert select.select([container.process], [], [], 60.0)[0], "it does not end"
    return container.collect(lambda pid: out_of_memory)


def run(container):
    container.start()
    return ended(container)


def test_an_attempt(container):
    made = container("echo out; echo error >&2; exit 3")
    assert made.status is Status.READY
    process = made.start()
    assert (made.status, made.alive) == (Status.RUNNING, True)
    end = ended(made)
    assert (made.status, made.alive) == (Status.FAILED, False)
    assert (end.exit, end.pid, end.attempt) == (Exit(3), process.pid, 0)
    assert (end.ended, end.failed_at) == (100.0, 100.0)
    assert 0 < end.ended - end.started < 60
    assert made.spec.log.read_text() == "out\nerror\n"


def test_the_log_is_for_its_owner_only(container):
    made = container("exit 0")
    assert stat.S_IMODE(made.spec.log.stat().st_mode) == 0o600


def test_a_log_that_cannot_be_made_is_known_before_anything_starts(tmp_path):
    spec = spec_of(tmp_path / "none", "exit 0")
    with pytest.raises(LaunchError, match="cannot open the log file"):
        Container(spec).prepare()


def test_a_second_attempt_is_told_in_the_log_and_to_the_script(container):
    made = container('echo "attempt $PADDLE_RESTART_COUNT"; exit 3')
    run(made)
    made.renew()
    assert (made.status, made.restarts) == (Status.RESTARTING, 1)
    end = run(made)
    assert end.attempt == 1
    lines = made.spec.log.read_text().splitlines()
    assert (lines[0], lines[2]) == ("attempt 0", "attempt 1")
    assert lines[1].startswith("--- fleetrun: restart 1 of trainer 0, 20")


def test_what_has_not_run_needs_no_renewal(container):
    made = container("exit 0")
    made.renew()
    assert (made.status, made.restarts) == (Status.READY, 0)


def test_a_program_that_cannot_be_started(tmp_path):
    made = Container(spec_of(tmp_path, tmp_path / "none"))
    made.prepare()
    with pytest.raises(ScriptNotFoundError):
        made.start()
    assert (made.status, made.alive) == (Status.FAILED, False)


def test_what_the_process_wrote_of_its_failure(container):
    end = run(container(f"printf '%s' '{RECORD}' >\"$ERROR_FILE\"; exit 1"))
    assert end.record.message == "ValueError: x"
    assert end.failed_at == 5.0


def test_pipes_in_place_of_its_files_are_not_waited_for(tmp_path, container):
    made = container("exec sleep 600")
    files = {"error_file": tmp_path / "error.json", "notice_file": tmp_path / "notice.json"}
    made.spec = dataclasses.replace(made.spec, **files)
    made.start()
    for name in ("error.json", "notice.json", "notice.new"):
        os.mkfifo(tmp_path / name)
    made.notify("restart", 5.0)
    assert json.loads((tmp_path / "notice.json").read_text()) == {"why": "restart", "deadline": 5.0}
    assert made.record() is None
    made.ask(signal.SIGKILL)
    assert ended(made).record is None


@pytest.mark.parametrize("replace", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_log_that_is_none_any_more_is_an_error_at_a_restart(container, replace):
    made = container("exit 3")
    run(made)
    made.spec.log.unlink()
    replace(made.spec.log)
    made.renew()
    with pytest.raises(LaunchError, match="cannot open the log file"):
        made.start()


def test_a_record_of_an_attempt_that_ended_well_does_not_count(container):
    assert run(container(f"printf '%s' '{RECORD}' >\"$ERROR_FILE\"; exit 0")).record is None


def test_the_record_of_an_earlier_attempt_does_not_count(container):
    made = container(f"[ \"$PADDLE_RESTART_COUNT\" = 1 ] || printf '%s' '{RECORD}' >\"$ERROR_FILE\"; exit 1")
    assert run(made).record is not None
    made.renew()
    assert run(made).record is None


def test_a_dismissed_server(container):
    made = container("""printf '{"dismissed": true}' >"$ERROR_FILE"; exit 0""", Role.SERVER)
    assert run(made).dismissed
    assert not made.spec.error_file.exists()


def test_dismissed_and_failed_is_failed(container):
    assert not run(container("""printf '{"dismissed": true}' >"$ERROR_FILE"; exit 1""")).dismissed


@pytest.mark.parametrize(
    ("script", "kernel", "told"),
    [("kill -KILL $$", True, True), ("kill -KILL $$", False, False), ("exit 1", True, False)],
)
def test_only_a_sigkill_may_be_the_oom_killers(container, script, kernel, told):
    made = container(script)
    made.start()
    end = ended(made, out_of_memory=kernel)
    assert end.out_of_memory is told
    assert (end.fault(3).error == "out of memory") is told


def test_our_own_sigkill_is_not_the_oom_killers(container):
    made = container("exec sleep 100")
    made.start()
    made.ask(signal.SIGKILL)
    end = ended(made, out_of_memory=True)
    assert (end.out_of_memory, end.asked, end.stopped) == (False, signal.SIGKILL, True)


def test_the_first_signal_is_the_one_that_asked(container):
    made = container("trap '' TERM; echo ready >\"$NOTES/ready\"; while :; do sleep 100; done")
    os.mkfifo(made.spec.log.parent / "ready")
    made.start()
    (made.spec.log.parent / "ready").read_text()
    made.ask(signal.SIGTERM)
    assert made.status is Status.TERMINATING
    made.ask(signal.SIGKILL)
    end = ended(made)
    assert (end.asked, end.exit, end.stopped) == (signal.SIGTERM, Exit(-9), True)


@pytest.mark.parametrize("code", [0, 1])
def test_who_leaves_by_himself_was_not_stopped(container, code):
    made = container(f"exit {code}")
    made.start()
    assert select.select([made.process], [], [], 60.0)[0]
    made.ask(signal.SIGTERM)
    end = ended(made)
    assert (end.stopped, end.asked) == (False, None), "it had ended before it was asked"


def test_that_an_earlier_attempt_was_asked_to_go_does_not_count(container):
    made = container('[ "$PADDLE_RESTART_COUNT" = 1 ] && exit 3; exec sleep 100')
    made.start()
    made.ask(signal.SIGTERM)
    assert ended(made).asked == signal.SIGTERM
    made.renew()
    assert run(made).asked is None


def test_asking_what_does_not_run_is_nothing(container):
    made = container("exit 0")
    made.ask(signal.SIGTERM)
    run(made)
    made.ask(signal.SIGTERM)
    assert made.status is Status.COMPLETED


# ---- Which moves are legal, and what an exit says.

LEGAL = {
    "uninit": "ready failed",
    "ready": "running terminating failed",
    "running": "terminating restarting completed failed",
    "terminating": "restarting completed failed",
    "restarting": "ready running terminating failed",
    "completed": "restarting",
    "failed": "restarting",
}


@pytest.mark.parametrize("now", Status)
@pytest.mark.parametrize("then", Status)
def test_moves(now, then):
    if then in LEGAL[now].split():
        assert move(now, then) is then
    else:
        with pytest.raises(RuntimeError, match=f"illegal move from {now} to {then}"):
            move(now, then)


@pytest.mark.parametrize(
    ("code", "ok", "signal", "shell_code", "words"),
    [
        (0, True, None, 0, "exited with code 0"),
        (3, False, None, 3, "exited with code 3"),
        (255, False, None, 255, "exited with code 255"),
        (-9, False, 9, 137, "was killed by SIGKILL"),
        (-15, False, 15, 143, "was killed by SIGTERM"),
        (-40, False, 40, 168, "was killed by signal 40"),
    ],
)
def test_exits(code, ok, signal, shell_code, words):
    end = Exit(code)
    assert (end.ok, end.signal, end.shell_code, str(end)) == (ok, signal, shell_code, words)


def test_signals_have_names():
    assert (signal_name(2), signal_name(99)) == ("SIGINT", "signal 99")


# ---- What a process wrote about its failure: in torch's shape, in ours, and in none.

CALLSTACK = "Traceback (most recent call last):\nValueError: 坏\n"


@pytest.fixture
def written(tmp_path):
    """The record of a file with this text, written at second 1000."""

    def write(text, name="error.json"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        os.utime(path, (1000.0, 1000.0))
        return path

    return write


def of_torch(**extra):
    inner = {"py_callstack": CALLSTACK, "timestamp": "999", **extra}
    return json.dumps({"message": {"message": "ValueError: 坏", "extraInfo": inner}})


def test_our_own(written):
    path = written(of_torch(time_ns=999_123_456_789))
    assert read_error(path) == ErrorRecord("ValueError: 坏", CALLSTACK, 999.123456789)


def test_a_process_that_says_that_a_restart_will_not_help(written):
    text = write_error("DamagedError: x", "", 999_000_000_000, restart_helps=False)
    assert read_error(written(text)) == ErrorRecord("DamagedError: x", "", 999.0, restart_helps=False)
    assert read_error(written(write_error("x", "", 999_000_000_000))).restart_helps


def test_torchs_own_has_whole_seconds_only_so_the_files_time_counts(written):
    assert read_error(written(of_torch())) == ErrorRecord("ValueError: 坏", CALLSTACK, 1000.0)


def test_torchs_shape_for_what_is_no_exception(written):
    assert read_error(written('{"message": "killed"}')) == ErrorRecord("killed", "", 1000.0)


@pytest.mark.parametrize("time_ns", [-1, 5_000 * 10**9, 10**40, 10**400])
def test_a_moment_that_cannot_be(written, time_ns):
    """A report must be able to show it, and it must not win over real ones."""
    record = read_error(written(of_torch(time_ns=time_ns)))
    assert record is None or record.time == 1000.0


GARBAGE = [
    b"",
    b"{",
    b"null",
    b"3",
    b"[]",
    b'"text"',
    b"{}",
    b'{"message": null}',
    b'{"message": []}',
    b'{"message": {}}',
    b'{"message": {"message": "x"}}',
    b'{"message": {"message": "x", "extraInfo": []}}',
    b'{"message": {"message": "x", "extraInfo": 3}}',
    b'{"message": {"message": "x", "extraInfo": {}}}',
    b'{"message": {"message": "x", "extraInfo": {"py_callstack": "", "time_ns": "soon"}}}',
    b'{"message": {"message": "x", "extraInfo": {"py_callstack": "", "time_ns": []}}}',
    b'{"message": {"message": "x", "extraInfo": {"py_callstack": "", "time_ns": Infinity}}}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"message": "' + b"x" * (2 << 20) + b'"}',
]


@pytest.mark.parametrize("text", GARBAGE, ids=[text[:70].decode("latin-1") for text in GARBAGE])
def test_garbage_is_no_record(written, text):
    assert read_error(written(text)) is None
    assert read_dismissed(written(text)) is False


def test_no_file(tmp_path):
    assert read_error(None) is None
    assert read_error(tmp_path / "none") is None
    assert read_error(tmp_path) is None
    assert read_dismissed(None) is False
    assert read_dismissed(tmp_path / "none") is False


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        a_socket,
    ],
    ids=["fifo", "folder", "zero", "loop", "socket"],
)
def test_what_is_no_file_is_not_waited_for(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    make(Path("error.json"))
    assert read_error(Path("error.json")) is None
    assert read_dismissed(Path("error.json")) is False


def test_a_huge_file_is_not_read_whole(tmp_path):
    path = tmp_path / "error.json"
    path.touch()
    os.truncate(path, 1 << 40)
    assert read_error(path) is None
    assert read_dismissed(path) is False


def test_dismissed(written):
    assert read_dismissed(written('{"dismissed": true}'))
    assert not read_dismissed(written('{"dismissed": false}'))
    assert not read_dismissed(written('{"dismissed": true, "message": "x"}'))
    assert not read_dismissed(written(of_torch()))
