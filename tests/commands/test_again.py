"""`fleetrun again`: which record, whose, and from where; and the words that it comes to."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fleetrun.commands.again import launch_arguments, trusted
from fleetrun.commands.find import NoJobError
from fleetrun.errors import LaunchError, UsageError
from tests.support.serving import serving, status_of


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "work").mkdir()


def record(pod: str = "abcdef", job: str = "night", folder: str = "log", **fields: Any) -> Path:
    event = {"time": 1.0, "event": "launch", "job": job, "pod": pod, "argv": ["--job_id=night", "a.py", "x"]}
    event |= {"cwd": str(Path.cwd() / "work"), "job_file": {}, **fields}
    Path(folder).mkdir(exist_ok=True)
    path = Path(folder, f"{job}.{pod}.events.jsonl")
    path.write_text(json.dumps(event) + "\n")
    return path


def test_the_newest_from_where_it_was_started() -> None:
    os.utime(record("aaaaaa", argv=["old.py"]), (1, 1))
    record("bbbbbb")
    words, environ = launch_arguments([], {"PADDLE_NNODES": "2", "HOME": "/me"})
    assert words == ["--job_id=night", "--", "a.py", "x"]
    assert environ == {"HOME": "/me"}
    assert Path.cwd().name == "work"


@pytest.mark.parametrize("word", ["night", "nig", "abcdef", "abc"])
def test_by_a_name_and_with_other_options(word: str) -> None:
    record()
    words, _ = launch_arguments([word, "--job-id=day", "--nnodes", "2"], {})
    assert words == ["--job-id=day", "--nnodes=2", "--", "a.py", "x"]


def test_in_another_folder_and_with_what_its_job_file_said_beside_its_record() -> None:
    record(folder="logs", job_file={"script": "${x}.py", "environment": {"A": "1"}}, argv=["--nnodes=1"])
    here = Path.cwd()
    kept = here / "logs" / "night.abcdef.job.toml"
    words, _ = launch_arguments(["--log-dir", "logs", "night"], {})
    assert words == ["--nnodes=1", f"--config={kept}"]
    assert 'script = "$${x}.py"' in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600
    os.chdir(here)
    assert launch_arguments(["--log_dir=logs"], {})[0] == words, "once more"


def test_what_there_is_not() -> None:
    with pytest.raises(NoJobError):
        launch_arguments([], {})
    record()
    with pytest.raises(NoJobError):
        launch_arguments(["day"], {})
    with pytest.raises(UsageError, match="--log_dir needs a value"):
        launch_arguments(["--log_dir"], {})


@pytest.mark.parametrize(
    ("owner", "uid", "expected"), [(1000, 1000, True), (0, 1000, True), (1000, 0, False), (1001, 1000, False)]
)
def test_another_users_record_is_not_followed(owner: int, uid: int, expected: bool) -> None:
    assert trusted(owner, uid) is expected


def test_a_record_without_a_launch_and_a_folder_that_is_gone() -> None:
    record("aaaaaa", job="one", argv=None)
    with pytest.raises(UsageError, match=r"one\.aaaaaa\.events\.jsonl"):
        launch_arguments(["one"], {})
    record("bbbbbb", job="two", cwd="/nowhere/at/all")
    with pytest.raises(LaunchError, match="cannot change to /nowhere/at/all, where the job was started"):
        launch_arguments(["two"], {})


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """`runs("night", "abcdef")`: such a launch runs."""
    with ExitStack() as open_ones:

        def start(job: str, pod: str) -> None:
            socket = tmp_path / "run" / "fleetrun" / f"{pod}.sock"
            open_ones.enter_context(serving(socket, lambda _: status_of(job, pod)))

        yield start


def test_a_job_that_runs_is_not_started_again(runs: Callable[[str, str], None]) -> None:
    record(job="night")
    runs("night", "bbbbbb")
    for word in ("night", "ni", "bbbbbb"):
        with pytest.raises(UsageError, match=r"night is still running \(pod bbbbbb\)") as error:
            launch_arguments([word], {})
        assert error.value.hint == "`fleetrun stop bbbbbb` ends it."


def test_a_job_that_runs_out_of_sight_is_not_started_again() -> None:
    path = record(host="node7")
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as its launcher does, on a machine that shares the folder
        with pytest.raises(UsageError, match=r"night is still running \(pod abcdef, on node7\)"):
            launch_arguments([], {})
        with path.open("a") as file:
            file.write('{"time": 2.0, "event": "over", "code": 0}\n')
        launch_arguments([], {})


def test_of_several_that_run_all_are_named(runs: Callable[[str, str], None]) -> None:
    record(job="nightly")
    runs("night-a", "bbbbbb")
    runs("night-b", "cccccc")
    with pytest.raises(UsageError, match="'night' fits 2 jobs") as error:
        launch_arguments(["night"], {})
    assert error.value.hint is not None
    assert [line.split(",")[0] for line in error.value.hint.splitlines()] == [
        "night-a (pod bbbbbb", "night-b (pod cccccc",
    ]  # fmt: skip


def test_the_name_of_one_that_ran_is_not_the_beginning_of_one_that_runs(
    runs: Callable[[str, str], None],
) -> None:
    record(job="night")
    runs("night-b", "cccccc")
    assert launch_arguments(["night"], {})[0] == ["--job_id=night", "--", "a.py", "x"]
