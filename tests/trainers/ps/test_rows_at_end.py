"""Which trainers take the rows of the servers at the end of training."""

from pathlib import Path

import pytest

from tests.support.forking import Forker

pytestmark = pytest.mark.slow

WITH = "True works works works 3000 True 1"
WITHOUT = "True refused refused works 0 True 1"


@pytest.mark.parametrize(
    ("whose", "trainers"), [("all", [WITH, WITH]), ("first", [WITH, WITHOUT]), ("none", [WITHOUT, WITHOUT])]
)
def test_only_those_that_need_rows_pull_them(
    forker: Forker, tmp_path: Path, whose: str, trainers: list[str]
) -> None:
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(["-m", "tests.support.scripts.ps_rows_at_end", whose])
        job.expect_success()
        assert [trainer.output.splitlines()[-1] for trainer in job.trainers] == trainers
