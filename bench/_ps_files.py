"""The files that both sides train and test on: drawn once, from one known truth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from _ps_cases import CASES, VOCABULARY

from trainers.data.click_files import write_slots, write_tsv
from trainers.data.clicks import Best, ClickModel, Clicks

TRAIN_ROWS, TEST_ROWS = 800_000, 98_304
_SHORT = min(case.paddle_rows for case in CASES if case.paddle_rows)


@dataclass(frozen=True, slots=True)
class Files:
    """`best` of the test split: what a model that knows the truth reaches."""

    folder: Path
    rows: int
    best: Best

    def train(self, kind: str) -> list[str]:
        """`kind`: slot (MultiSlot text), tsv, folded (MultiSlot, ids below VOCABULARY), short (few rows)."""
        return _names(self.folder / "train" / kind)

    def test(self, kind: str) -> list[str]:
        return _names(self.folder / "test" / ("folded" if kind == "folded" else "slot"))


def make(folder: Path, rows: int = TRAIN_ROWS, test_rows: int = TEST_ROWS) -> Files:
    """Write them all: about 1.5 GB for 800,000 rows, in 15 seconds."""
    truth = ClickModel()
    test = truth.draw(test_rows, seed=1)
    _write(test, folder / "test", 2)
    train = truth.draw(rows, seed=0)
    _write(train, folder / "train", 4)
    write_tsv(train, _parts(folder / "train" / "tsv", 4))
    write_slots(truth.draw(min(rows, _SHORT), seed=0), _parts(folder / "train" / "short", 2))
    return Files(folder, rows, test.best())


def _write(clicks: Clicks, folder: Path, parts: int) -> None:
    write_slots(clicks, _parts(folder / "slot", parts))
    write_slots(replace(clicks, ids=clicks.ids % VOCABULARY), _parts(folder / "folded", parts))


def _parts(folder: Path, count: int) -> list[Path]:
    folder.mkdir(parents=True)
    return [folder / f"part-{part}" for part in range(count)]


def _names(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.iterdir())
