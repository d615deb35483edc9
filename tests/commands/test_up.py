"""`fleetrun up`: the command line that its words stand for."""

from pathlib import Path

import pytest

from fleetrun.commands.up import launch_arguments
from fleetrun.errors import UsageError


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], ["--config", "job.toml"]),
        (["night.toml"], ["--config", "night.toml"]),
        (["night.toml", "--max_restart", "5"], ["--config", "night.toml", "--max_restart", "5"]),
        (["--max_restart", "5", "train.py"], ["--config", "job.toml", "--max_restart", "5", "train.py"]),
        (["--", "train.py"], ["--config", "job.toml", "--", "train.py"]),
    ],
)
def test_words(words, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").touch()
    Path("night.toml").touch()
    assert launch_arguments(words, {"A": "b"}) == (line, {"A": "b"})


@pytest.mark.parametrize("here", [True, False])
def test_a_job_file_behind_options_is_no_script(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if here:
        Path("job.toml").touch()
    with pytest.raises(UsageError, match=r"night\.toml must be the first argument") as caught:
        launch_arguments(["--display", "plain", "night.toml"], {})
    assert caught.value.hint == "fleetrun up night.toml [OPTIONS]"


def test_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no job\.toml"):
        launch_arguments([], {})
    with pytest.raises(UsageError, match=r"fleetrun up: the job file night\.toml does not exist"):
        launch_arguments(["night.toml"], {})
