"""Half precision in real jobs: equal to one process under autocast, and no NaN reaches a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forking import Forker
from tests.support.scripts.ps_amp import SCENARIOS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", [each.__name__ for each in SCENARIOS])
def test_it_is_as_in_one_process(forker: Forker, tmp_path: Path, scenario: str) -> None:
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(["-m", "tests.support.scripts.ps_amp", scenario])
        job.expect_success()
