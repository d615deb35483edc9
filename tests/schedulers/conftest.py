"""The command for a test, in a folder of its own, and the engines that are made once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm as slurm_parts
from tests.support import sshd as sshd_parts
from tests.support.command import Fleetrun


@pytest.fixture
def fleetrun(tmp_path: Path) -> Iterator[Fleetrun]:
    with Fleetrun(tmp_path) as command:
        yield command


@pytest.fixture(scope="module")
def slurm() -> Iterator[slurm_parts.Slurm]:
    """Two nodes, n1 and n2, shared by the tests of a module."""
    if reason := slurm_parts.missing():
        pytest.skip(reason)
    with slurm_parts.slurm() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sshd() -> Iterator[sshd_parts.Sshd]:
    """One server at 127.0.0.1 and 127.0.0.2, shared by the tests of a module."""
    if reason := sshd_parts.missing():
        pytest.skip(reason)
    with sshd_parts.sshd() as server:
        yield server
