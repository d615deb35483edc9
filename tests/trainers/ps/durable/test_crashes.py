"""Servers killed by SIGKILL at any moment come back with every acknowledged push, once."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.trainers.ps.durable.frames import State

ROOT = Path(__file__).resolve().parents[4]
KILLS = 110


@contextmanager
def forker(where: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.trainers.ps.durable.crashing", str(where)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


class Killed:
    """What one server said before it was killed after `acknowledgements` of them and some microseconds."""

    def __init__(self, process: subprocess.Popen[str], acknowledgements: int, microseconds: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.recovered: tuple[int, str] | None = None
        self.acknowledged = 0
        pid = 0
        waiting = acknowledgements
        process.stdin.write("go\n")
        for line in process.stdout:
            word, *rest = line.split()
            assert word != "failed", line
            if word == "gone":
                return
            if word == "pid":
                pid = int(rest[0])
            elif word == "recovered":
                self.recovered = int(rest[0]), rest[1]
            elif word == "acknowledged":
                self.acknowledged = int(rest[0])
                waiting -= 1
            if waiting == 0 and pid:
                waiting = -1
                until = time.perf_counter() + microseconds / 1e6
                while time.perf_counter() < until:
                    pass
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_no_acknowledged_push_is_lost_or_applied_twice(tmp_path):
    chance = random.Random(11)
    model = State()
    acknowledged = recoveries = 0
    with forker(tmp_path) as process:
        for _ in range(KILLS):
            killed = Killed(process, chance.choice((0, 1, 3, 8, 15, 30)), chance.randrange(3000))
            if killed.recovered is not None:
                count, digest = killed.recovered
                # One more than acknowledged may be in: written, and killed before the acknowledgement.
                assert acknowledged <= count <= acknowledged + 1
                assert digest == model.up_to(count).digest()
                acknowledged = count
                recoveries += 1
            acknowledged = max(acknowledged, killed.acknowledged)
    assert recoveries > KILLS / 2
    assert acknowledged > 3 * KILLS
