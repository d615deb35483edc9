"""A fixture of pytest that runs jobs. `pytest_plugins = ["fleetrun.testing"]` in a conftest.py takes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fleetrun.api import run
from fleetrun.job import Result


@pytest.fixture
def run_job(tmp_path: Path) -> Callable[..., Result[Any]]:
    """`fleetrun.run` for tests: the logs are in `tmp_path`, nothing is restarted, and a job that runs longer
    than 5 minutes fails. Each of these options can be given another value.
    """
    return partial(run, log_dir=tmp_path / "log", max_restart=0, timeout=300)
