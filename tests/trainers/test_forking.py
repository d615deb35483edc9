"""Members of a job that are forked: the output of each is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetrun.envs.contract import Role
from tests.support.forking import Forker

pytestmark = pytest.mark.slow


def test_a_job_in_the_folder_of_a_former_one_begins_with_empty_logs(forker: Forker, tmp_path: Path) -> None:
    """Tests of restarted jobs read out of them how far each process has come."""
    outputs = []
    for module in ("this", "__hello__"):
        with forker.job(tmp_path, trainers=1, servers=0) as job:
            process = job.start(["-m", module], Role.TRAINER, 0)
            job.expect_success()
            outputs.append((process.log, process.output))
    (log, long), (same, short) = outputs
    assert log == same
    assert "Zen" in long
    assert short == "Hello world!\n"
