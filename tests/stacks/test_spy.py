"""py-spy on real processes, and what is made of one that refuses, hangs or talks nonsense."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from fleetrun.stacks.collect import SpyError, dump_pyspy, find_pyspy
from tests.support.stacks import may_look, program, waiting
from tests.support.waiting import eventually, state_of


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine lets one wait that was killed."""
    monkeypatch.setattr("fleetrun.stacks.collect._DEAF", 60.0)


@pytest.fixture
def real() -> str:
    if not may_look():
        pytest.skip("py-spy is not here, or may not look into another process")
    found = find_pyspy()
    assert found is not None
    return found


@pytest.mark.slow
def test_a_process_is_read_and_goes_on(real: str, tmp_path: Path):
    text = "import time\nprint('ready', flush=True)\nnumber = 0\nwhile True:\n    number += 1\n"
    with waiting(tmp_path, text) as (target, _):
        (main,) = dump_pyspy(real, target.pid, os.environ, 100.0)
        assert main.frames[-1].file.endswith("train.py")
        eventually(lambda: state_of(target.pid) == "R")


@pytest.mark.slow
def test_a_stopped_process_is_read_and_stays_stopped(real: str, tmp_path: Path):
    with waiting(tmp_path) as (target, process):
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: state_of(target.pid) == "T")
        (main,) = dump_pyspy(real, target.pid, os.environ, 100.0)
        assert main.frames[0].function == "deep"
        assert state_of(target.pid) == "T"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'Error: Permission Denied: try sudo' >&2; exit 1", "this user may not look into it"),
        ("echo 'Operation not permitted (os error 1)' >&2; exit 1", "this user may not look into it"),
        ("echo 'Error: Failed to find python version' >&2; exit 1", "it is not Python"),
        ("echo 'No such file or directory (os error 2)' >&2; exit 1", "it has ended"),
        ("printf '\\n\\nError: odd\\nmore\\n' >&2; exit 1", "py-spy: Error: odd"),
        ("exit 3", "py-spy: no word"),
        ("kill -9 $$", "py-spy: no word"),
        ("echo hello", "cannot be read"),
        ("echo '{}'", "cannot be read"),
        ("printf '\\377\\376'", "cannot be read"),
    ],
)
def test_why_there_is_nothing(tmp_path: Path, text: str, why: str):
    with pytest.raises(SpyError, match=why):
        dump_pyspy(program(tmp_path, text), os.getpid(), os.environ, 60.0)


@pytest.mark.slow
def test_one_that_hangs_is_killed(tmp_path: Path):
    os.mkfifo(tmp_path / "never")
    hangs = program(tmp_path, f'read line <"{tmp_path}/never"')
    with pytest.raises(SpyError, match="did not answer within"):
        dump_pyspy(hangs, os.getpid(), os.environ, 0.5)
    assert not [each for each in psutil.Process().children() if hangs in each.cmdline()]


@pytest.mark.slow
def test_a_process_that_a_killed_py_spy_left_stopped_goes_on(tmp_path: Path):
    """py-spy stops what it reads; killed at that moment it cannot continue it."""
    with waiting(tmp_path) as (target, _):
        stops = program(tmp_path, f"kill -STOP {target.pid}; exec sleep 1000")
        with pytest.raises(SpyError):
            dump_pyspy(stops, target.pid, os.environ, 1.0)
        eventually(lambda: state_of(target.pid) == "S")


IN_THE_KERNEL = """
import os, time
print('ready', flush=True)
os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, 'fifo', os.O_RDONLY, 0)])
time.sleep(1000)
"""
"""Deaf until somebody opens the other end, for its child has its memory till then. A stop comes then."""


@pytest.mark.slow
def test_nor_does_one_stop_that_was_deaf_in_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    with waiting(tmp_path, IN_THE_KERNEL) as (target, _):
        eventually(lambda: state_of(target.pid) == "D")
        stops = program(tmp_path, f"kill -STOP {target.pid}; exec sleep 1000")
        with pytest.raises(SpyError):
            dump_pyspy(stops, target.pid, os.environ, 1.0)
        os.close(os.open("fifo", os.O_WRONLY))
        eventually(lambda: state_of(target.pid) == "S")


@pytest.mark.parametrize("name", ["nothing", "folder"])
def test_one_that_cannot_be_started(tmp_path: Path, name: str):
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpyError, match="cannot be started"):
        dump_pyspy(str(tmp_path / name), os.getpid(), os.environ, 1.0)
