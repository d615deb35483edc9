"""Where the kernel lets no process watch another: an old kernel, or an old container runtime."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import FLEETRUN, environment

REFUSING = Path(__file__).parents[1] / "support" / "without_pidfd.py"


def run(folder: Path, code: int, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text("")
    return subprocess.run(
        [sys.executable, REFUSING, str(code), *FLEETRUN, *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_launch_says_it_in_one_sentence(tmp_path: Path, code: int) -> None:
    done = run(tmp_path, code, "train.py")
    assert done.returncode == 125
    first, hint = done.stderr.splitlines()
    assert first.startswith("fleetrun: error: the kernel refuses pidfd_open: ")
    assert "Linux 5.4" in hint
    assert not (tmp_path / "log").exists()


def test_the_doctor_finds_it(tmp_path: Path) -> None:
    done = run(tmp_path, errno.EPERM, "doctor", "--json")
    assert done.returncode == 1, done.stderr
    assert "the kernel refuses pidfd_open" in json.dumps(json.loads(done.stdout))
