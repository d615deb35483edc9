"""Whatever happens to a job: no two members with one rank, one generation at a time, no node hangs, all
report the same end, and 0 only for work that was done (`support/random_faults.py`, where the invariants are).
"""

import pytest

from tests.support.random_faults import run_with_faults

SEEDS = 600
CHUNK = 200


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_the_invariants_hold(first):
    for seed in range(first, first + CHUNK):
        run_with_faults(seed)


@pytest.mark.parametrize("seed", [719, 1528, 10085, 101308, 301147, 319220])
def test_what_once_went_wrong(seed):
    run_with_faults(seed)


@pytest.mark.slow
def test_the_faults_lead_to_every_kind_of_end():
    codes = {player.code for seed in range(60) for player in run_with_faults(seed).players}
    assert codes >= {0, 2, 7, 124, 125, 143}
