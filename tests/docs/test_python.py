"""docs/python.md: its blocks are one program, and a test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import environment

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(?:# (\w+\.py)\n)?(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def python(folder: Path, *words: str) -> list[str]:
    """The lines that this Python prints."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment({"XDG_RUNTIME_DIR": str(folder)}),
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_program_runs(tmp_path: Path):
    (tmp_path / "program.py").write_text("\n".join(text for name, text in BLOCKS if not name))
    printed = python(tmp_path, "program.py")
    assert sum(line.startswith("step 2 loss ") for line in printed) == 1
    assert str(tmp_path / "log") in next(line for line in printed if line.endswith("trainer.1.log"))
    assert re.search(r"^trainer [01] 1$", "\n".join(printed), re.MULTILINE)
    assert "ZeroDivisionError('division by zero')" in printed
    assert "143" in printed
    assert re.fullmatch(r"\[[0-9.]+, [0-9.]+\]", printed[-1])


@pytest.mark.slow
def test_the_test_passes(tmp_path: Path):
    for name, text in BLOCKS:
        if name:
            (tmp_path / name).write_text(text)
    assert python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")[-1].startswith("1 passed")
