import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleetrun.envs.channels import error_file
from tests.support.cluster import PATH


def run(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environ | {"PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["FLEETRUN_ERROR_FILE", "TORCHELASTIC_ERROR_FILE"])
def test_an_uncaught_exception_is_written_and_still_printed(tmp_path: Path, variable: str) -> None:
    before = time.time_ns()
    path = tmp_path / "error.json"
    ended = run("import trainers\ndef 失败(): raise ValueError('坏数据')\n失败()", **{variable: str(path)})
    assert ended.returncode == 1
    assert "ValueError: 坏数据" in ended.stderr
    message = json.loads(path.read_text(encoding="utf-8"))["message"]
    assert message["message"] == "ValueError: 坏数据"
    extra = message["extraInfo"]
    assert "in 失败" in extra["py_callstack"]
    assert before < extra["time_ns"] < time.time_ns()
    assert extra["timestamp"] == str(extra["time_ns"] // 10**9)
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_file_only_the_traceback_is_printed(tmp_path: Path) -> None:
    ended = run("import trainers; 1 / 0", FLEETRUN_ERROR_FILE="", TORCHELASTIC_ERROR_FILE="")
    assert "ZeroDivisionError" in ended.stderr


def test_a_file_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    ended = run("import trainers; 1 / 0", FLEETRUN_ERROR_FILE=str(tmp_path / "no" / "folder"))
    assert "could not be written to" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr
    assert ended.returncode == 1


def test_half_a_file_is_not_left(tmp_path: Path) -> None:
    full = "import resource, trainers; resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1)); 1 / 0"
    ended = run(full, FLEETRUN_ERROR_FILE=str(tmp_path / "file"))
    assert "could not be written to" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_importing_trainers_is_cheap() -> None:
    ended = run("import trainers, sys; print('torch' in sys.modules)")
    assert ended.stdout == "False\n"


def test_the_first_named_file_wins_and_empty_ones_do_not_count() -> None:
    assert error_file({"FLEETRUN_ERROR_FILE": "", "TORCHELASTIC_ERROR_FILE": "b"}) == "b"
    assert error_file({"FLEETRUN_ERROR_FILE": "a", "TORCHELASTIC_ERROR_FILE": "b"}) == "a"
    assert error_file({}) == ""


@pytest.mark.parametrize(
    ("call", "failed"),
    [("sys.exit(1)", True), ("sys.exit('no')", True), ("sys.exit()", False), ("sys.exit(0)", False)],
)
def test_sys_exit_with_a_failure_is_one(call: str, failed: bool) -> None:
    script = (
        f"import atexit, sys, trainers.process.hooks as l; atexit.register(lambda: print(l.failed())); {call}"
    )
    ended = run("import trainers; " + script)
    assert ended.stdout == f"{failed}\n"
    assert (ended.returncode != 0) == failed


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(0)", "sys.exit(0)", "raise SystemExit(7)"])
def test_what_fails_at_exit_fails_the_process(tmp_path: Path, ending: str) -> None:
    """And the other hooks still run, those that were registered before too."""
    path = tmp_path / "error.json"
    script = f"""
import atexit, sys
atexit.register(lambda: print("registered before"))
import trainers
from trainers.process.hooks import at_exit, failed
atexit.register(lambda: print("registered between", failed()))
def finish():
    raise OSError("no room")
at_exit(finish)
{ending}
"""
    ended = run(script, FLEETRUN_ERROR_FILE=str(path))
    assert ended.returncode == 1
    assert "OSError: no room" in ended.stderr
    assert ended.stdout.splitlines() == ["registered between True", "registered before"]
    assert json.loads(path.read_text(encoding="utf-8"))["message"]["message"] == "OSError: no room"


@pytest.mark.slow
def test_what_succeeds_at_exit_leaves_the_exit_code(tmp_path: Path) -> None:
    ended = run(
        "import sys, trainers; from trainers.process.hooks import at_exit; at_exit(lambda: None); sys.exit(7)"
    )
    assert ended.returncode == 7
