"""Random faults over elastic jobs on four hosts. SOAK=200 for so many faults, SOAK_SEED for other ones."""

import os
from pathlib import Path

import pytest

from tests.support.hosts import needs_hosts
from tests.support.nodes import Etcd, needs_etcd, nodes
from tests.support.soak import BOUND, Soak

FAULTS = int(os.environ.get("SOAK", "16"))
SEED = os.environ.get("SOAK_SEED", "1")
PER_JOB = 8

pytestmark = [*needs_hosts, pytest.mark.slow, pytest.mark.timeout(120 + FAULTS * BOUND)]


def test_whatever_happens_the_job_ends_and_tells_the_truth(tmp_path: Path):
    soaked(tmp_path, FAULTS, with_etcd=False)


@needs_etcd
def test_the_same_with_an_etcd_that_fails_too(tmp_path: Path):
    soaked(tmp_path, FAULTS // 2, with_etcd=True)


def soaked(folder: Path, faults: int, *, with_etcd: bool) -> None:
    happened = number = 0
    while happened < faults:
        number += 1
        happened += one_job(folder / str(number), f"{SEED}/{number}", with_etcd)
    print(f"{happened} faults in {number} jobs")


def one_job(folder: Path, seed: str, with_etcd: bool) -> int:
    """How many faults it had."""
    folder.mkdir()
    with nodes(5 if with_etcd else 4, folder) as found:
        etcd = Etcd(found.hosts[4]) if with_etcd else None
        if etcd is not None:
            found.master = etcd.url
        soak = Soak(found, folder, seed, etcd)
        try:
            soak.begin()
            count = next((number for number in range(PER_JOB) if not soak.happen()), PER_JOB)
            soak.finish()
            soak.check()
        except BaseException:
            print(f"seed {seed}", *soak.story, sep="\n")
            raise
    return max(1, count)
