"""The table of bench/progress.py."""

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_the_table_says_what_a_report_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    bench = importlib.import_module("progress")
    told = {"nothing": [1e-6, 1e-6, 2e-6], "ours": [3e-6, 2e-6, 4e-6], "theirs": [21e-6, 31e-6, 26e-6]}
    text = bench.table_of(told)
    assert "3 rounds" in text
    assert "| ours | 2.00 [1.00-3.00] | 0.20 % | yes |" in text
    assert "| theirs | 25.00 [20.00-30.00] | 2.50 % | no |" in text
    assert "nothing" not in text
