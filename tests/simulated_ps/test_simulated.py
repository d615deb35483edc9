"""Jobs of servers and trainers with faults, each from a seed. `make simulate` runs more of them."""

import pytest

from tests.simulated_ps.job import simulate


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_no_job_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + 50):
        simulate(seed)


@pytest.mark.parametrize("first", range(300, 5000, 50))
def test_no_job_of_many_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + 50):
        simulate(seed)


def test_a_seed_has_one_history() -> None:
    for seed in range(12):
        assert simulate(seed).world.trace == simulate(seed).world.trace
