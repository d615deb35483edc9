"""The commands and scripts of docs/elastic-training.md, held against the code."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.blocks import files
from tests.support.cluster import PATH
from tests.support.command import FLEETRUN, environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "elastic-training.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_commands_name_files_that_there_are() -> None:
    commands = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    scripts = {word for words in commands for word in words if word.endswith(".py")}
    own = {file.name for file in files(PAGE)}
    assert own < scripts
    assert all((ROOT / script).is_file() for script in scripts - own)


@pytest.mark.slow
def test_the_script_without_fleet_resumes(tmp_path: Path) -> None:
    (file,) = files(PAGE)
    printed = []
    for steps in (70, 200):
        (tmp_path / file.name).write_text(file.text.replace("200", str(steps)))
        done = subprocess.run(
            [*FLEETRUN, "--nproc_per_node", "2", "--max_restart", "0", file.name],
            cwd=tmp_path, env=environment({"OMP_NUM_THREADS": "1"}),
            capture_output=True, text=True, timeout=250, check=True,
        )  # fmt: skip
        printed.append(done.stdout)
    assert printed == ["", "resumed at step 50\n"]
    assert (tmp_path / "checkpoint.pt").exists()


@pytest.mark.slow
def test_the_script_trains_and_goes_on(tmp_path: Path) -> None:
    (script,) = (block for block in blocks("python") if "trainers" in block)
    for steps in (70, 200):
        (tmp_path / "script.py").write_text(script.replace("200", str(steps)))
        subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env=environment({"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}),
            timeout=250,
            check=True,
        )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000150",
        "step-00000200",
    ]
