"""Which job is meant."""

import os
from pathlib import Path

import pytest

from fleetrun.commands.find import (
    EndedJob,
    NoJobError,
    describe_end,
    find_any,
    find_ended,
    find_running,
    matching_jobs,
)
from fleetrun.control.client import Running
from fleetrun.errors import UsageError
from fleetrun.record.journal import Journal, journal_path
from tests.support.serving import serving, status_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where launches of this test run."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run" / "fleetrun"


@pytest.fixture
def runs(folder):
    """`runs("job", "abcdef")`: such a launch runs."""
    open_ones = []

    def start(job: str, pod: str, **more: object) -> None:
        server = serving(folder / f"{pod}.sock", lambda _: status_of(job, pod, **more))
        server.__enter__()
        open_ones.append(server)

    yield start
    for server in open_ones:
        server.__exit__(None, None, None)


def ran(log_dir: Path, job: str, pod: str, heard: float, **over: object) -> Path:
    """Such a launch ran, and was heard of last at this time."""
    log_dir.mkdir(exist_ok=True)
    path = journal_path(log_dir, job, pod)
    journal = Journal(path)
    journal.write("launch", job=job, pod=pod)
    if over:
        journal.write("over", **over)
    journal.close()
    os.utime(path, (heard, heard))
    return path


def past(job: str, pod: str) -> EndedJob:
    return EndedJob(job=job, pod=pod, log_dir=Path(), record=Path(), written=0.0)


JOBS = [
    past("resnet", "abcdef"),
    past("resnet50", "ghijkl"),
    past("bert", "aresne"),
    past("ghijkl", "zzzzzz"),
]


@pytest.mark.parametrize(
    ("word", "pods"),
    [
        ("resnet", ["abcdef"]),  # a whole name, though it begins another
        ("res", ["abcdef", "ghijkl"]),
        ("resnet5", ["ghijkl"]),
        ("b", ["aresne"]),
        ("are", ["aresne"]),
        ("ghijkl", ["ghijkl", "zzzzzz"]),  # a pod, and a job of that name
        ("esnet", []),
        ("RESNET", []),
        (None, ["abcdef", "ghijkl", "aresne", "zzzzzz"]),
    ],
)
def test_what_a_word_can_mean(word, pods):
    assert [each.pod for each in matching_jobs(word, JOBS)] == pods


def test_the_only_one_needs_no_word(runs):
    runs("resnet", "abcdef")
    found = find_running()
    assert (found.job, found.pod, found.log_dir) == ("resnet", "abcdef", Path("/logs"))
    assert find_running("res").pod == find_running("abc").pod == "abcdef"


def test_no_job_runs(folder):
    with pytest.raises(NoJobError, match="no job") as error:
        find_running()
    assert error.value.exit_code == 1
    assert error.value.hint == "`fleetrun report` shows how a job ended."
    with pytest.raises(NoJobError, match="no job 'bert'") as error:
        find_running("bert")
    assert error.value.hint == "`fleetrun report bert` shows how a job ended."


def test_no_such_job_runs_but_others(runs):
    runs("resnet", "abcdef")
    with pytest.raises(NoJobError, match="no job 'bert'") as error:
        find_running("bert")
    assert "resnet (pod abcdef" in error.value.hint


def test_several_are_listed_with_what_tells_them_apart(runs):
    runs("default", "abcdef", started=0.0, log_dir="/one")
    runs("default", "ghijkl", started=10.0, log_dir="/two")
    for word in (None, "default", "def"):
        with pytest.raises(UsageError, match="2 jobs") as error:
            find_running(word)
        first, second = error.value.hint.splitlines()
        assert first.startswith("default (pod abcdef, since 19")
        assert second.endswith("logs in /two)")
    assert find_running("gh").pod == "ghijkl"


def test_names_do_nothing_to_a_terminal(runs):
    runs("a\x1b[2Jb", "abcdef")
    runs("a\nb", "ghijkl")
    with pytest.raises(UsageError) as error:
        find_running()
    assert "\x1b" not in error.value.hint
    assert len(error.value.hint.splitlines()) == 2


def test_of_the_past_the_newest_is_meant(folder):
    ran(Path("log"), "default", "aaaaaa", 100)
    ran(Path("log"), "default", "bbbbbb", 300)
    ran(Path("log"), "other", "cccccc", 200)
    assert find_ended().pod == "bbbbbb"
    assert find_ended("default").pod == "bbbbbb"
    assert find_ended("aaa").pod == "aaaaaa"
    assert find_ended("oth").record == Path("log/other.cccccc.events.jsonl")
    assert find_ended("oth").written == 200


def test_a_beginning_of_several_jobs_of_the_past_is_not_enough(folder):
    ran(Path("log"), "resnet", "aaaaaa", 100)
    ran(Path("log"), "resnext", "bbbbbb", 300)
    with pytest.raises(UsageError, match="fits 2 jobs"):
        find_ended("res")


def test_what_runs_is_not_past(folder, runs):
    ran(Path("log"), "default", "aaaaaa", 100)
    ran(Path("log"), "default", "bbbbbb", 300)
    runs("default", "bbbbbb")
    assert find_ended().pod == "aaaaaa"


@pytest.mark.parametrize("word", [None, "default"])
def test_no_record_of_it(folder, word):
    with pytest.raises(NoJobError, match="record in log"):
        find_ended(word)


def test_what_runs_comes_first(folder, runs):
    ran(Path("log"), "default", "aaaaaa", 100)
    assert isinstance(find_any(), EndedJob)
    runs("default", "bbbbbb")
    assert isinstance(find_any(), Running)
    assert isinstance(find_any("default"), Running)
    assert isinstance(find_any("aaaa"), EndedJob)


def test_a_whole_name_that_ran_goes_before_the_beginning_of_one_that_runs(folder, runs):
    ran(Path("log"), "night", "aaaaaa", 100)
    runs("night2", "bbbbbb")
    assert find_any("night").pod == "aaaaaa"
    assert find_any("nigh").pod == "bbbbbb"
    assert find_any("b").pod == "bbbbbb"


def test_a_folder_of_logs_narrows_it(folder, runs, tmp_path):
    ran(tmp_path / "logs", "old", "aaaaaa", 100)
    runs("one", "bbbbbb", log_dir=str(tmp_path / "one"))
    runs("two", "cccccc", log_dir=str(tmp_path / "two"))
    assert find_any(None, Path("two")).pod == "cccccc"
    assert find_any(None, tmp_path / "logs").pod == "aaaaaa"
    with pytest.raises(NoJobError):
        find_any("one", tmp_path / "two")
    with pytest.raises(UsageError, match="2 jobs"):
        find_any()


def test_neither_runs_nor_ran_while_others_run(folder, runs, tmp_path):
    runs("one", "bbbbbb", log_dir=str(tmp_path / "one"))
    with pytest.raises(
        NoJobError, match="no such job is running here, and no job 'x' has a record in log"
    ) as error:
        find_any("x")
    among, where = error.value.hint.splitlines()[1:]
    assert among.startswith("one (pod bbbbbb")
    assert where.startswith("Use --log_dir")


@pytest.mark.parametrize(("typed", "meant"), [("nihgt", "night"), ("restnet", "resnet"), ("x", None)])
def test_a_name_that_is_almost_one(folder, runs, tmp_path, typed, meant):
    ran(tmp_path / "log", "night", "aaaaaa", 100)
    runs("resnet", "bbbbbb")
    with pytest.raises(NoJobError) as error:
        find_any(typed)
    assert error.value.hint.splitlines()[0] == (f"Did you mean {meant}?" if meant else "Jobs:")


def test_one_that_has_ended_while_others_run(folder, runs, tmp_path):
    ran(tmp_path / "log", "night", "aaaaaa", 100)
    runs("resnet", "bbbbbb")
    with pytest.raises(NoJobError, match="no job 'night'") as error:
        find_running("night")
    assert error.value.hint == "`fleetrun report night` shows how it ended."
    with pytest.raises(NoJobError) as error:
        find_running("restnet")
    assert error.value.hint.splitlines()[:2] == ["Did you mean resnet?", "Jobs:"]


def test_nothing_anywhere(folder):
    with pytest.raises(NoJobError, match="no such job is running here, and no job 'x' has a record in log"):
        find_any("x")


def test_how_it_ended(folder, runs, tmp_path):
    runs("default", "aaaaaa", log_dir=str(tmp_path / "log"))
    found = find_running()
    assert describe_end(found) == ""
    ran(tmp_path / "log", "default", "aaaaaa", 100, code=143, reason="got \x1bSIGTERM")
    assert describe_end(found) == ": got \\x1bSIGTERM, exit code 143"


def test_a_launcher_that_was_killed_has_not_said_how_it_ended(folder, runs, tmp_path):
    runs("default", "aaaaaa", log_dir=str(tmp_path / "log"))
    ran(tmp_path / "log", "default", "aaaaaa", 100)
    assert describe_end(find_running()) == ": its launcher was killed"
    held = Journal(journal_path(tmp_path / "log", "default", "aaaaaa"))
    assert describe_end(find_running()) == ""
    held.close()


def test_how_it_ended_well(folder, runs, tmp_path):
    runs("default", "aaaaaa", log_dir=str(tmp_path / "log"))
    found = find_running()
    ran(tmp_path / "log", "default", "aaaaaa", 100, code=0, reason="")
    assert describe_end(found) == ": exit code 0"
