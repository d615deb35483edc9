"""How long trainers wait for each other: the bound of staleness, and a trainer that is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forking import Forker
from tests.trainers.ps.test_recovery import counting, counts_of, expect_exact, restart

pytestmark = pytest.mark.slow


def test_nobody_reads_further_ahead_than_max_staleness(forker: Forker, tmp_path: Path) -> None:
    options = {"asynchronous": {"max_staleness": 2}, "hold": 3, "hold_ranks": [1]}
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(counting(tmp_path, 20, "none", **options))
        ahead, behind = job.trainers
        behind.wait_for("held")
        ahead.wait_for("pushed 5")
        with pytest.raises(AssertionError):
            ahead.wait_for("pushed 6", timeout=0.5)
        (tmp_path / "go").touch()
        job.expect_success()
        expect_exact(job, 20)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_lost_trainer_is_waited_for_as_long_as_one_that_has_not_joined(
    forker: Forker, tmp_path: Path, comes_back: bool
) -> None:
    """Not for half of `trainer_timeout_s`. Who is not waited for is lost to a server that was restarted, for
    whom everybody has joined.
    """
    options = {"hold": 5, "hold_ranks": [1], "sync": True}
    command = counting(tmp_path, 10, "log", server={"trainer_timeout_s": 0.8}, **options)
    impatient = counting(
        tmp_path, 10, "log", server={"trainer_timeout_s": 0.8, "join_timeout_s": 3.0}, **options
    )
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        job.start_all(command)
        survivor, victim = job.trainers
        victim.wait_for("held")
        survivor.wait_for("pushed 4")
        victim.kill()
        if comes_back:
            restart(job, victim, command)
            job.expect_success()
            assert all(counts_of(trainer) == [5.0] * 4 + [10.0] * 4 for trainer in job.trainers)
        else:
            (server,) = job.servers
            server.kill()
            restart(job, server, impatient)
            assert survivor.wait() == 1
            words = "TrainerLostError: trainer 1 is lost: it has been disconnected for over 3 s"
            assert words in survivor.output
