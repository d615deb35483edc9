"""For the attack: how long it lasts. Each of its tests is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent
SHARE_S = 900
"""Seconds beyond its share that an attack may take to come to its end, where everything hangs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known when this folder is given: `pytest tests/attack --minutes 60`."""
    parser.addoption(
        "--minutes", type=float, default=None, help="minutes of random strikes (default: fixed seeds)"
    )


def minutes_of(config: pytest.Config) -> float | None:
    given = config.getoption("minutes", default=None)
    return None if given is None else float(given)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.attack)
            item.add_marker(pytest.mark.timeout((minutes_of(config) or 0) * 60 + SHARE_S))


@pytest.fixture
def minutes(request: pytest.FixtureRequest) -> float | None:
    return minutes_of(request.config)
