"""When a process tells its progress, and what."""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
from typing import Any

import numpy as np
import pytest

from trainers.progress.meter import MOST_NAMES, PERIOD, Meter
from trainers.progress.values import Reader


class Wire:
    """A channel that keeps what was sent. `open`: whether it takes anything."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.open = True
        self.reads = True

    def send(self, datagram: bytes) -> bool:
        if self.open:
            self.said.append(json.loads(datagram))
        return self.open

    def wait(self, seconds: float) -> bool:
        """Until somebody reads, who does."""
        self.open = self.reads
        return self.reads

    def close(self) -> None:
        self.open = False


class Script:
    """A meter, its channel, and its time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wire = Wire()
        self.meter = Meter("p.trainer.0", self.wire, lambda: self.now, lambda: 1e9)  # type: ignore[arg-type]

    def later(self, seconds: float = PERIOD) -> Meter:
        self.now += seconds
        return self.meter

    @property
    def last(self) -> dict[str, Any]:
        return self.wire.said[-1]

    def told(self, key: str) -> list[Any]:
        return [said.get(key) for said in self.wire.said]


@pytest.fixture
def script() -> Script:
    return Script()


def test_the_first_step_is_told_at_once(script):
    script.meter.step(32, 0.5, {"lr": 0.1})
    assert script.wire.said == [
        {"mark": "p.trainer.0", "step": 1, "samples": 32, "loss": 0.5, "values": {"lr": 0.1},
         "activity": None, "time": 1e9}
    ]  # fmt: skip


def test_and_then_two_reports_a_second(script):
    for _ in range(1000):
        script.later(0.001).step(32, 0.5)
    assert [each["step"] for each in script.wire.said if "loss" in each] == [1, 501]
    assert script.told("samples") == [32 * step for step in script.told("step")]


def test_how_many_steps_there_will_be_is_said_once_and_told_always(script):
    script.meter.step(of=np.int64(500))
    script.later().step()
    script.later().report(of="many")
    script.later().report(step=9, of=600)
    assert script.told("of") == [500, 500, 500, 600]


def test_between_two_reports_the_step_is_told_ten_times_a_second(script):
    script.meter.report(loss=0.5, step=0)
    with script.meter.activity("saving"):
        for step in range(1, 400):
            script.later(0.001).report(loss=0.5, step=step)
    begun = script.wire.said[1:-1]
    assert [each["step"] for each in begun] == [0, 100, 200, 300]
    assert not any("loss" in each for each in begun), "it waits for the next report"
    assert {each["activity"]["what"] for each in begun} == {"saving"}
    assert script.last["step"] == 399
    count = len(script.wire.said)
    for _ in range(4):
        script.later(0.01).heartbeat()
    assert len(script.wire.said) == count, "the same step is not told again"


def test_at_the_end_what_was_not_told_is(script):
    script.meter.step(32, 0.5)
    script.meter.flush()
    assert script.told("step") == [1]
    script.meter.step(32, 0.25)
    script.meter.flush()
    script.meter.flush()
    assert script.told("step") == [1, 2]
    assert script.told("loss") == [0.5, 0.25]


def test_a_value_is_told_once_the_last_one(script):
    script.meter.log_scalar("auc", 0.1)
    for number in range(10):
        script.meter.log_scalar("auc", number)
    script.later().log_scalar("lr", 0.5)
    script.later().heartbeat()
    assert script.told("values") == [{"auc": 0.1}, {"auc": 9.0, "lr": 0.5}, {}]
    assert "step" not in script.last
    assert "samples" not in script.last


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1e308])
def test_a_loss_that_is_no_number_is_news(script, loss):
    script.meter.step(loss=loss)
    assert str(script.last["loss"]) == str(loss)


@pytest.mark.parametrize("wrong", ["much", [1, 2], {}, object(), b"x", 1j])
def test_nothing_that_a_script_gives_raises(script, wrong):
    script.meter.step(wrong, wrong, {"x": wrong, "y": 1})
    script.later().report(wrong, wrong, wrong)
    script.later().log_scalar(wrong, 2)
    script.later().log_scalar("z", wrong)
    assert script.told("loss") == [None] * 4
    assert script.wire.said[0]["values"] == {"y": 1.0}
    assert script.last["step"] == 1


class Wrong:
    """Raises whatever it is asked for."""

    def __init__(self, error):
        self._error = error

    def __getattr__(self, name):
        raise self._error

    def __float__(self):
        raise self._error


@pytest.mark.parametrize("error", [AttributeError, KeyError, RuntimeError, ZeroDivisionError])
def test_whatever_it_raises_itself(script, error):
    wrong = Wrong(error("from within"))
    script.meter.step(wrong, wrong, {"x": wrong, "y": 1})
    script.later().report(wrong, wrong, wrong)
    assert script.told("loss") == [None] * 2
    assert script.wire.said[0]["values"] == {"y": 1.0}


@pytest.mark.parametrize("samples", [-5, math.nan, 1 << 70])
def test_no_number_of_samples_is_none(script, samples):
    script.meter.step(samples)
    assert "samples" not in script.last


def test_names_are_made_such_as_can_be_shown(script):
    script.meter.step(scalars={"": 1, "a\x1b[2J\n": 2, "x" * 1000: 3})
    assert script.last["values"] == {"?": 1, "a?[2J?": 2, "x" * 100: 3}


def test_only_so_many_names_are_taken(script, capsys):
    for number in range(MOST_NAMES + 50):
        script.meter.log_scalar(f"n{number}", number)
    script.later().step()
    names = {name for said in script.wire.said for name in said["values"]}
    assert len(names) == MOST_NAMES
    assert capsys.readouterr().err.count("further names are ignored") == 1


def test_a_stderr_that_is_closed_is_no_reason_to_end_a_training(script, monkeypatch):
    stderr = io.StringIO()
    stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    for number in range(MOST_NAMES):
        script.meter.log_scalar(f"n{number}", number)


def test_what_the_launcher_did_not_take_is_told_later(script):
    script.wire.open = False
    script.meter.step(32, 0.5, {"auc": 0.7, "lr": 0.1})
    script.meter.log_scalar("lr", 0.2)
    script.wire.open = True
    script.meter.flush()
    assert script.wire.said[0]["values"] == {"auc": 0.7, "lr": 0.2}
    assert script.wire.said[0]["loss"] == 0.5


@pytest.mark.parametrize(("reads", "told"), [(True, [1]), (False, [])])
def test_last_words_wait_a_moment_for_a_launcher_that_is_busy(script, reads, told):
    script.wire.open, script.wire.reads = False, reads
    script.meter.step()
    script.meter.end()
    assert script.told("step") == told


class Gpu:
    """What a number is on that is there at the third look; never, if it is stuck."""

    def __init__(self, stuck: bool) -> None:
        self.stuck = stuck
        self.looks = 0

    def capturing(self) -> bool:
        return False

    def fetch(self, tensor: Any) -> tuple[Any, Gpu]:
        self.looks = 0
        return tensor, self

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 2 and not self.stuck


@pytest.mark.parametrize(("stuck", "told"), [(False, [None, 0.5, 0.25]), (True, [None])])
def test_the_last_loss_is_told_though_it_is_on_a_gpu(stuck, told):
    wire, times, gpu = Wire(), itertools.count(100.0, 0.01), Gpu(stuck)
    reader = Reader(lambda value: gpu)
    meter = Meter("p.trainer.0", wire, lambda: next(times), lambda: 1e9, reader=reader)  # type: ignore[arg-type]
    meter.step(32, 0.5)
    meter.step(32, 0.25)
    meter.end()
    losses = [said.get("loss") for said in wire.said]
    assert list(dict.fromkeys(losses)) == told


def test_last_words_are_tried_once_more_after_a_time_in_which_nobody_could_look():
    """All the time that there is passes at once; meanwhile the launcher has read."""
    wire, times = Wire(), iter([0.0] * 5 + [60.0] * 2)

    def clock() -> float:
        now = next(times)
        wire.open = now > 0
        return now

    meter = Meter("p.trainer.0", wire, clock, lambda: 1e9)  # type: ignore[arg-type]
    meter.step()
    assert wire.said == []
    meter.end()
    assert [said["step"] for said in wire.said] == [1]
    assert next(times, None) is None


# ---- whose count is right


def test_of_two_optimizers_the_one_that_is_ahead_counts(script):
    for steps in (1, 2, 3):
        script.later().counted(steps)
        script.later().counted(steps)
    script.later().counted(1)
    assert script.told("step") == [1, 1, 2, 2, 3, 3, 3]


def test_a_script_that_counts_itself_is_believed(script):
    script.meter.counted(1)
    script.later().report(step=1000)
    script.later().counted(2)
    script.later().step()
    assert script.told("step") == [1, 1000, 1000, 1001]


def test_a_script_that_tells_samples_is_believed(script):
    script.meter.seen(32)
    script.meter.counted(1)
    script.later().report(samples=8)
    script.later().seen(32)
    script.meter.report(samples=8)
    assert script.told("samples") == [32, 8, 16]


def test_a_training_goes_on_at_the_step_of_its_checkpoint(script):
    script.meter.resumed(500)
    script.meter.counted(1)
    script.later().counted(2)
    assert script.told("step") == [501, 502]
    script.meter.resumed(300)  # a script that has looked at an older one
    script.later().counted(3)
    script.later().step()
    assert script.told("step") == [501, 502, 301, 302]


def test_a_checkpoint_tells_how_far_a_training_has_come_whose_steps_are_not_known(script):
    script.meter.saved(7)
    script.later().saved(5)
    script.later().saved(8)
    script.later().optimizer_stepped(1)
    script.later().saved(9)
    assert script.told("step") == [7, 8, 9]
    script.later().saved(40)
    script.later().optimizer_stepped(2)
    assert script.told("step") == [7, 8, 9, 40, 41]


@pytest.mark.parametrize("count", [Meter.step, lambda meter: meter.counted(1)])
def test_steps_that_are_counted_from_elsewhere_follow_the_checkpoint(script, count):
    count(script.meter)
    script.later().saved(300)
    assert script.told("step") == [1, 300]
    script.later().saved(1)
    script.meter.counted(2)
    script.later().step()
    assert script.last["step"] in (301, 302)


def test_a_script_that_numbers_its_steps_is_believed_before_its_checkpoints(script):
    script.meter.report(step=3)
    script.later().saved(300)
    script.meter.heartbeat()
    assert script.told("step") == [3, 3]
    assert script.told("saved") == [None, True]


# ---- activities


def test_an_activity_is_told_when_it_begins_and_when_it_is_over(script):
    script.meter.step()
    with script.meter.activity("loading tables", of=10) as loading:
        assert script.last["activity"] == {"what": "loading tables", "done": 0, "of": 10}
        loading.advance(3)
        assert script.last["activity"]["done"] == 0
        script.now += PERIOD
        loading.advance()
        assert script.last["activity"]["done"] == 4
    assert script.last["activity"] is None
    assert len(script.wire.said) == 4


def test_the_innermost_activity_is_told(script):
    with script.meter.activity("loading"):
        with script.meter.activity("reading"):
            assert script.last["activity"]["what"] == "reading"
        assert script.last["activity"]["what"] == "loading"
    assert script.told("activity")[-1] is None


def test_an_activity_that_fails_is_over_too(script):
    with pytest.raises(KeyError), script.meter.activity("loading"):
        raise KeyError
    assert script.last["activity"] is None


def test_short_activities_in_every_step_do_not_flood(script):
    for _ in range(1000):
        script.now += 0.001
        with script.meter.activity("waiting"):
            pass
    assert len(script.wire.said) <= 2 * (10 + 3)


def test_but_some_in_a_row_are_all_told(script):
    for what in ("waiting for the servers", "waiting for the others", "loading"):
        with script.meter.activity(what):
            assert script.last["activity"]["what"] == what


@pytest.mark.parametrize(
    ("of", "told"), [(-1, None), (math.nan, None), ("many", None), (2.5, 2.5), (None, None),
     (np.int64(10), 10), (10**400, None), (np.float32(2.5), 2.5), (True, 1)],
)  # fmt: skip
def test_parts_that_are_no_number_are_not_told(script, of, told):
    with script.meter.activity("x", of=of):
        assert script.last["activity"]["of"] == told


# ---- nobody listens


def test_without_a_launcher_nothing_is_kept():
    meter = Meter("", None)
    meter.step(32, 0.5, {"lr": 0.1})
    meter.report(5, 32, 0.5)
    meter.log_scalar("a", 1)
    meter.heartbeat()
    meter.counted(3)
    meter.has_loss(0.5)
    with meter.activity("x", of=3) as activity:
        activity.advance()
    meter.flush()
    assert meter.steps == 0
    assert not meter._given


def test_a_child_speaks_for_nobody(script):
    script.meter.turn_off()
    script.meter.step()
    script.meter.flush()
    assert script.wire.said == []


def test_a_signal_handler_that_reports_during_a_report_does_no_harm(script):
    send = script.wire.send

    def interrupted(datagram: bytes) -> bool:
        script.later(10.0).step(1)  # as a handler would, in the middle of it
        return send(datagram)

    script.wire.send = interrupted
    script.meter.step(1)
    assert script.told("step") == [1]
    script.wire.send = send
    script.later(10.0).step(1)
    assert script.told("step") == [1, 3]


def test_what_a_server_counts_leaves_its_activity_as_it_is(script):
    with script.meter.activity("loading tables", of=2):
        assert script.meter.tables({"step": 3}, {"user": {"rows": 7}}, {"user": {"17": 0.5}})
    assert script.wire.said[1] == {
        "mark": "p.trainer.0", "time": 1e9, "server": {"step": 3}, "tables": {"user": {"rows": 7}},
        "activity": {"what": "loading tables", "done": 0, "of": 2},
    }  # fmt: skip
    assert script.wire.said[2]["hot"] == {"user": {"17": 0.5}}
    script.wire.open = False
    assert not script.meter.tables({}, {}, {})
    assert not Meter("p.trainer.0", None).tables({}, {}, {})
