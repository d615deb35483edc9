"""What the kernel tells of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fleetrun.pod.process import children_of, with_all_below
from fleetrun.stacks import processes
from tests.support.stacks import MARK, waiting
from tests.support.waiting import eventually

NOBODY = 2**22 + 1


def test_of_nobody_nothing_is_known():
    assert processes.state_of(NOBODY) == ""
    assert processes.command_of(NOBODY) == ""
    assert not processes.is_python(NOBODY)
    assert not processes.belongs(NOBODY, MARK)
    assert not processes.catches(NOBODY, 10)
    assert processes.python_below(NOBODY) == []
    assert processes.age_of(NOBODY) is None


def test_this_process():
    assert processes.state_of(os.getpid()) == "R"
    assert processes.is_python(os.getpid())
    assert processes.catches(os.getpid(), 2), "SIGINT, by Python"
    assert not processes.catches(os.getpid(), 10)
    began = psutil.Process().create_time()
    at_least = time.time() - began
    assert at_least - 5 < processes.age_of(os.getpid()) < time.time() - began + 5


@pytest.mark.slow
def test_pythons_below_a_process_are_found_and_helpers_are_not(tmp_path: Path):
    """A shell between them hides nothing."""
    inner = "import time; open('pid', 'w').write(str(__import__('os').getpid())); time.sleep(1000)"
    tracker = "'multiprocessing.resource_tracker'; import time; time.sleep(1000)"
    text = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen(['/bin/sh', '-c', '\"$0\" -c \"$1\"; :', sys.executable, {inner!r}])\n"
        f"subprocess.Popen([sys.executable, '-c', {tracker!r}])\n"
        "print('ready', flush=True)\ntime.sleep(1000)\n"
    )
    with waiting(tmp_path, text) as (target, _):

        def below() -> list[int]:  # all of them: the shell too
            return with_all_below(children_of(target.pid))

        eventually(lambda: len(processes.python_below(target.pid)) == 1 and len(below()) == 3)
        (found,) = processes.python_below(target.pid)
        command = Path(f"/proc/{found}/cmdline").read_bytes()
        assert b"getpid" in command
        for pid in below():
            os.kill(pid, 9)


def test_who_belongs_to_a_container():
    env = {**os.environ, "FLEETRUN_CONTAINER": MARK}
    text = "import sys; print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", text], env=env, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.readline()
        assert processes.belongs(process.pid, MARK)
        assert not processes.belongs(process.pid, MARK + "1")
        assert not processes.belongs(process.pid, MARK[:-1])
        process.stdin.close()
