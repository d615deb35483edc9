"""How a process beside the job is started: with nothing of the job, and with the same fleetrun."""

import subprocess
import sys
from pathlib import Path

from fleetrun.envs.channels import CONTAINER_VARIABLE, PROGRESS_VARIABLE
from fleetrun.envs.contract import TOKEN
from fleetrun.host.interpreter import helper_command, helper_environment

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_no_process_of_the_job():
    theirs = {
        TOKEN: "t" * 16,
        CONTAINER_VARIABLE: "abcdef.trainer.0",
        PROGRESS_VARIABLE: "/x",
        "RANK": "1",
        "PADDLE_TRAINER_ID": "1",
    }
    found = helper_environment({**theirs, "HOME": "/root", "PATH": "/bin"})
    assert not found.keys() & theirs.keys()
    assert (found["HOME"], found["PATH"], found["OMP_NUM_THREADS"]) == ("/root", "/bin", "1")


def test_it_finds_this_fleetrun_behind_what_the_user_imports():
    assert helper_environment({"PYTHONPATH": "/mine"})["PYTHONPATH"] == f"/mine:{ROOT}"
    assert helper_environment({})["PYTHONPATH"] == str(ROOT)


def test_what_lies_in_the_current_directory_is_no_module(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "tensorboard").mkdir()
    words = helper_command("json.tool", "--help")
    assert words[0] == sys.executable
    done = subprocess.run(words, cwd=tmp_path, env=helper_environment({}), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
