"""What `--role`, `--rank` and `--since` mean."""

import time
from pathlib import Path

import pytest

from fleetrun.commands.choosing import choose, described, moment
from fleetrun.errors import UsageError
from fleetrun.record.history import Known

JOB = [
    Known(name=f"{role}.{index}", role=role, rank=rank, index=index, log=Path("x.log"))
    for role, index, rank in [
        ("pre_hook", 0, None),
        ("ps", 0, 0), ("ps", 1, 1),
        ("trainer", 0, 4), ("trainer", 1, 5), ("trainer", 2, 6), ("trainer", 3, 8),
    ]
]  # fmt: skip


@pytest.mark.parametrize(
    ("role", "rank", "names"),
    [
        (None, None, "pre_hook.0 ps.0 ps.1 trainer.0 trainer.1 trainer.2 trainer.3"),
        ("ps", None, "ps.0 ps.1"),
        ("server", None, "ps.0 ps.1"),
        ("Servers", None, "ps.0 ps.1"),
        ("worker", "4", "trainer.0"),
        (None, "4,6", "trainer.0 trainer.2"),
        (None, "5-8", "trainer.1 trainer.2 trainer.3"),
        ("ps,trainer", "0-4", "ps.0 ps.1 trainer.0"),
        ("pre_hook", None, "pre_hook.0"),
        (None, " 4 , 4", "trainer.0"),
    ],
)
def test_whom_they_choose(role, rank, names):
    assert [each.name for each in choose(JOB, role, rank)] == names.split()


@pytest.mark.parametrize(
    ("role", "rank", "message"),
    [
        ("heter", None, "--role heter: there is no such process here"),
        (None, "9", "--rank 9: there is no such process here"),
        (None, "0", "--rank 0: there is no such process here"),
        ("boss", None, "--role boss: there is no such role"),
        (None, "x", "--rank x: it must be ranks"),
        (None, "", "--rank : it must be ranks"),
        (None, "3-1", "--rank 3-1: it must be ranks"),
        (None, "-1", "--rank -1: it must be ranks"),
        (None, "0-99999999999", "it must be ranks"),
        (None, "٣", "it must be ranks"),
    ],
)
def test_whom_there_is_not(role, rank, message):
    with pytest.raises(UsageError, match=message):
        choose(JOB, role, rank)


def test_the_hint_names_whom_there_is():
    assert described(JOB) == "pre_hook, ps 0-1, trainer 4-6,8"
    with pytest.raises(UsageError, match="names no processes"):
        choose([], None, None)


NOW = time.mktime((2026, 11, 22, 7, 30, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("30s", 30),
        ("90", 90),
        ("10m", 600),
        ("1.5h", 5400),
        ("2d", 172800),
        ("10m ago", 600),
        ("07:15", 900),
        ("07:29:30", 30),
        ("08:00", 86400 - 1800),
        ("2026-11-22 07:00", 1800),
        ("2026-11-22T07:29:59", 1),
        ("2026-11-22", 27000),
    ],
)
def test_since_when(text, ago):
    assert moment(text, NOW) == pytest.approx(NOW - ago)


@pytest.mark.parametrize("text", ["", "x", "-5m", "10 parsecs", "25:00", "2026-13-01", "nan", "1e9", "٣m"])
def test_what_is_no_moment(text):
    with pytest.raises(UsageError, match="--since"):
        moment(text, NOW)
