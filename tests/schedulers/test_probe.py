"""What Kubernetes asks of a pod, of a /proc made for it and of a real launch."""

import subprocess
import sys
from pathlib import Path

import pytest

from fleetrun.schedulers import probe
from tests.support.command import Fleetrun


def process(proc: Path, pid: int, name: str, state: str = "S", environ: bytes = b"") -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {state} 1 1 1")
    (proc / str(pid) / "environ").write_bytes(environ)


@pytest.mark.parametrize(
    ("name", "state", "live"),
    [
        ("fleetrun", "S", 0),
        ("fleetrun", "R", 0),
        ("fleetrun", "T", 1),
        ("fleetrun-guard", "S", 1),
        ("sh", "S", 1),
    ],
)
def test_live_is_a_launcher_that_is_not_stopped(tmp_path: Path, name: str, state: str, live: int):
    process(tmp_path, 4_000_000, name, state)
    assert probe.main(["live"], tmp_path) == live


def test_ready_is_a_process_of_the_job(tmp_path: Path):
    process(tmp_path, 4_000_000, "fleetrun", environ=b"PATH=/bin\0")
    (tmp_path / "4000001").mkdir()  # has just ended
    assert probe.main(["ready"], tmp_path) == 1
    process(tmp_path, 4_000_002, "python", environ=b"PATH=/bin\0FLEETRUN_CONTAINER=abc.trainer.0\0")
    assert probe.main(["ready"], tmp_path) == 0


def test_another_question_is_an_error(capsys: pytest.CaptureFixture[str]):
    assert probe.main(["happy"]) == 2
    assert "live|ready" in capsys.readouterr().err


@pytest.mark.slow
def test_of_a_real_launch(fleetrun: Fleetrun):
    launch = fleetrun.start(fleetrun.script("tell('ready', os.getpid())\nwait_for_go()"))
    launch.until_ready(1)
    for question in ("live", "ready"):
        argv = [sys.executable, "-m", "fleetrun.schedulers.probe", question]
        assert subprocess.run(argv, check=False).returncode == 0
    launch.go()
    assert launch.wait() == 0
