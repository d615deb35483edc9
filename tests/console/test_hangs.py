"""What a person reads of a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetrun.console.narrator import hang_places, hang_report
from fleetrun.console.text import columns
from fleetrun.envs.contract import Role
from fleetrun.pod.events import HUNG, Hang
from fleetrun.pod.policy import GiveUp, Restart
from fleetrun.pod.spec import ContainerSpec

SPEC = ContainerSpec(role=Role.TRAINER, rank=0, index=0, argv=("x",), env={}, log=Path("/job/log/x.log"))
LINES = ("trainer 2: load (train.py:7)", "trainers 0, 1, 3: wait (train.py:3)")


def hang(*stacks: str, decision: GiveUp | Restart | None = None) -> Hang:
    why = decision or GiveUp("--max_restart is 3")
    return Hang(silent_for=600.0, containers=(SPEC,), decision=why, stacks=stacks)


def test_the_report():
    assert hang_report(hang(*LINES), 3, 200) == [
        "=" * 80,
        "Hang: no trainer printed or reported anything for 600 s (--hang_timeout); --max_restart is 3, "
        "after 3 restarts",
        "  trainer 2: load (train.py:7)",
        "  trainers 0, 1, 3: wait (train.py:3)",
        "Logs, with the stacks: /job/log",
        "=" * 80,
    ]


@pytest.mark.parametrize("width", [40, 80])
def test_it_fits_a_terminal(width: int):
    long = f"trainers 0-7: {'wait ' * 60}(train.py:3)"
    assert max(map(columns, hang_report(hang(long), 0, width))) <= width


def test_without_stacks_it_says_so():
    assert hang_places(hang(), 80) == ["  Where its processes are is not known."]


def test_nothing_that_a_terminal_obeys_comes_through():
    assert "\x1b" not in "\n".join(hang_report(hang("trainer 0: \x1b[2Jwait"), 0, 80))


@pytest.mark.parametrize(
    ("decision", "reason"),
    [(GiveUp("restarts are off"), "; restarts are off"), (Restart(0.0, 1, 3), "")],
)
def test_the_headline_ends_alike_everywhere_and_the_reason_says_more(decision, reason: str):
    said = hang(decision=decision)
    assert said.headline.endswith(HUNG)
    assert said.reason == said.headline + reason
