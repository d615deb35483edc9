"""Every signal there is, at random moments of the command's life: start-up, training, restart, shut-down."""

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import fleetrun
from tests.support.command import Fleetrun, Launch
from tests.support.traces import left_behind

MOMENTS = int(os.environ.get("FLEETTEST_MOMENTS") or 4)
SEED = int(os.environ.get("FLEETTEST_SEED") or random.randrange(1 << 32))

# Two trainers that ignore SIGTERM, and a daemon of each; the first attempt fails, the second ends well.
# In sh, which starts ten times as fast as Python.
LIFE = """#!/bin/sh
trap "" TERM HUP
setsid sleep 1000 &
sleep 0.05
[ $PADDLE_RESTART_COUNT = 1 ] || exit 3
"""
STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
TO_THE_CHILD = ("KILL", "SEGV", "ABRT", "BUS", "TERM", "INT", "STOP", "TSTP", "USR1")
REAL_TIME = [number for number in sorted(signal.valid_signals()) if number >= signal.SIGRTMIN]
NAMED = sorted(signal.valid_signals() - set(REAL_TIME))
HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH, signal.SIGPIPE, signal.SIGXFSZ}


@pytest.fixture(scope="module")
def lifetime(tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long such a life takes here and now, among as many others."""
    with Fleetrun(tmp_path_factory.mktemp("lifetime")) as fleetrun:
        began = time.monotonic()
        for launch in [start(fleetrun, number) for number in range(MOMENTS)]:
            launch.wait()
        return time.monotonic() - began


def start(fleetrun: Fleetrun, count: int) -> Launch:
    script = fleetrun.folder / "live"
    if not script.exists():
        script.write_text(LIFE)
        script.chmod(0o755)
    log_dir = f"log{count}"
    return fleetrun.start("--stop_timeout", "0.1", "--log_dir", log_dir, "--nproc_per_node", "2", "./live")


def strike(launch: Launch, number: int, *, the_child: bool) -> bool:
    """Whether it still lived. What was stopped goes on again; a child that is not there yet is waited for."""
    while launch.popen.poll() is None:
        try:
            pid = launch.launcher if the_child else launch.popen.pid
            os.kill(pid, number)
        except (OSError, IndexError):
            time.sleep(0.002)
            continue
        if number in STOPPING:
            time.sleep(0.02)  # it may need that to stop; either way it must go on
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        return True
    return False


def attack(launch: Launch, number: int, moment: float, the_child: bool, hits: list[float]) -> None:
    """From a thread of its own, so that all launches live at the same time."""
    time.sleep(moment)
    if strike(launch, number, the_child=the_child):
        hits.append(moment)


@pytest.mark.slow
@pytest.mark.parametrize("number", NAMED, ids=lambda n: n.name)
def test_to_the_command_leaves_nothing(fleetrun: Fleetrun, number: int, lifetime: float):
    check_nothing_is_left(fleetrun, [number] * MOMENTS, lifetime, the_child=False)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_real_time_signals_leave_nothing_either(fleetrun: Fleetrun, first: int, lifetime: float):
    """The system makes no difference between them: each strikes once."""
    check_nothing_is_left(fleetrun, REAL_TIME[first::4], lifetime, the_child=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", TO_THE_CHILD)
def test_to_its_child_leaves_nothing(fleetrun: Fleetrun, name: str, lifetime: float):
    check_nothing_is_left(fleetrun, [signal.Signals[f"SIG{name}"]] * MOMENTS, lifetime, the_child=True)


def check_nothing_is_left(
    fleetrun: Fleetrun, numbers: Sequence[int], lifetime: float, *, the_child: bool
) -> None:
    """As many launches at the same time, each struck by its signal at its own moment; once more, and sooner,
    where the machine has become so much quicker since `lifetime` was taken that none lived that long. It may
    have stood still then.
    """
    for sooner in (1, 2, 4, 8, 16, 32, 64):
        if strikes(fleetrun, numbers, lifetime / sooner, the_child=the_child):
            break
    else:
        pytest.fail("every launch was over before its moment came")
    check_only_logs(fleetrun.folder)
    # A guard that is killed between its launcher's end and its own leaves an empty cgroup to the next one.
    fleetrun.run("--version")


def strikes(fleetrun: Fleetrun, numbers: Sequence[int], lifetime: float, *, the_child: bool) -> int:
    """How many of them came in time."""
    count = len(numbers)
    chance = random.Random(f"{SEED} {int(numbers[0])} {the_child}")
    moments = [lifetime * (part + chance.random()) / count for part in range(count)]
    print(f"seed {SEED}; moments {', '.join(f'{moment:.4f}' for moment in moments)} s")
    hits: list[float] = []
    launches = [start(fleetrun, each) for each in range(count)]
    threads = [
        threading.Thread(target=attack, args=(launch, number, moment, the_child, hits))
        for launch, number, moment in zip(launches, numbers, moments, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for launch, number in zip(launches, numbers, strict=True):
        code = launch.wait()
        if code >= 0:
            assert not left_behind(launch.token), f"the guard left before all was gone\n{launch}"
        launch.no_process()
        if number in HARMLESS | STOPPING and not (code == -number and never_began(launch)):
            assert code == 0, launch
        assert "Traceback" not in launch.err or in_python_itself(launch), launch
    return len(hits)


def never_began(launch: Launch) -> bool:
    """Whether it printed nothing and started nothing. Before its interpreter has started, a Python program
    handles no signal: one that comes then ends it, as it ends any program.
    """
    return not launch.err and not launch.out and not launch.news


def in_python_itself(launch: Launch) -> bool:
    """Whether Ctrl-C came while the interpreter was looking for the command, before a line of it ran."""
    return str(Path(fleetrun.__file__).parent) not in launch.err and not launch.out and not launch.news


def check_only_logs(folder: Path) -> None:
    for path in folder.glob("log*/*"):
        assert re.fullmatch(r"default\..*|latest|\.latest\.[a-z]{6}", path.name), path
