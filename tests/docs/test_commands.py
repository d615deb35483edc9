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

from tests.support.blocks import PAGES, ROOT, Block, blocks, files, script
from tests.support.command import environment
from tests.support.waiting import eventually

WAYS = {"run", "plan", "together", "while", "fails", "short", "bench", "elsewhere"}
BLOCKS = [block for page in PAGES for block in blocks(page)]
TUTORIAL = ROOT / "docs" / "tutorial.md"
HERE = [block for block in BLOCKS if block.how != "elsewhere" and block.page != "docs/tutorial.md"]
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
    for name in ("trainers", "bench", "examples"):
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
        job.wait(200)


@pytest.mark.slow
@pytest.mark.parametrize("block", HERE, ids=str)
def test_a_block_runs(block: Block, folder: Path):
    env = _environment(folder)
    around = _while(block.rest, folder, env) if block.how == "while" else contextlib.nullcontext()
    with around:
        _run(block, folder, env)


def _run(block: Block, folder: Path, env: dict[str, str]) -> str:
    """What it prints."""
    done = subprocess.run(
        ["bash", "-e", "-c", script(block)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=250, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    wanted = int(block.rest.split()[0]) if block.how == "fails" else 0
    assert done.returncode == wanted, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_tutorial_in_its_order(tmp_path: Path):
    """With its own files. What its reader starts in the first terminal is marked as run elsewhere: it runs
    around the blocks that follow, which are for the second terminal.
    """
    env, written, printed, resumed = _environment(tmp_path), files(TUTORIAL), [], []
    with contextlib.ExitStack() as first_terminal:
        for block in blocks(TUTORIAL):
            while written and written[0].line < block.line:
                file = written.pop(0)
                (tmp_path / file.name).write_text(file.text)
            if block.how == "elsewhere":
                first_terminal.close()
                first_terminal.enter_context(_while(block.text.strip(), tmp_path, env))
                _matched(tmp_path, r"^epoch (\d+):.*^epoch \d+:.*^epoch \d+:")
                continue
            printed.append(_run(block, tmp_path, env))
            if "kill -9" in block.text:
                resumed.append(int(_matched(tmp_path, r"restart 1 of trainer 0.*?^epoch (\d+):")))
    assert (resumed[0], resumed[1] > 0) == (0, True), "without a checkpoint, and with one"
    assert ", step 150, loss " in printed[0]
    assert re.search(
        r"^trainer [01]: RuntimeError: mat1 and mat2 .* at train.py:\d+$", printed[1], re.MULTILINE
    )
    assert "trainer.1 | epoch" in printed[3]
    assert re.search(r"^step [1-9]\d+: [89]\d\.\d% of 297 ", printed[-1], re.MULTILINE), printed[-1]


def _matched(folder: Path, pattern: str) -> str:
    """What the group in it has matched in the output of the job around a block, once it does."""
    wanted, output = re.compile(pattern, re.MULTILINE | re.DOTALL), folder / "while.out"
    eventually(lambda: wanted.search(output.read_text()))
    found = wanted.search(output.read_text())
    assert found is not None
    return found[1]
