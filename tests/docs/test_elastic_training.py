"""What docs/elastic-training.md says, held against the code: its commands and its script."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import PATH
from tests.support.command import environment

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "elastic-training.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_commands_name_files_that_there_are() -> None:
    commands = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    scripts = {word for words in commands for word in words if word.endswith(".py")}
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


@pytest.mark.slow
def test_the_script_trains_and_goes_on(tmp_path: Path) -> None:
    (script,) = blocks("python")
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
