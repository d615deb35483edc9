"""Signals that only leave a mark, and the file that says why. Processes of their own get real signals."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.cluster import PATH
from trainers.notice import Notice, notice_file, read_notice

BEGIN = """
import os, signal, sys, threading, time
from pathlib import Path
from trainers.notice import Notice, StopSignals, outlive_notice
signals = StopSignals(Path("notice.json"))
def hit(number):
    os.kill(os.getpid(), number)
"""


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + text],
        cwd=folder,
        env={"PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=60,
    )


def told(text: str, folder: Path) -> list[str]:
    done = run(text, folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.slow
def test_who_does_not_ask_is_ended_by_sigterm(tmp_path: Path) -> None:
    assert run("hit(signal.SIGTERM)", tmp_path).returncode == -signal.SIGTERM
    assert (
        run("signals.listen([signal.SIGTERM]); hit(signal.SIGUSR1)", tmp_path).returncode == -signal.SIGUSR1
    )


def test_who_asks_is_told_and_stays(tmp_path: Path) -> None:
    text = """
signals.listen([signal.SIGTERM, signal.SIGUSR1])
print(signals.notice())
hit(signal.SIGUSR1)
print(signals.notice().why, signals.notice().seconds_left)
Path("notice.json").write_text('{"why": "membership", "deadline": 4e9}')
print(signals.notice().why)
hit(signal.SIGTERM)
print(signals.notice())
print(signals.notice())
"""
    membership = str(Notice("membership", 4e9))
    assert told(text, tmp_path) == [
        "None", "signal SIGUSR1 inf", "signal SIGUSR1", membership, membership
    ]  # fmt: skip


def test_the_ctrl_c_that_fleetrun_passes_on_is_a_mark_too(tmp_path: Path) -> None:
    text = "signals.listen([signal.SIGTERM]); hit(signal.SIGINT); print(signals.notice().why)"
    assert told(text, tmp_path) == ["signal SIGINT"]
    alone = "StopSignals(None).listen([signal.SIGTERM]); hit(signal.SIGINT); time.sleep(60)"
    assert run(alone, tmp_path).returncode == -signal.SIGINT


def test_a_handler_that_was_there_is_called_too(tmp_path: Path) -> None:
    text = """
signal.signal(signal.SIGTERM, lambda number, frame: print("mine", number))
signals.listen([signal.SIGTERM])
signals.listen([signal.SIGTERM])
hit(signal.SIGTERM)
print(signals.notice().why)
"""
    assert told(text, tmp_path) == ["mine 15", "signal SIGTERM"]


def test_a_forked_child_dies_of_sigterm_as_ever(tmp_path: Path) -> None:
    text = """
signals.listen([signal.SIGTERM])
child = os.fork()
if not child:
    hit(signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
hit(signal.SIGTERM)
print(signals.notice().why)
"""
    assert told(text, tmp_path) == ["-15", "signal SIGTERM"]


def test_another_thread_cannot_be_the_first_to_ask(tmp_path: Path) -> None:
    text = """
def ask():
    try:
        signals.listen([signal.SIGTERM])
    except RuntimeError as error:
        print(error)
thread = threading.Thread(target=ask)
thread.start()
thread.join()
signals.listen([signal.SIGTERM])
thread = threading.Thread(target=signals.listen, args=([signal.SIGTERM],))
thread.start()
thread.join()
"""
    assert told(text, tmp_path) == ["Make the first call of fleet.stop_requested() in the main thread."]


def test_a_worker_obeys_its_parents_sigterm_only(tmp_path: Path) -> None:
    text = """
child = os.fork()
if not child:
    outlive_notice(0)
    hit(signal.SIGTERM)
    while signal.SIGTERM in signal.sigpending():  # one that comes before it is seen would be the same one
        time.sleep(0.001)
    print("still here", flush=True)
    threading.Event().wait()
os.read(0, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    with started([sys.executable, "-c", BEGIN + text], tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "still here\n"
        out, err = process.communicate("x", timeout=60)
        assert (out, err, process.returncode) == ("0\n", "", 0)


STUCK = """
import ctypes
signals.listen([signal.SIGTERM], with_others=True)
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
if not os.fork():
    hit(signal.SIGTERM)  # no news to its parent
os.wait()
print("ready", flush=True)
lock(mutex)
lock(mutex)  # as in a collective with one who is gone: no handler runs, nothing interrupts it
"""


@pytest.mark.parametrize("why", ["failure", "lost"])
def test_who_waits_for_others_that_are_gone_is_ended_after_all(tmp_path: Path, why: str) -> None:
    (tmp_path / "notice.json").write_text(json.dumps({"why": why, "deadline": 4e9}))
    with started([sys.executable, "-c", BEGIN + STUCK], tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143


def test_who_has_a_wake_up_descriptor_keeps_it(tmp_path: Path) -> None:
    text = """
reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.set_wakeup_fd(writing)
Path("notice.json").write_text('{"why": "failure", "deadline": 4e9}')
signals.listen([signal.SIGTERM], with_others=True)
hit(signal.SIGTERM)
print(os.read(reading, 9), signals.notice().why)
"""
    assert told(text, tmp_path) == ["b'\\x0f' failure"]


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        command,
        cwd=folder,
        env={"PYTHONPATH": PATH},
        text=True,
        start_new_session=True,
        **pipes,  # type: ignore[call-overload]
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


LOADER = """
import torch
from torch.utils.data import DataLoader
def main():
    fed = DataLoader(torch.arange(100), num_workers=2, worker_init_fn=outlive_notice)
    signals.listen([signal.SIGTERM])
    for number in fed:
        if number == 10:
            print("ready", flush=True)
            os.read(0, 1)
            while not signals.notice():
                pass
        last = number
    print("fed to the end", int(last))
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_of_a_loader_outlive_the_groups_signal(tmp_path: Path, number: int) -> None:
    with started([sys.executable, "-c", BEGIN + LOADER], tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, number)
        out, err = process.communicate("x", timeout=60)
        assert (out, err, process.returncode) == ("fed to the end 99\n", "", 0)


def test_seconds_left() -> None:
    assert Notice("stop").seconds_left == math.inf
    assert Notice("stop", time.time() - 5).seconds_left == 0
    assert 50 < Notice("stop", time.time() + 60).seconds_left <= 60


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"why": "stop"}', '{"why": "x", "deadline": "soon"}'])
def test_a_file_that_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "notice").write_text(text)
    assert read_notice(tmp_path / "notice") is None


def test_where_the_launcher_writes(tmp_path: Path) -> None:
    assert notice_file({}) is notice_file({"FLEETRUN_NOTICE": ""}) is None
    path = notice_file({"FLEETRUN_NOTICE": str(tmp_path / "x")})
    assert read_notice(path) is None
    assert path is not None
    path.write_text(json.dumps({"why": "stop", "deadline": 12.5}))
    assert read_notice(path) == Notice("stop", 12.5)
