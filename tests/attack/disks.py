"""Disks that fill (a small tmpfs) and fail (a library before libc's) below logs, record, journal, snapshot,
save and checkpoint. Exit code 0 means that all of it was written; and with room again the job continues.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.attack.arena import PATIENCE, Arena, Counting, check_clean_text, check_spotless, refusal_of
from tests.attack.kills import start_sync, undisturbed
from tests.support.command import Launch
from trainers.checkpoints import checkpoint
from trainers.ps import read_values

SOURCE = Path(__file__).with_name("failing_disk.c")


@functools.cache
def library() -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no cc to compile the failing disk")
    folder = Path(tempfile.mkdtemp(prefix="fleettest-attack-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = folder / "failing_disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, SOURCE, "-ldl"], check=True)
    return made


def failing(arena: Arena, path: str, most: int) -> dict[str, str]:
    """The environment of processes for which a disk fails, from a random call on."""
    number = arena.random.choice([errno.EIO, errno.ENOSPC])
    calls = arena.random.choice(["", "", "sync", "write"])
    first = int(most ** arena.random.random())
    arena.note(f"{errno.errorcode[number]} at {calls or 'calls'} on {path}, from the {first}. on")
    env = {
        "LD_PRELOAD": str(library()),
        "DISK_PATH": path,
        "DISK_ERRNO": str(number),
        "DISK_FROM": str(first),
    }
    return env | ({"DISK_CALLS": calls} if calls else {})


@contextlib.contextmanager
def small_disk(arena: Arena, name: str, most_kib: int) -> Iterator[Path]:
    """A file system of 16 to so many KiB."""
    folder = arena.folder / name
    folder.mkdir()
    size = arena.random.randrange(4, most_kib // 4) * 4
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a file system")
    arena.note(f"{size} KiB at {name}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- journal and snapshots


def durability(arena: Arena) -> Counting:
    random = arena.random
    ps: dict[str, object] = {
        "snapshot_interval_s": random.choice([0.2, 1.0, 300.0]),
        "log_fsync": random.choice(["no", "everysec", "always"]),
    }
    arena.note(str(ps))
    options: dict[str, object] = {"pause_ms": 5}
    if random.random() < 0.5:
        options["asynchronous"] = {"overlap": False}
    return Counting(arena, 60, words=("--max_restart", "1"), options=options, ps=ps)


def check_then_continue(arena: Arena, job: Counting, launch: Launch) -> None:
    """It is complete, or it failed by a named cause and continues where it was."""
    code = launch.wait(PATIENCE)
    arena.note(f"exit code {code}")
    check_spotless(launch)
    if code != 0:
        assert any(word in launch.said for word in ("kept", "No space", "Input/output")), launch
        launch = job.start()
        launch.wait(PATIENCE)
    job.check(launch)


def failing_journal(arena: Arena) -> None:
    job = durability(arena)
    check_then_continue(arena, job, job.start(env=failing(arena, "/kept/", 400)))


def full_journal(arena: Arena) -> None:
    job = durability(arena)
    with small_disk(arena, "kept", 200) as folder:
        launch = job.start()
        code = launch.wait(PATIENCE)
        arena.note(f"exit code {code}")
        check_spotless(launch)
        if code == 0:
            job.check(launch)
            return
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        launch = job.start()
        launch.wait(PATIENCE)
        job.check(launch)


# ---- a save of parameter servers


def failing_save(arena: Arena) -> None:
    env = failing(arena, "/saved", 30)
    launch = start_sync(arena.fleetrun, arena.folder, "--max_restart", "0", env=env)
    code = launch.wait(PATIENCE)
    arena.note(f"exit code {code}")
    check_spotless(launch)
    if code != 0:
        assert any(word in launch.said for word in ("saved", "No space", "Input/output")), launch
        return
    saved, quiet = read_values(arena.folder / "saved"), read_values(undisturbed() / "saved")
    assert all(torch.equal(quiet.dense[name], saved.dense[name]) for name in quiet.dense), launch


# ---- checkpoints

CHECKPOINTS = """
import torch
from trainers import fleet
fleet.init(is_collective=True)
torch.distributed.barrier() if SIZE > 1 else None
model = torch.nn.Linear(64, 64)
for step in range(1, 6):
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(step)
    fleet.save_checkpoint("checkpoints", step, model, async_save=%s)
tell("saved")
"""


def failing_checkpoint(arena: Arena) -> None:
    script = arena.fleetrun.script(CHECKPOINTS % (arena.random.random() < 0.5))
    trainers = arena.random.choice("12")
    env = failing(arena, "/checkpoints/", 60)
    launch = arena.fleetrun.start("--nproc_per_node", trainers, "--max_restart", "0", script, env=env)
    code = launch.wait(PATIENCE)
    arena.note(f"exit code {code}")
    check_spotless(launch)
    newest = loaded(arena.folder / "checkpoints")
    arena.note(f"the newest checkpoint is {newest}")
    if code == 0:
        assert newest == 5, launch
    else:
        assert any(word in launch.said for word in ("No space", "Input/output")), launch


def loaded(folder: Path) -> int | None:
    """The step of the newest checkpoint, whose values must be those of its step; None for none."""
    model = torch.nn.Linear(64, 64)
    with refusal_of(folder):
        step = checkpoint.load(folder, model)
        assert step is None or all(bool((each == step).all()) for each in model.parameters())
        return step
    return None


# ---- logs and record


def failing_logs(arena: Arena) -> None:
    """The output of a script is no part of its work."""
    path = arena.random.choice(["/log/", ".jsonl", ".marks", "trainer.0.log", "/run/"])
    check_output(arena, failing(arena, path, 40))


def full_logs(arena: Arena) -> None:
    with small_disk(arena, "log", 40):
        check_output(arena, {})


def check_output(arena: Arena, env: dict[str, str]) -> None:
    code = arena.random.choice([0, 0, 3])
    lines = "for number in range(300):\n    os.write(1, b'x' * 200 + b'\\n') if number % 3 else None\n"
    quiet = f"try:\n    {lines.replace(chr(10), chr(10) + '    ')}\nexcept OSError:\n    pass\n"
    script = arena.fleetrun.script(f"{quiet}tell('done')\nsys.stdout = None\nos._exit({code})\n")
    launch = arena.fleetrun.start("--nproc_per_node", "2", "--max_restart", "0", script, env=env)
    ended = launch.wait(PATIENCE)
    arena.note(f"exit code {ended}")
    check_spotless(launch)
    check_clean_text(launch)
    if ended == 0:
        assert len(launch.told(" done")) == 2, launch
        assert code == 0, launch
    for words in (["report"], ["logs"]):
        check_clean_text(arena.fleetrun.run(*words))


ATTACKS = (
    failing_checkpoint, failing_logs, full_logs, failing_journal, full_journal, failing_save,
)  # fmt: skip
