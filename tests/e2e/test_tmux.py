"""The status line in tmux, which keeps what an erased screen showed."""

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import FLEETRUN, environment
from tests.support.traces import wait_until

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")

COUNT = """
import time
from pathlib import Path

time.sleep(4)
Path("done").touch()
time.sleep(1000)
"""


class Tmux:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = str(folder / "tmux")

    def __call__(self, *words: str) -> str:
        argv = ("tmux", "-S", self._socket, "-f", "/dev/null", *words)
        env = environment({"TERM": "xterm", "XDG_RUNTIME_DIR": str(self._folder)})
        done = subprocess.run(argv, cwd=self._folder, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    command = Tmux(tmp_path)
    command("new-session", "-d", "-x", "80", "-y", "24", "sh")
    yield command
    command("kill-server")


def test_nothing_is_left_in_its_scrollback(tmux: Tmux, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNT)
    line = shlex.join([*FLEETRUN, "--log_level", "WARNING", "train.py"])
    tmux("send-keys", f"clear; {line}; echo ended with $?", "Enter")
    wait_until((tmp_path / "done").exists, lambda: tmux("capture-pane", "-p", "-S", "-"))
    wait_until(lambda: "trainers 1/1" in tmux("capture-pane", "-p"), lambda: tmux("capture-pane", "-p"))
    assert tmux("display-message", "-p", "#{history_size}").strip() == "0"
    tmux("send-keys", "C-c")
    wait_until(lambda: "ended with 130" in tmux("capture-pane", "-p"), lambda: tmux("capture-pane", "-p"))
    assert "trainers" not in tmux("capture-pane", "-p", "-S", "-")
