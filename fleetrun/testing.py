"""A pytest fixture that runs jobs. Enable it in conftest.py with `pytest_plugins = ["fleetrun.testing"]`."""

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
    """Return `fleetrun.run` with defaults for tests: logs in `tmp_path`, restarts off, and a failure after 5
    minutes.

    You can override each of these options.
    """
    return partial(run, log_dir=tmp_path / "log", max_restart=0, timeout=300)
