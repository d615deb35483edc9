"""The example that goes on: stopped in the middle, taken up by another number of processes."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import PATH, ROOT
from tests.support.command import Fleetrun, environment

EXAMPLE = str(ROOT / "trainers" / "examples" / "elastic_trainer.py")
LINE = re.compile(r"^step (\d+) loss (\d\.\d{6}) world (\d) restarts 0$", re.MULTILINE)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_stopped_with_two_processes_and_taken_up_by_one(tmp_path: Path) -> None:
    with Fleetrun(tmp_path, path=[ROOT]) as command:
        # It would go on for a hundred seconds: whoever stands still meanwhile, the stop comes before the end.
        slow = ("--dir", "saved", "--step_time", "0.2", "--print_every", "4")
        words = ("--nproc_per_node", "2", "--stop_timeout", "60", EXAMPLE, *slow)
        launch = command.start(*words, env=ONE_THREAD)
        launch.until_out("step 4 ")
        launch.send(signal.SIGTERM)
        assert launch.wait() == 143, launch
    stopped = re.search(r"^stopped at step (\d+): (stop|signal SIGTERM), ", launch.out, re.MULTILINE)
    assert stopped is not None, launch
    assert {world for _, _, world in LINE.findall(launch.out)} == {"2"}
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--dir", "saved"],
        cwd=tmp_path,
        env=environment({"PYTHONPATH": PATH, **ONE_THREAD}),
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    assert done.stdout.startswith(f"resumed at step {stopped[1]}\nstep {int(stopped[1]) + 1} loss ")
    assert {world for _, _, world in LINE.findall(done.stdout)} == {"1"}
    accuracy = re.search(r"^test accuracy: (0\.\d{4})$", done.stdout, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.9
    assert re.search(r"^done at step 500: parameters [0-9a-f]{16}$", done.stdout, re.MULTILINE)
