"""`fleetrun nodes`, on a file that earlier launches left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fleetrun.errors import LaunchError
from fleetrun.record.faults import MachineFault, faults_path, keep
from tests.commands.conftest import Ask


@pytest.mark.parametrize("name", ["h2", "10.0.0.2", "all"])
def test_a_reset_forgets_what_a_clock_ahead_has_noted(ask: Ask, tmp_path: Path, name: str):
    ahead = time.time() + 3600
    path = faults_path(tmp_path / "log")
    path.parent.mkdir()
    keep(path, (MachineFault(ahead, "h2 (10.0.0.2)", "it was lost"),), 1)
    assert "excluded" in ask("nodes")
    assert ask("nodes", "--reset", name, "--json") == "[]\n"


def test_a_file_that_cannot_be_read_is_named(ask: Ask, tmp_path: Path):
    faults_path(tmp_path / "log").mkdir(parents=True)
    with pytest.raises(LaunchError, match=r"log/nodes\.json: Is a directory"):
        ask("nodes")
