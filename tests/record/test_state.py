"""The state of a launch after the lines of its record."""

import pytest

from fleetrun.record.state import State

TRAINERS = [{"name": f"trainer.{rank}", "role": "trainer", "rank": rank} for rank in (0, 1)]
EVALUATOR = {"name": "evaluator.0", "role": "evaluator", "rank": 0}


def after(*lines):
    state = State()
    for number, (event, fields) in enumerate(lines):
        state.handle({"time": 100.0 + number, "event": event, **fields})
    return state


def ready(restarts=0, containers=(*TRAINERS, EVALUATOR)):
    return "ready", {"attempt": 0, "restarts": restarts, "containers": containers}


def started(name="trainer.0", pid=7):
    return "started", {"container": name, "pid": pid}


def exited(name="trainer.0", code=3, asked=None):
    return "exited", {"container": name, "code": code, "asked": asked, "how": f"exited with code {code}"}


def failed(name="trainer.0", *, restart=True, beside=False):
    return "failed", {"container": name, "restart": restart, "beside": beside}


def test_before_the_first_pod():
    state = after(("launch", {"containers": TRAINERS}))
    assert (state.state, state.began, state.processes) == ("meeting", 100.0, {})


def test_a_process_over_two_attempts():
    first = (ready(), started(), exited())
    process = after(*first).processes["trainer.0"]
    assert (process.pid, process.started, process.ended, process.code) == (None, 101.0, 102.0, 3)
    process = after(*first, failed(), started(pid=8)).processes["trainer.0"]
    assert (process.pid, process.started, process.ended, process.code) == (8, 104.0, None, None)
    assert (process.starts, process.exits) == (2, {"failed": 1})


@pytest.mark.parametrize(
    ("restart", "state", "why", "restarted"),
    [(True, "restarting", "", 3), (False, "ending", "exited with code 3", 2)],
)
def test_a_failure(restart, state, why, restarted):
    found = after(ready(restarts=2), started(), exited(), failed(restart=restart))
    assert (found.state, found.why, found.restarted) == (state, why, restarted)
    assert found.stopping_since == (None if restart else 103.0)


def test_an_evaluator_changes_nothing_for_the_job():
    beside = failed("evaluator.0", beside=True)
    found = after(ready(), started(), beside, ("restarting", {"containers": ["evaluator.0"]}))
    assert (found.state, found.restarted) == ("running", 0)


def test_a_new_generation_counts_the_restarts_of_the_whole_job_and_keeps_what_it_knows_of_a_rank():
    found = after(ready(), started(), exited(), ready(4, (TRAINERS[0], {**TRAINERS[1], "rank": 5})))
    assert (found.state, found.restarted) == ("starting", 4)
    assert (found.processes["trainer.0"].code, found.processes["trainer.1"].code) == (3, None)


def test_a_hang_is_told_without_what_follows():
    reason = "no trainer printed anything for 9 s (--hang_timeout); --max_restart is 0"
    found = after(ready(), started(), ("hung", {"restart": False, "reason": reason}))
    assert found.why == "no trainer printed anything for 9 s (--hang_timeout)"


def test_what_a_later_version_adds_is_passed_over():
    known = after(ready(), started())
    found = after(ready(), started(), ("dreamt", {"of": "sheep"}), ("handle", {}), exited("trainer.9"))
    assert vars(found).keys() == vars(known).keys()
    assert (found.state, found.processes["trainer.0"].pid) == ("running", 7)
