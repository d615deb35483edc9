"""kill -9 of servers, trainers, all of them, the launcher or the guard, over jobs on parameter servers. What
was pushed is neither lost nor doubled, and in step the tables are those of a job that nobody disturbs.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import signal
import tempfile
from pathlib import Path

import torch

from tests.attack.arena import (
    JOB,
    PATIENCE,
    Arena,
    Counting,
    check_spotless,
    containers,
    send,
    sleep_or_end,
    until_training,
    victim_pid,
)
from tests.support.cluster import ROOT
from tests.support.command import Fleetrun, Launch
from tests.support.scripts.step_limit import give
from trainers.ps import read_values
from trainers.ps.saves.read import ModelValues

VICTIMS = ("ps.0", "ps.1", "trainer.0", "trainer.1", "both", "all", "launcher", "guard")
STEPS = 60


def kill(arena: Arena, launch: Launch, victim: str) -> bool:
    """Whether the command must end by it."""
    arena.note(f"kill {victim}")
    if victim in ("launcher", "guard"):
        return send(victim_pid(launch, victim), signal.SIGKILL)
    names = {"both": ("ps.0", "trainer.1"), "all": tuple(containers(launch))}.get(victim, (victim,))
    found = containers(launch)
    for name in names:
        send(found.get(name), signal.SIGKILL)
    return False


def disturb(arena: Arena, launch: Launch, word: str, kills: int) -> tuple[int, bool]:
    """(kills left, whether launcher or guard was killed)."""
    while kills and launch.popen.poll() is None:
        if arena.random.random() < 0.75:
            until_training(arena, launch, word, arena.random.randrange(1, 4))
        elif not sleep_or_end(launch, arena.random.uniform(0, 6)):
            break
        arena.pause(0.03)  # anywhere within a step
        kills -= 1
        if kill(arena, launch, arena.random.choice(VICTIMS)):
            launch.popen.wait(PATIENCE)
            return kills, True
    return kills, False


def to_the_end(arena: Arena, start: functools.partial[Launch], word: str) -> Launch:
    """Start the job, again after each kill of its launcher, until it ends by itself."""
    kills = arena.random.randrange(2, 6)
    while True:
        launch = start()
        kills, expected = disturb(arena, launch, word, kills)
        code = launch.wait(PATIENCE)
        arena.note(f"exit code {code}")
        check_spotless(launch)
        if not expected or code == 0:
            return launch
        assert code in (-signal.SIGKILL, 125), launch


def async_pushes(arena: Arena) -> None:
    random = arena.random
    options: dict[str, object] = {"pause_ms": random.choice([5, 20]), "many": True}
    if random.random() < 0.5:
        options["asynchronous"] = {"overlap": False}
    elif random.random() < 0.5:
        options["prefetch"] = True
    ps = {
        "snapshot_interval_s": random.choice([0.2, 0.7, 300.0]),
        "log_fsync": random.choice(["no", "everysec"]),
    }
    job = Counting(arena, STEPS, options=options, ps=ps)
    arena.note(f"{options} {ps}")
    job.check(to_the_end(arena, functools.partial(job.start), "pushed"))


def sync_tables(arena: Arena) -> None:
    launch = to_the_end(arena, functools.partial(start_sync, arena.fleetrun, arena.folder), "step")
    assert launch.code == 0, launch
    assert not list(arena.folder.glob("kept/*")), "the job is over: nothing needs to be kept"
    check_equal(read_values(arena.folder / "saved"), read_values(undisturbed() / "saved"))


def check_equal(found: ModelValues, whole: ModelValues) -> None:
    """Bit for bit."""
    assert found.dense.keys() == whole.dense.keys()
    assert found.sparse.keys() == whole.sparse.keys()
    for name, tensor in whole.dense.items():
        assert torch.equal(tensor, found.dense[name]), f"{name} differs"
    for name, table in whole.sparse.items():
        assert torch.equal(table.keys, found.sparse[name].keys), f"{name} has other keys"
        assert torch.equal(table.values, found.sparse[name].values), f"{name} differs"


def start_sync(fleetrun: Fleetrun, folder: Path, *options: str, env: dict[str, str] | None = None) -> Launch:
    give(folder / "step_limit", STEPS)
    words = (str(folder), "sync", "log", str(STEPS), "10")
    return fleetrun.start(*JOB, *options, "-m", "tests.support.scripts.ps_recovery", *words, env=env)


@functools.cache
def undisturbed() -> Path:
    """The folder of the same job, in which nobody was killed."""
    folder = Path(tempfile.mkdtemp(prefix="fleettest-attack-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with Fleetrun(folder, path=[ROOT]) as fleetrun:
        launch = start_sync(fleetrun, folder)
        assert launch.wait(PATIENCE) == 0, launch
    return folder


ATTACKS = (async_pushes, sync_tables)
