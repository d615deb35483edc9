"""Planted defects, which simulated jobs must find."""

import pytest

from tests.simulated_ps.mutants import MUTANTS, first_find

EASY = ["a_repeated_push_is_applied_again", "pushes_are_not_recorded", "a_push_is_recorded_after_its_answer"]


@pytest.mark.parametrize("name", EASY)
def test_a_planted_defect_is_found(name: str) -> None:
    assert first_find(name, 100) is not None


@pytest.mark.timeout(1800)  # 1,000 jobs take a minute on a quiet core
@pytest.mark.parametrize("name", sorted(MUTANTS.keys() - set(EASY)))
def test_each_planted_defect_is_found_within_1000_jobs(name: str) -> None:
    assert first_find(name, 1000) is not None
