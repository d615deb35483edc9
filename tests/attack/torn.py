"""Files that were torn or have a flipped bit: refused by name, or recovered from; never silently wrong."""

from __future__ import annotations

import atexit
import functools
import shutil
import signal
import tempfile
from pathlib import Path
from random import Random

import torch

from tests.attack.arena import (
    PATIENCE,
    Arena,
    Counting,
    check_clean_text,
    check_spotless,
    refusal_of,
    send,
    until_training,
)
from tests.attack.disks import loaded
from tests.attack.kills import check_equal, undisturbed
from tests.support.cluster import ROOT
from tests.support.command import Fleetrun
from trainers.checkpoints import checkpoint
from trainers.ps import read_values


def damage(arena: Arena, path: Path) -> bool:
    """Truncate it, flip a bit or zero a piece, at a random place; False for an empty file."""
    data = bytearray(path.read_bytes())
    if not data:
        return False
    at, size = arena.random.randrange(len(data)), len(data)
    how = arena.random.choice(["torn", "flipped", "flipped", "zeros"])
    if how == "torn":
        del data[at:]
    elif how == "flipped":
        data[at] ^= 1 << arena.random.randrange(8)
    else:
        zeros = min(size - at, arena.random.choice([1, 64, 4096]))
        data[at : at + zeros] = bytes(zeros)
    path.write_bytes(data)
    arena.note(f"{path.relative_to(arena.folder)} of {size} bytes: {how} at {at}")
    return True


def any_file(random: Random, folder: Path) -> Path:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return random.choice(files)


def save(arena: Arena) -> None:
    """A save of parameter servers: whoever reads it gets its values, or an error."""
    whole = read_values(undisturbed() / "saved")
    for number in range(20):
        copy = arena.folder / f"copy{number}"
        shutil.copytree(undisturbed() / "saved", copy)
        if not damage(arena, any_file(arena.random, copy)):
            continue
        with refusal_of(copy):
            check_equal(read_values(copy), whole)
        shutil.rmtree(copy)


def checkpoints(arena: Arena) -> None:
    """The one before, where the newest is damaged; an error, where both are."""
    for number in range(10):
        folder = arena.folder / f"checkpoints{number}"
        model = torch.nn.Linear(64, 64)
        for step in (1, 2):
            with torch.no_grad():
                for each in model.parameters():
                    each.fill_(step)
            checkpoint.save(folder, step, model)
        for _ in range(arena.random.randrange(1, 3)):
            damage(arena, any_file(arena.random, folder))
        arena.note(f"loaded {loaded(folder)}")


# ---- what servers keep


@functools.cache
def interrupted() -> Path:
    """The folder of a counting job that was killed whole, with its snapshots and journals."""
    folder = Path(tempfile.mkdtemp(prefix="fleettest-attack-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with Fleetrun(folder, path=[ROOT]) as fleetrun:
        launch = counting(Arena(Random(0), folder, fleetrun)).start()
        assert until_training(Arena(Random(0), folder, fleetrun), launch, further=STEPS // 2), launch
        send(launch.popen.pid, signal.SIGKILL)
        launch.wait(PATIENCE)
        launch.no_process()
    return folder


STEPS = 60


def counting(arena: Arena) -> Counting:
    options: dict[str, object] = {"pause_ms": 20, "asynchronous": {"overlap": False}}
    return Counting(arena, STEPS, words=("--max_restart", "1"), options=options)


def kept(arena: Arena) -> None:
    shutil.copytree(interrupted() / "kept", arena.folder / "kept")
    path = any_file(arena.random, arena.folder / "kept")
    if not damage(arena, path):
        return
    job = counting(arena)
    launch = job.start()
    code = launch.wait(PATIENCE)
    arena.note(f"exit code {code}")
    check_spotless(launch)
    if code == 0:
        job.check(launch)
    else:
        assert "kept/server-" in launch.said, launch
        assert "Traceback" not in launch.err, launch


# ---- record and job file


@functools.cache
def recorded() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fleettest-attack-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with Fleetrun(folder) as fleetrun:
        text = "print('line\\n' * 20)\nsys.exit(3 if RANK and not ATTEMPT else 0)"
        launch = fleetrun.run("--nproc_per_node", "2", fleetrun.script(text))
        assert launch.code == 0, launch
        saved = fleetrun.run("--dry_run", "--save", "job.toml", "--nproc_per_node", "2", "train.py")
        assert saved.code == 0, saved
    return folder


def record(arena: Arena) -> None:
    """A command that reads a damaged record says what it can; it does not break."""
    for _ in range(4):
        shutil.rmtree(arena.folder / "log", ignore_errors=True)
        shutil.copytree(recorded() / "log", arena.folder / "log", symlinks=True)
        files = [
            path for path in (arena.folder / "log").iterdir() if path.is_file() and not path.is_symlink()
        ]
        damage(arena, arena.random.choice(sorted(files)))
        for words in (["report"], ["logs"], ["logs", "--json"], ["status"]):
            launch = arena.fleetrun.run(*words)
            arena.note(f"{' '.join(words)}: {launch.code}")
            check_clean_text(launch)
            assert b"Traceback" not in launch.raw, launch  # of a log as it is, which need not be text


def job_file(arena: Arena) -> None:
    """It is refused by name, or says something else now that is allowed."""
    shutil.copy(recorded() / "train.py", arena.folder)
    for _ in range(8):
        shutil.copy(recorded() / "job.toml", arena.folder)
        damage(arena, arena.folder / "job.toml")
        launch = arena.fleetrun.run("up", "job.toml", "--dry_run")
        arena.note(f"up: {launch.code}")
        check_clean_text(launch)
        refused = (2, 126, 127)  # also for the name of another script
        assert launch.code == 0 or (launch.code in refused and launch.err), launch


ATTACKS = (kept, save, checkpoints, record, kept, job_file)
