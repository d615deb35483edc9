"""The status of a job as a row of text."""

import math

import pytest

from fleetrun.console.status_text import (
    CurrentActivity,
    StatusFields,
    activity_text,
    status_fields,
    status_row,
)
from fleetrun.console.text import columns, cut
from fleetrun.envs.contract import Mode, Role
from fleetrun.pod.container import Pod
from fleetrun.pod.spec import PodSpec
from tests.support.pods import spec_of
from tests.support.record_lines import line, met, set_pod, waits
from tests.support.status import job_status

# ---- From the answer to `status` to the fields of the status line.


def status(**more):
    container = {
        "role": "trainer",
        "pid": 7,
        "step": None,
        "of": None,
        "left": None,
        "loss": None,
        "rate": None,
        "activity": None,
    }
    given = {
        "elapsed": 1.0, "state": "running", "restarts": 0, "waiting": None, "store": None, "nodes": [],
        "containers": [], **more,
    }  # fmt: skip
    return {**given, "containers": [{**container, **each} for each in given["containers"]]}


def test_a_launch_that_has_no_pod_yet(tmp_path):
    """The keys are those that the status answers with."""
    status = job_status(clock=iter([5.0, 7.5, 7.5]).__next__)
    facts = status_fields(status.fields())
    assert (facts.elapsed, facts.up, facts.state, facts.activity) == (2.5, (), "", None)


def test_a_pod_of_which_nothing_runs(tmp_path):
    status = job_status()
    specs = [spec_of(tmp_path, "true", Role.SERVER, 0), spec_of(tmp_path, "true", Role.TRAINER, 0)]
    spec = PodSpec(name="x", job_id="x", mode=Mode.PS, containers=tuple(specs), log_dir=tmp_path)
    set_pod(status, Pod(spec), 2)
    facts = status_fields(status.fields())
    assert facts.up == (("trainer", 0, 1), ("ps", 0, 1)), "trainers first"
    assert (facts.state, facts.restarts) == ("starting", 2)


def test_waiting_for_machines(tmp_path):
    status = job_status()
    waits(status, 3, 4, ["10.0.0.7"])
    assert status_fields(status.fields()).activity == CurrentActivity("3 of 4 nodes, waiting for 10.0.0.7")
    waits(status, 1, 4, ["a", "b", "c"])
    assert status_fields(status.fields()).activity == CurrentActivity("1 of 4 nodes, waiting for a, b ...")
    waits(status, 1, 4, [])
    assert status_fields(status.fields()).activity == CurrentActivity("1 of 4 nodes, waiting for more")


def test_what_is_waited_for_has_an_end(tmp_path):
    now = [5.0]
    status = job_status(clock=lambda: now[0])

    def told():
        return activity_text(status_fields(status.fields()).activity)

    now[0] = 8.0
    line(status, "node", store="etcd", limit=600.0)
    now[0] = 35.0
    assert told() == "waiting for etcd, 9:30 left", "since the launcher began"
    line(status, "node", store=None)
    waits(status, 1, 2, ["h2"], left=65.0)
    assert told() == "1 of 2 nodes, waiting for h2, 1:05 left"
    met(status, ["h1", "h2"], 0)
    now[0] = 100.0
    line(status, "node", store="etcd", limit=600.0)
    assert told() == "waiting for etcd, 10:00 left"
    now[0] = 9999.0
    assert told() == "waiting for etcd, 0:00 left"


def test_a_stop_tells_for_which_processes_it_waits():
    both = status(state="ending", containers=[{"index": 0}, {"index": 1}])
    assert "waiting" not in status_row(status_fields(both, stopping_for=1.0), 80)
    row = status_row(status_fields(both, stopping_for=9.4), 80)
    assert row == "0:00:01 | ending | trainers 2/2 | waiting for 2 processes to end, 9s"
    one = status(containers=[{"pid": None}, {"role": "ps", "index": 0, "rank": 1}])
    assert status_fields(one, stopping_for=9.4).activity == CurrentActivity("waiting for server 1 to end, 9s")


def test_since_when_processes_are_asked_to_end(tmp_path):
    now = [5.0]
    status = job_status(clock=lambda: now[0])
    assert status.stopping_for() is None
    line(status, "node", why="a node is lost", restart=False)
    now[0] = 8.0
    line(status, "ending", reason="got SIGTERM")
    assert status.stopping_for() == 3.0


def test_silence_is_told_where_nothing_explains_it():
    running = status(containers=[{"step": 4}])
    assert status_row(status_fields(running, silent_for=19.9), 80) == "0:00:01 | trainers 1/1 | step 4"
    silent = status_fields(running, silent_for=24.4)
    assert status_row(silent, 80) == (
        "0:00:01 | trainers 1/1 | step 4 | no activity for 24 s: fleetrun stacks"
    )
    why = status_fields(running, silent_for=68.0, waits_for="not entered: trainer 1, fleetrun why")
    assert status_row(why, 80).endswith("no activity for 1m08s: not entered: trainer 1, fleetrun why")
    assert status_row(silent, 60) == "0:00:01 | step 4 | no activity for 24 s: fleetrun stacks"
    assert "for 2m05s:" in status_row(status_fields(running, silent_for=125.0), 80)
    saving = status(containers=[{"activity": {"what": "saving", "done": None, "of": None}}])
    assert "no activity" not in status_row(status_fields(saving, silent_for=60.0), 80)


def test_what_takes_long():
    activity = {"what": "saving", "done": 1, "of": 2}
    facts = status_fields(status(containers=[{"step": 4, "loss": 0.5, "rate": 9.0, "activity": activity}]))
    assert (facts.step, facts.loss, facts.speed, facts.activity) == (
        4,
        0.5,
        "9 samples/s",
        CurrentActivity("saving", 1, 2),
    )


def test_how_many_are_up():
    facts = status_fields(
        status(containers=[{}, {"pid": None}, {"role": "ps"}, {"role": "evaluator", "pid": None}])
    )
    assert facts.up == (("trainer", 1, 2), ("ps", 1, 1), ("evaluator", 0, 1))


def test_step_and_loss_are_the_newest_of_any_trainer():
    containers = [{"role": "ps", "step": 9}, {}, {"step": 5, "loss": 0.5}, {"step": 6}]
    facts = status_fields(status(containers=containers))
    assert (facts.step, facts.loss) == (6, 0.5)
    facts = status_fields(status(containers=[*containers, {"step": 8, "loss": 0.25}, {"step": 8, "loss": 1}]))
    assert (facts.step, facts.loss) == (8, 0.25)
    assert status_fields(status(containers=[{"loss": 0.5}])).loss == 0.5


def test_on_several_machines_the_machines_are_counted():
    nodes = [{"rank": rank, "title": f"h{rank}", "this": rank == 0} for rank in range(2)]
    facts = status_fields(status(nodes=nodes, containers=[{}]))
    assert facts.up == (("node", 2, 2),)
    assert status_row(facts, 80) == "0:00:01 | nodes 2/2"
    assert status_fields(status(nodes=nodes[:1], containers=[{}]), most_nodes=4).up == (("node", 1, 4),)
    assert status_fields(status(containers=[{}]), most_nodes=4).up == (("trainer", 1, 1),)


def test_the_speed_is_that_of_all_trainers():
    assert status_fields(status(containers=[{"rate": 2.0}, {}, {"rate": 3.0}])).speed == "5 samples/s"
    assert status_fields(status(containers=[{}])).speed == ""


def test_a_trainers_word_about_what_takes_long_comes_first():
    loading = {"what": "loading", "done": None, "of": None}
    saving = {"what": "saving", "done": 1, "of": 2}
    both = [{"role": "ps", "activity": loading}, {"activity": saving}]
    assert status_fields(status(containers=both)).activity == CurrentActivity("saving", 1, 2)
    assert status_fields(status(containers=both[:1])).activity == CurrentActivity("loading")


def test_states_that_are_not_the_usual_have_a_word():
    words = [
        status_fields(status(state=state)).state
        for state in ("running", "restarting", "ending", "leaving", "?")
    ]
    assert words == ["", "restarting", "ending", "leaving", ""]


# ---- The text of the status line, and which fields it drops when the terminal is narrow.

ALL = StatusFields(
    elapsed=751.9,
    up=(("trainer", 2, 2), ("ps", 0, 1)),
    step=1234,
    loss=0.02314,
    speed="12.3k samples/s",
    restarts=1,
    state="restarting",
    activity=CurrentActivity("loading tables", 4, 10),
)


def test_everything_in_one_row():
    assert status_row(ALL, 200) == (
        "0:12:31 | restarting | trainers 2/2 | servers 0/1 | step 1,234 | loss 0.02314 | 12.3k samples/s | "
        "1 restart | loading tables [####......] 4/10"
    )


def test_steps_of_steps_and_the_time_left():
    running = status(containers=[{"step": 1200, "of": 10_000, "left": 4000.0}])
    assert status_row(status_fields(running), 80) == "0:00:01 | trainers 1/1 | step 1,200/10,000 | 1h06m left"


def test_the_speed_is_in_steps_where_no_samples_are_counted():
    """As of a script of plain torch, whose steps are counted for it."""
    steps = {"step": 60, "step_seconds": 0.25}
    assert status_row(status_fields(status(containers=[steps])), 80).endswith("step 60 | 4 steps/s")
    both = status(containers=[{**steps, "rate": 10.0}, {**steps, "rate": 2.0}])
    assert status_row(status_fields(both), 80).endswith("step 60 | 12 samples/s")


def test_what_nobody_knows_is_not_there():
    assert status_row(StatusFields(elapsed=1.0, up=(("trainer", 1, 1),)), 80) == "0:00:01 | trainers 1/1"


def test_nothing_at_all():
    assert status_row(StatusFields(), 80) == "0:00:00"


def test_it_always_fits():
    assert [width for width in range(200) if columns(status_row(ALL, width)) > width] == []


@pytest.mark.parametrize(
    ("width", "gone", "there"),
    [
        (120, "samples/s", "trainers 2/2"),
        (100, "trainers", "loss 0.02314"),
        (80, "loss", "1 restart"),
        (70, "1 restart", "step 1,234"),
        (60, "step", "loading tables [####......] 4/10"),
        (20, "loading", "0:12:31"),
    ],
)
def test_what_matters_least_goes_first(width, gone, there):
    row = status_row(ALL, width)
    assert gone not in row
    assert there in row


def test_the_end_is_cut_where_not_even_the_time_fits():
    assert status_row(ALL, 3) == "0:1"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (CurrentActivity("saving"), "saving"),
        (CurrentActivity("saving", 3), "saving 3"),
        (CurrentActivity("saving", 0, 4), "saving [..........] 0/4"),
        (CurrentActivity("saving", 4, 4), "saving [##########] 4/4"),
        (CurrentActivity("saving", 9, 4), "saving [##########] 9/4"),
        (CurrentActivity("saving", -1, 4), "saving [..........] -1/4"),
        (CurrentActivity("saving", 1, 0), "saving 1"),
        (CurrentActivity("saving", math.nan, 4), "saving"),
        (CurrentActivity("saving", 1, math.inf), "saving 1"),
        (CurrentActivity("x" * 100), "x" * 57 + "..."),
        (CurrentActivity("a\x1b[2Jb\nc\x07"), "ab\\nc\\x07"),
    ],
)
def test_an_activity_in_the_row(what, text):
    assert activity_text(what) == text


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e300, 5e-324])
def test_a_loss_that_is_no_number_any_more(loss):
    assert f"loss {loss:.4g}" in status_row(StatusFields(loss=loss), 80)


@pytest.mark.parametrize(("text", "width", "left"), [("abc", 2, "ab"), ("一二三", 5, "一二"), ("一", 1, "")])
def test_wide_characters_are_not_halved(text, width, left):
    assert cut(text, width) == left
