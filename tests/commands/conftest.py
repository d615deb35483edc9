"""Commands that are asked in this process, in a folder where nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleetrun import verbs
from tests.commands.records import PastJob

Ask = Callable[..., str]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Ask:
    """`ask("logs", "-n", "5")` -> what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))

    def answer(verb: str, *words: str, code: int = 0) -> str:
        assert verbs.answer(verb, words) == code
        return capfdbinary.readouterr().out.decode("utf-8", "surrogateescape")

    return answer


@pytest.fixture
def past(tmp_path: Path) -> Iterator[Callable[..., PastJob]]:
    made: list[PastJob] = []

    def make(*words: str, **options: int) -> PastJob:
        made.append(PastJob(tmp_path, *words, **options))
        return made[-1]

    yield make
    for job in made:
        job.journal.close()
