"""What trainers with parameter servers tell each other, and what they save for serving."""

from pathlib import Path

import pytest

from tests.support.forking import Forker

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_trainers_tell_each_other_and_save_what_they_see(forker: Forker, tmp_path: Path, mode: str) -> None:
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(["-m", "tests.support.scripts.sharing_cases", mode, str(tmp_path)])
        job.expect_success()
        first, second = (trainer.output.splitlines() for trainer in job.trainers)
        told = next(line for line in first if "int8" in line)
        assert "rows of 4 tables in int8: the largest error of a value is 0.0" in told
        assert first[-1] == "done"
        # A slow machine adds lines that say what a trainer waits for.
        assert [line for line in second if line in ("said by 1", "done")] == ["said by 1", "done"]
