"""What a shell offers where a job is to be named."""

import click
import pytest

from fleetrun.commands.find import complete_jobs, complete_running_jobs
from fleetrun.verbs import command
from tests.support.serving import serving, status_of


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Three that run, two of them with one name. Tab has time."""
    monkeypatch.setattr("fleetrun.commands.find._COMPLETION_TIMEOUT", 60.0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" / "fleetrun"
    there = {"abcdef": "day", "bcdefg": "twice", "cdefgh": "twice"}
    with (
        serving(folder / "abcdef.sock", lambda _: status_of(there["abcdef"], "abcdef")),
        serving(folder / "bcdefg.sock", lambda _: status_of(there["bcdefg"], "bcdefg")),
        serving(folder / "cdefgh.sock", lambda _: status_of(there["cdefgh"], "cdefgh")),
    ):
        yield


def offered(which, start="", **params):
    context = click.Context(click.Command("x"))
    context.params = params
    return sorted(which(context, click.Argument(["job"]), start))


def test_jobs_that_run_or_their_pods_where_a_name_says_too_little(jobs):
    assert offered(complete_running_jobs) == ["bcdefg", "cdefgh", "day"]
    assert offered(complete_running_jobs, "d") == ["day"]
    assert offered(complete_running_jobs, "x") == []


def test_jobs_that_ran_each_once(jobs, tmp_path):
    logs = tmp_path / "elsewhere"
    logs.mkdir()
    for name in ("night.aaaaaa", "night.bbbbbb", "a b.cccccc", "day.dddddd", "训练.eeeeee"):
        (logs / f"{name}.events.jsonl").touch()
    assert offered(complete_jobs, "d") == ["day"]
    assert offered(complete_jobs, log_dir=logs) == ["bcdefg", "cdefgh", "day", "night", "训练"]


@pytest.mark.parametrize(
    ("verb", "which"),
    [
        *((verb, complete_running_jobs) for verb in ("status", "stop", "stacks")),
        *((verb, complete_jobs) for verb in ("logs", "report", "plot", "again")),
    ],
)
def test_each_command_offers_its_own(verb, which):
    (argument,) = (each for each in command(verb).params if each.name == "job")
    assert argument._custom_shell_complete is which
