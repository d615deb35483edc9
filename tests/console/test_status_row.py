"""The text of the status line, and which fields it drops when the terminal is narrow."""

import math

import pytest

from fleetrun.console.status_text import CurrentActivity, StatusFields, activity_text, status_row
from fleetrun.console.text import columns, cut

ALL = StatusFields(
    elapsed=751.9,
    up=(("trainer", 2, 2), ("ps", 0, 1)),
    step=1234,
    loss=0.02314,
    rate=12_345.0,
    restarts=1,
    state="restarting",
    activity=CurrentActivity("loading tables", 4, 10),
)


def test_everything_in_one_row():
    assert status_row(ALL, 200) == (
        "0:12:31 | restarting | trainers 2/2 | servers 0/1 | step 1,234 | loss 0.02314 | 12.3k samples/s | "
        "1 restart | loading tables [####......] 4/10"
    )


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
def test_what_takes_long(what, text):
    assert activity_text(what) == text


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e300, 5e-324])
def test_a_loss_that_is_no_number_any_more(loss):
    assert f"loss {loss:.4g}" in status_row(StatusFields(loss=loss), 80)


@pytest.mark.parametrize(("text", "width", "left"), [("abc", 2, "ab"), ("一二三", 5, "一二"), ("一", 1, "")])
def test_wide_characters_are_not_halved(text, width, left):
    assert cut(text, width) == left
