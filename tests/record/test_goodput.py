"""What the time of a job went into, from the events of its record."""

import itertools

import pytest

from fleetrun.record.goodput import Goodput, Kind, goodput_fields, read_fields, sentence, share

TRAINERS = {"containers": [{"name": "ps.0", "role": "ps"}, {"name": "trainer.0", "role": "trainer"}]}


def counted(*events: tuple[float, str, dict[str, object]], best: int | None = None) -> Goodput:
    found = Goodput(best)
    for time, name, fields in events:
        found.take({"time": time, "event": name, "container": "trainer.0", **fields})
    return found


def begin(at: float = 0.0) -> list[tuple[float, str, dict[str, object]]]:
    return [(at, "launch", {"nnodes": [1, 1]}), (at, "ready", TRAINERS), (at + 1, "started", {})]


def step(time: float, number: int) -> tuple[float, str, dict[str, object]]:
    return (time, "progress", {"step": number})


def test_each_second_has_one_use():
    found = counted(
        *begin(),
        (9, "joined", {"joining": 4.0, "joined": 9.0}),
        step(12, 1),
        step(22, 11),
        (23, "exited", {"code": -9}),
        (25, "started", {}),
        (30, "joined", {"joining": 28.0, "joined": 30.0}),
        step(31, 6),
        step(41, 16),
        step(51, 26),
        (53, "exited", {"code": 0}),
        (54, "over", {}),
    )
    seconds = found.seconds()
    assert sum(seconds.values()) == 54
    assert seconds == pytest.approx(
        {
            Kind.START: 1,
            Kind.IMPORTS: 3 + 3,
            Kind.RENDEZVOUS: 5 + 2,
            Kind.SETUP: 3 + 1,
            Kind.STEPS: 10 + 5 + 10,
            Kind.AGAIN: 5,
            Kind.RESTARTS: 1 + 2,
            Kind.END: 3,
        }
    )
    assert share(seconds) == pytest.approx(25 / 54)
    spans = found.spans()
    assert spans[0].begin == 0
    assert spans[-1].end == 54
    assert all(one.end == other.begin for one, other in itertools.pairwise(spans))


def test_a_job_that_runs_counts_until_now():
    found = counted(*begin(), step(5, 1), step(15, 2))
    assert found.seconds(25) == {Kind.STEPS: 20, Kind.START: 5}
    assert found.seconds() == {Kind.STEPS: 10, Kind.START: 5}
    assert found.spans(25)[-1] == (Kind.STEPS, 15, 25)


def test_time_without_a_step_is_no_progress():
    begun = (*begin(), step(5, 1), step(5.5, 2))
    assert counted(*begun).seconds(40) == {Kind.STEPS: 0.5, Kind.START: 5, Kind.STALL: 34.5}
    assert counted(*begun).spans(40)[-1] == (Kind.STALL, 5.5, 40)
    late = counted(*begun, step(40, 3))
    assert late.seconds(45) == {Kind.STEPS: 40, Kind.START: 5}, "an evaluation, for example"


@pytest.mark.parametrize(("until", "kind"), [(9, Kind.END), (40, Kind.STALL)])
def test_a_stop_is_no_restart(until: float, kind: Kind):
    found = counted(
        *begin(),
        step(5, 1),
        step(5.5, 2),
        (until, "ending", {}),
        (until + 2, "exited", {"code": -15, "asked": 15}),
        (until + 3, "over", {}),
    )
    lost = found.seconds()
    assert lost.pop(kind) == until - 5.5 + 3 * (kind is Kind.END)
    assert {**lost, Kind.END: 3} == {Kind.STEPS: 0.5, Kind.START: 5, Kind.END: 3}


def test_a_hang_that_ends_the_job_is_no_restart():
    end = [(65, "hung", {"restart": False}), (67, "exited", {"code": -9, "asked": 9}), (68, "over", {})]
    seconds = counted(*begin(), step(5, 1), step(6, 2), *end).seconds()
    assert seconds == {Kind.STEPS: 1, Kind.START: 5, Kind.HANGS: 59, Kind.END: 3}


def test_saves_are_not_steps_and_hangs_have_their_own():
    save = {"what": "saving the checkpoint of step 2", "seconds": 4.0}
    found = counted(
        *begin(),
        step(5, 1),
        (14, "activity", save),
        (15, "activity", {"what": "evaluating", "seconds": 1.0}),
        step(15, 2),
        (75, "hung", {}),
        (76, "exited", {"code": -9}),
        (77, "started", {}),
    )
    assert found.seconds() == {
        Kind.STEPS: 6,
        Kind.START: 5,
        Kind.CHECKPOINTS: 4,
        Kind.HANGS: 60,
        Kind.RESTARTS: 2,
    }


@pytest.mark.parametrize(
    ("code", "asked", "kind"),
    [(0, None, Kind.END), (0, 15, Kind.RESTARTS), (143, 15, Kind.RESTARTS), (-9, None, Kind.RESTARTS)],
)
def test_one_that_ends_well_because_another_failed_waits_for_its_restart(code, asked, kind):
    found = counted(
        *begin(),
        step(5, 1),
        step(15, 2),
        (17, "exited", {"code": code, "asked": asked}),
        (47, "started", {}),
        (48, "over", {}),
    )
    assert found.seconds() == {Kind.STEPS: 10, Kind.START: 6, kind: 32}


def test_a_report_that_is_written_at_the_end_counts_from_when_it_came():
    late = (75, "progress", {"step": 3, "age": 59.0})
    save = {"what": "saving the last checkpoint", "seconds": 40.0}
    begun = (*begin(), step(5, 1), step(15, 2))
    found = counted(*begun, late, (75, "exited", {"code": -6}), (77, "started", {}))
    assert found.seconds() == {Kind.STEPS: 11, Kind.START: 5, Kind.RESTARTS: 61}
    found = counted(*begun, late, (75, "hung", {}), (77, "exited", {"code": -9}), (78, "started", {}))
    assert found.seconds() == {Kind.STEPS: 11, Kind.START: 5, Kind.HANGS: 59, Kind.RESTARTS: 3}
    found = counted(*begun, (60, "activity", save), late, (75, "exited", {"code": 0}), (76, "over", {}))
    assert found.seconds() == {Kind.STEPS: 11, Kind.START: 5, Kind.CHECKPOINTS: 40, Kind.END: 20}


def test_machines_that_wait_and_a_save_longer_than_its_step():
    found = counted(
        (0, "launch", {"nnodes": [2, 4]}),
        (30, "ready", TRAINERS),
        (31, "started", {}),
        step(32, 1),
        (40, "activity", {"what": "saving it", "seconds": 99.0}),
        step(42, 2),
    )
    assert found.seconds() == {Kind.WAITING: 31, Kind.START: 1, Kind.CHECKPOINTS: 10}
    assert share(found.seconds()) is None


def test_a_restart_that_lacks_nodes_waits_for_them():
    lost = (
        (0, "launch", {"nnodes": [2, 2]}),
        (3, "ready", TRAINERS),
        (3, "started", {}),
        step(4, 1),
        step(14, 2),
        (16, "node", {"text": "h2 is gone"}),
        (17, "exited", {"code": -15, "asked": 15}),
        (19, "node", {"text": "1 of 2 nodes have joined", "present": 1}),
        (59, "node", {"text": "node 0 of 2: h1, h2", "generation": 2}),
    )
    again = ((60, "ready", TRAINERS), (61, "started", {}), step(62, 1))
    expected = {Kind.WAITING: 3 + 42, Kind.START: 1 + 1, Kind.STEPS: 10, Kind.RESTARTS: 3 + 2}
    assert counted(*lost, *again).seconds() == expected
    assert counted(*lost).seconds(60)[Kind.WAITING] == 3 + 41


def test_steps_of_an_earlier_launch_are_done_again():
    seconds = counted(*begin(), step(2, 1), step(12, 11), best=6).seconds()
    assert seconds == pytest.approx({Kind.START: 2, Kind.AGAIN: 5, Kind.STEPS: 5})


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"event": "ready", "time": 3},
        {"event": "ready", "time": 3, "containers": [1, {"role": "trainer"}]},
        {"event": "joined", "time": "x"},
        {"event": "progress", "time": 4, "container": None, "step": True},
        {"event": "launch", "time": 1, "nnodes": "many"},
        {"event": 7, "time": 5},
        {"event": "over", "time": 1},
    ],
)
def test_damaged_events_are_passed_over(event: dict[str, object]):
    found = Goodput()
    found.take(event)
    for each in begin(10):
        found.take({"time": each[0], "event": each[1], "container": "trainer.0", **each[2]})
    assert sum(found.seconds().values()) >= 0


def test_in_words_and_for_programs():
    seconds = {Kind.STEPS: 970.0, Kind.IMPORTS: 41.0, Kind.AGAIN: 12.0, Kind.RENDEZVOUS: 0.2}
    assert sentence(seconds, "{:.0f} s".format) == "94.8 %; lost: 41 s imports, 12 s steps done again"
    assert sentence({Kind.STEPS: 1.0}, str) == "100.0 %"
    assert sentence({Kind.IMPORTS: 5.0}, str) == ""
    assert read_fields(goodput_fields(seconds)) == seconds
    assert read_fields(None) == read_fields({"seconds": {"steps": "x", "later": 1}}) == {}
