"""A supervised job in a folder of its own; what it leaves is ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.pods import Supervision


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Supervision]]:
    """`job({"trainer.0": SCRIPT, "ps.0": SCRIPT}, restarts=1, ...)`"""
    made: list[Supervision] = []

    def make(scripts: dict[str, str], **options: object) -> Supervision:
        made.append(Supervision(tmp_path, scripts, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for supervision in made:
        supervision.close()


@pytest.fixture(autouse=True, scope="session")
def _harmless_sigio() -> None:
    """A watch asks for a SIGIO at the next write. It may come after the test, and by default it kills."""
    signal.signal(signal.SIGIO, lambda number, frame: None)
