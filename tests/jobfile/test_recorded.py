"""A launch of the past as a command line that means the same."""

from pathlib import Path

import pytest

from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.job_file import load_job_file
from fleetrun.envs.settings.options import Resolved
from fleetrun.envs.settings.resolve import resolve
from fleetrun.envs.settings.show import job_file_parts, words
from fleetrun.envs.settings.write_job_file import Recorded, again
from fleetrun.errors import UsageError
from tests.jobfile.folder import resolved

FILE = Path("kept.toml")


def recorded(found: Resolved) -> Recorded:
    event = {
        "argv": list(words(found, but=found.engine)),
        "job_file": job_file_parts(found.settings),
        "cwd": "/",
    }
    return Recorded.read(event, "record")


def launched(found: Resolved, *more: str, environ: dict[str, str] | None = None) -> Resolved:
    argv, variables = again(recorded(found), more, FILE, environ or {})
    line = read(argv)
    named = [each.text for each in line.options if each.option.name == "config"]
    file = {"file": load_job_file(named[0], variables, "--config")} if named else {}
    return resolve(line, variables, **file)


@pytest.mark.parametrize(
    "line",
    [
        "train.py --lr 1",
        "-m pkg --x",
        "--server_num 1 --gpus=0,1 -- -train.py",
        "--sort_ip --enable_gpu_log=0 --follow ps --follow trainer --run_mode ps x.py",
        "--xpus 0 x.py",
    ],
)
def test_what_was_typed_is_launched_again(line):
    first = resolve(read(line.split()), {"PADDLE_MAX_RESTART": "7"})
    assert launched(first).settings == first.settings
    now = {"PADDLE_MAX_RESTART": "1", "PADDLE_LOG_LEVEL": "ERROR", "LR": "2"}
    assert launched(first, environ=now).settings == first.settings


def test_what_is_typed_now_takes_the_place_of_what_was():
    first = resolve(read(["--worker_num", "2", "--gpus", "0", "x.py"]), {})
    settings = launched(first, "--trainer_num=3", "--max_restart", "1").settings
    assert (settings.trainer_num, settings.max_restart, settings.devices) == (3, 1, ("0",))


def test_what_only_the_job_file_said_is_kept_as_it_was():
    text = "script = 's.py'\nargs = ['${LR}', '$${x}']\nserver_num = 1\n[environment]\nA = '${LR}'\n"
    first = resolved(text + "[roles.evaluator]\nscript = 'e.py'", environ={"LR": "1"})
    second = launched(first, environ={"LR": "2"})
    assert second.settings.script_args == ("1", "${x}")
    assert second.settings.environment == (("A", "1"),)
    assert job_file_parts(second.settings) == job_file_parts(first.settings)
    assert job_file_parts(launched(second).settings) == job_file_parts(first.settings), "again and again"


def test_a_script_that_was_typed_beside_a_job_file_stays():
    first = resolved("script = 's.py'\n[environment]\nA = '1'", "other.py a")
    settings = launched(first).settings
    assert (settings.script, settings.script_args, settings.environment) == (
        "other.py",
        ("a",),
        (("A", "1"),),
    )


@pytest.mark.parametrize("lines", ["# something else", ""])
def test_another_file_in_that_place_is_left_alone(lines):
    first = resolved("script = 's.py'\n[environment]\nA = '1'")
    FILE.write_text(lines)
    with pytest.raises(UsageError, match="already exists"):
        launched(first)
    assert FILE.read_text() == lines


def test_words_that_do_not_go_with_it():
    first = recorded(resolve(read(["x.py"]), {}))
    with pytest.raises(UsageError, match=r"takes no script, but has y\.py"):
        again(first, ["y.py"], FILE, {})
    with pytest.raises(UsageError, match="--version cannot be combined"):
        again(first, ["--version"], FILE, {})


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"argv": "x", "cwd": "/"},
        {"argv": [1], "cwd": "/"},
        {"argv": ["x"], "cwd": ""},
        {"argv": ["x"], "cwd": 1},
        {"argv": ["x"], "cwd": "/", "job_file": []},
    ],
)
def test_a_record_that_does_not_tell(event):
    with pytest.raises(UsageError, match="record does not contain the command"):
        Recorded.read(event, "record")
