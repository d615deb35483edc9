"""`fleetrun report`: the failure report again, and the way to it."""

import json
import math
import re
import time
from dataclasses import replace

import pytest

from fleetrun.commands.report import outcome
from fleetrun.errors import LaunchError, UsageError
from fleetrun.pod.events import HUNG
from fleetrun.record.history import read
from tests.commands.records import BEGAN

REPORT = ["====", "First failure: trainer 1 exited with code 3, after 5.0 s", "  ValueError: x", "===="]


@pytest.fixture
def failed(past):
    job = past()
    job.now += 5
    job.event(
        "exited", container="trainer.1", attempt=0, code=-9, how="was killed by SIGKILL", asked=None, error=""
    )
    job.event("failed", container="trainer.1", attempt=0, restart=True, number=1, limit=1)
    job.event("exited", container="trainer.0", attempt=0, code=-15, how="was killed by SIGTERM", asked=15)
    job.event("restarting", containers=["trainer.0", "trainer.1"])
    job.now += 5
    job.event("exited", container="trainer.1", attempt=1, code=3, how="exited with code 3", asked=None,
              error="ValueError: x\nmore")  # fmt: skip
    job.event("failed", container="trainer.1", attempt=1, restart=False, reason="--max_restart is 1")
    job.over(3, reason="--max_restart is 1", restarts=1, report=REPORT)
    return job


def test_the_report_is_there_again(ask, failed):
    assert ask("report").endswith("\n".join(REPORT) + "\n")


def test_what_led_to_it(ask, failed):
    text = ask("report", "night")
    assert text.startswith("Job night (pod abcdef): failed with exit code 3, --max_restart is 1\n")
    assert "10.0 s" in text
    assert "command: fleetrun 'a b.py'" in text
    story = [line.split("  ", 2)[2] for line in text.splitlines() if re.match("  20", line)]
    assert story == [
        "trainer.1 was killed by SIGKILL; restart 1 of 1",
        "restarted: trainer.0, trainer.1",
        "trainer.1 exited with code 3: ValueError: x; --max_restart is 1",
    ]


def test_as_json(ask, failed):
    said = json.loads(ask("report", "--json"))
    assert (said["job"], said["pod"], said["code"], said["restarts"]) == ("night", "abcdef", 3, 1)
    assert (said["began"], said["ended"], said["running"]) == (BEGAN, BEGAN + 10, False)
    assert said["report"] == REPORT
    assert said["logs"]["trainer.0"] == "log/night.abcdef.trainer.0.log"


def test_a_job_that_went_well(ask, past):
    past().over()
    assert ask("report").startswith("Job night (pod abcdef): completed\n")


def test_a_job_that_was_asked_to_end_did_not_fail(ask, past):
    past().over(130, reason="interrupted")
    assert ask("report").startswith("Job night (pod abcdef): stopped, interrupted, exit code 130\n")
    assert "stopped: interrupted, exit code 130" in ask("history")


def test_a_launcher_that_was_killed_said_nothing(ask, past):
    job = past()
    job.now += 7
    job.event("started", container="trainer.0", pid=1)
    job.now += 60
    job.event("progress", container="trainer.0", step=7)
    job.journal.close()
    text = ask("report")
    assert "ended without an exit code: its launcher was killed" in text
    assert f"last event {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(BEGAN + 67))}, 1m07s\n" in text


def test_where_nobody_can_tell_whether_it_runs_that_is_said(past):
    history = replace(read(past().journal.path), running=None)
    assert outcome(history) == "running, or ended without an exit code"


def test_a_job_that_runs(ask, past):
    past()
    assert ask("report").startswith("Job night (pod abcdef): running\n")


@pytest.mark.parametrize(
    ("event", "fields", "said"),
    [
        ("hung", {"containers": ["trainer.0"], "silent_for": 30.0, "restart": True},
         "no activity for 30.0 s: trainer.0; restart"),
        ("hung", {"containers": ["trainer.0"], "silent_for": 600, "restart": True, "number": 1, "limit": 3,
                  "reason": f"no trainer printed or reported anything for 600 s {HUNG}"},
         "no activity for 10m00s: trainer.0; restart 1 of 3\n"),
        ("hung", {"containers": ["trainer.0"], "silent_for": 600, "restart": False,
                  "reason": f"no trainer printed or reported anything for 600 s {HUNG}; --max_restart is 3"},
         "no activity for 10m00s: trainer.0; --max_restart is 3\n"),
        ("hung", {"silent_for": math.inf, "reason": "it does nothing"},
         "activity for ?: ?; it does nothing\n"),
        ("hung", {"containers": 7, "silent_for": "x"}, "no activity for 0.0 s: ?; no restart"),
        ("ending", {"reason": "got SIGINT; stopping the job"}, "got SIGINT; stopping the job"),
        ("node", {"text": "node 2 was lost"}, "node 2 was lost"),
        ("lost", {"events": 12}, "12 events could not be written"),
        ("exited", {"container": "ps.0", "attempt": 0, "code": 1, "how": "exited with code 1", "asked": None,
                    "out_of_memory": True}, "ps.0 exited with code 1 for lack of memory"),
        ("failed", {}, "None failed; no restart"),
    ],
)  # fmt: skip
def test_what_else_is_worth_a_line(ask, past, event, fields, said):
    job = past()
    job.event(event, **fields)
    job.over(1)
    assert said in ask("report")


def test_a_long_story_is_told_by_its_ends(ask, past):
    job = past()
    for number in range(100):
        job.event("ending", reason=f"reason {number}.")
    job.over(1)
    text = ask("report")
    assert "reason 0." in text
    assert "reason 99." in text
    assert "... 60 more ..." in text
    assert "reason 50." not in text


def test_what_is_written_there_does_nothing_to_a_terminal(ask, past):
    job = past()
    job.event("ending", reason="\x1b]0;title\x07\x1b[2J\u202ebad")
    job.over(1, report=["\x1b[31mred\x1b[0m", 7])
    text = ask("report")
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert text.endswith("red\n7\n")


def test_damage_is_told(ask, past):
    job = past()
    with job.journal.path.open("ab") as file:
        file.write(b"\xff\xff garbage\n")
    job.over()
    assert "log/night.abcdef.events.jsonl that were skipped: 1" in ask("report")


def test_the_newest_launch_of_a_job_is_meant(ask, past):
    past("night", "aaaaaa").over(1)
    past("night", "bbbbbb").over(0)
    assert "pod bbbbbb" in ask("report", "night")
    assert "pod aaaaaa" in ask("report", "aaaaaa")


def test_several_jobs_that_fit_are_listed(ask, past):
    past("night-1", "aaaaaa").over(1)
    past("night-2", "bbbbbb").over(0)
    with pytest.raises(UsageError, match="fits 2 jobs") as raised:
        ask("report", "night")
    assert "night-1 (pod aaaaaa" in str(raised.value.hint)


def test_no_record_at_all(ask):
    with pytest.raises(LaunchError, match="no job"):
        ask("report")
