"""The table of bench/checkpoints.py."""

import argparse
import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_the_table_says_what_a_checkpoint_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    bench = importlib.import_module("checkpoints")
    ways = {
        "fleet.save_checkpoint": {"pause": [0.2, 0.3, 0.1], "durable": [0.2], "lost": [0.4]},
        "another": {"pause": [0.02], "durable": [0.4], "lost": [0.1]},
    }
    about = {"bytes": {"of a checkpoint": [4e8]}, "steps": {"alone": [1.0, 2.0, 3.0]}}
    text = bench.table_of({"ways": ways, "about": about}, argparse.Namespace(nproc=2, steps=10))
    assert "400 MB, 1 runs; a step alone takes 200 ms, 10 steps 2,000 [1,000-3,000] ms." in text
    assert "| fleet.save_checkpoint | 200 [100-300] | 2,000 | 400 [400-400] | 1.00 |" in text
    assert "| another | 20 [20-20] | 1,000 | 100 [100-100] | 0.25 |" in text
