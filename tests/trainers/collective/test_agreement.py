"""One answer for all ranks, made of what each has heard. Real ranks are in test_stopping."""

import math

from trainers.collective.group import combined
from trainers.notice import Notice


def test_the_first_reason_and_the_earliest_deadline_count() -> None:
    told = [None, ("membership", 9.0), ("stop", 7.5), None]
    assert combined(told, now=100.0) == Notice("membership", 107.5)


def test_without_a_deadline_there_is_none() -> None:
    assert combined([("signal SIGUSR1", math.inf)], now=100.0) == Notice("signal SIGUSR1", math.inf)
