"""From an exit and a count to a decision."""

from functools import partial

import pytest

from fleetrun.pod.policy import GiveUp, Restart, decide, is_symptom
from fleetrun.pod.process import Exit


@pytest.mark.parametrize(
    ("code", "restarts", "decision"),
    [
        (1, 0, Restart(0.0, 1, 3)),
        (1, 1, Restart(0.5, 2, 3)),
        (1, 2, Restart(1.0, 3, 3)),
        (1, 3, GiveUp("--max_restart is 3")),
        (1, 4, GiveUp("--max_restart is 3")),
        (0, 0, Restart(0.0, 1, 3)),
        (-9, 0, Restart(0.0, 1, 3)),
        (-2, 0, Restart(0.0, 1, 3)),
        (143, 2, Restart(1.0, 3, 3)),
        (2, 0, GiveUp("exit code 2: a restart will not help")),
        (126, 1, GiveUp("exit code 126: a restart will not help")),
        (127, 0, GiveUp("exit code 127: a restart will not help")),
    ],
)
def test_decisions(code, restarts, decision):
    assert decide(Exit(code), restarts, limit=3) == decision


def test_restarts_can_be_off():
    assert decide(Exit(1), 0, limit=0) == GiveUp("restarts are off (--max_restart 0)")


def test_the_wait_doubles_up_to_the_longest():
    policy = partial(decide, limit=1000, backoff=0.5, longest=30.0)
    waits = [policy(Exit(1), restarts).after for restarts in range(10)]
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert policy(Exit(1), 999).after == 30.0


def test_even_a_million_restarts_have_a_wait():
    assert decide(Exit(1), 999_999, limit=1_000_000).after == 30.0


@pytest.mark.parametrize(
    ("message", "symptom"),
    [
        ("RuntimeError: Timed out waiting 8000ms for send operation to complete", True),
        ("DistNetworkError: Connection reset by peer", True),
        ("ServerError: server 1 at 127.0.0.1:5 has not answered PULL for 60 s", True),
        ("TrainerLostError: trainer 1 is lost", True),
        ("ServerError: server 0 refused PUSH (FAILED): the journal cannot be written", False),
        ("ValueError: bad input", False),
    ],
)
def test_which_errors_may_be_the_fault_of_another(message: str, symptom: bool):
    assert is_symptom(Exit(1), message) is symptom
