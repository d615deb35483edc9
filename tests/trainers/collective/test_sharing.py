"""What ranks tell each other, and the whole state that they save."""

from pathlib import Path

import pytest

from tests.support.forking import Forker


@pytest.mark.slow
def test_ranks_tell_each_other_and_save_what_they_have(forker: Forker, tmp_path: Path) -> None:
    with forker.job(tmp_path, trainers=2, servers=0) as running:
        running.start_all(["-m", "tests.support.scripts.sharing_cases", "collective", str(tmp_path)])
        running.expect_success()
        assert [process.output for process in running.processes] == ["done\n", "said by 1\ndone\n"]
