"""Real processes at the price of a fork."""

from collections.abc import Iterator

import pytest

from tests.support.forking import Forker


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    running = Forker()
    yield running
    running.close()
