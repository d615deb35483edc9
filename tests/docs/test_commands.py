"""Every command block of README and docs is run, in the way that the page says (tests/support/blocks.py)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.blocks import PAGES, ROOT, Block, blocks, script
from tests.support.command import environment
from tests.support.waiting import eventually

WAYS = {"run", "plan", "together", "while", "fails", "short", "bench", "elsewhere"}
BLOCKS = [block for page in PAGES for block in blocks(page)]
HERE = [block for block in BLOCKS if block.how != "elsewhere"]
_TRAIN = """\
import sys, time, trainers
print("step 1", flush=True)
time.sleep(float((sys.argv[1:] or [0])[0]))
"""


def test_there_are_blocks_and_all_are_run_somehow():
    assert len(HERE) > 10
    assert {block.how for block in BLOCKS} <= WAYS
    assert [str(block) for block in BLOCKS if block.how == "elsewhere" and len(block.rest.split()) < 4] == []


def test_no_block_of_commands_hides_from_this():
    """Commands stand in ```bash blocks: not indented, not in blocks without a language."""
    command = re.compile(r"^ {4}(?:\$ )?(?:fleetrun|srun|mpirun|pip|python|make) ", re.MULTILINE)
    hidden = [
        f"{page.name}: {match.group()}" for page in PAGES for match in command.finditer(page.read_text())
    ]
    assert hidden == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader types: a script, and the examples as in a clone."""
    for name in ("train.py", "evaluate.py"):
        (tmp_path / name).write_text(f"#!{sys.executable}\n{_TRAIN}")
        (tmp_path / name).chmod(0o755)
    for name in ("trainers", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    return tmp_path


def _environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return environment({"PATH": path, "XDG_RUNTIME_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"})


@contextlib.contextmanager
def _while(command: str, folder: Path, env: dict[str, str]) -> Iterator[None]:
    """While `command` runs and its job can be asked."""
    with (folder / "while.out").open("wb") as out:
        job = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=folder,
            env=env,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
        )
    sockets = folder / "run" / "fleetrun"
    try:
        eventually(lambda: list(sockets.glob("*.sock")) and list(folder.glob("log*/*.trainer.0.log")))
        yield
    finally:
        job.terminate()
        job.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("block", HERE, ids=str)
def test_a_block_runs(block: Block, folder: Path):
    env = _environment(folder)
    around = _while(block.rest, folder, env) if block.how == "while" else contextlib.nullcontext()
    with around:
        done = subprocess.run(
            ["bash", "-e", "-c", script(block)],
            cwd=folder, env=env, capture_output=True, text=True, timeout=250, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    wanted = int(block.rest.split()[0]) if block.how == "fails" else 0
    assert done.returncode == wanted, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
