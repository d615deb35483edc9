"""`fleetrun stacks`: whose stacks are meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetrun.commands.stacks import command, targets
from fleetrun.control.client import Running
from fleetrun.errors import LaunchError, UsageError


def container(role: str, rank: int, pid: object) -> dict[str, object]:
    return {
        "name": f"{role}.{rank}",
        "role": role,
        "rank": rank,
        "pid": pid,
        "log": f"/log/{role}.{rank}.log",
    }


def running(folder: Path, *containers: object, **status: object) -> Running:
    said = {"containers": list(containers), **status} if containers or status else {}
    return Running(job="j", pod="abcdef", log_dir=folder, socket=folder / "s", pid=1, status=said)


def named(there: Running, role: str | None = None, rank: str | None = None) -> list[tuple[str, int, str]]:
    return [(each.title, each.pid, each.mark) for each in targets(there, role, rank, "stacks")]


ALL = (container("ps", 0, 10), container("trainer", 0, 11), container("trainer", 1, 12))


def test_all_that_run(tmp_path: Path):
    there = running(tmp_path, *ALL, container("trainer", 2, None))
    assert named(there) == [
        ("server 0", 10, "abcdef.ps.0"), ("trainer 0", 11, "abcdef.trainer.0"),
        ("trainer 1", 12, "abcdef.trainer.1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("role", "rank", "titles"),
    [
        ("ps", None, ["server 0"]),
        ("trainer", "1", ["trainer 1"]),
        (None, "0", ["trainer 0"]),
        ("ps,trainer", "0", ["server 0", "trainer 0"]),
    ],
)
def test_roles_and_ranks(tmp_path: Path, role: str | None, rank: str | None, titles: list[str]):
    assert [title for title, *_ in named(running(tmp_path, *ALL), role, rank)] == titles


def test_a_rank_that_is_not_there_is_an_error(tmp_path: Path):
    with pytest.raises(UsageError, match="no such process"):
        named(running(tmp_path, *ALL), None, "9")


@pytest.mark.parametrize(
    "said", [None, 3, "x", [1, "a", None], [{"pid": "7"}], [{"pid": 7.5, "name": "a"}], [{}]]
)
def test_an_answer_of_another_form_names_nobody(tmp_path: Path, said: object):
    with pytest.raises(LaunchError, match="no running process"):
        named(running(tmp_path, **{"containers": said, "state": "running"}))


def test_a_launcher_that_does_not_answer_has_written_down_whom_it_started(tmp_path: Path):
    there = running(tmp_path)
    known = [{"name": f"trainer.{rank}", "role": "trainer", "rank": rank, "index": rank, "log": "t.log"}
             for rank in range(2)]  # fmt: skip
    events = [
        {"time": 1.0, "event": "launch", "containers": known},
        {"time": 2.0, "event": "started", "container": "trainer.0", "pid": 20, "attempt": 0},
        {"time": 2.0, "event": "started", "container": "trainer.1", "pid": 21, "attempt": 0},
        {"time": 3.0, "event": "exited", "container": "trainer.0", "pid": 20},
    ]
    there.record.write_text("".join(json.dumps(each) + "\n" for each in events))
    assert named(there) == [("trainer 1", 21, "abcdef.trainer.1")]


def test_its_help_says_what_the_exit_codes_mean():
    with command.make_context("stacks", [], resilient_parsing=True) as context:
        text = command.get_help(context)
    assert "Exit codes:" in text
    assert "Examples:" in text
