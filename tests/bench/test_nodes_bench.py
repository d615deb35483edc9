"""The bench of several nodes: what is pure in it, and one scenario with real launchers."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.waiting import eventually

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def cells() -> Iterator[ModuleType]:
    """A module of the bench folder, which is no package."""
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("_nodes_cells")
    finally:
        sys.path.remove(str(BENCH))


def test_runs_that_are_alike_become_one_text_with_medians(cells):
    runs = [f"A exits 7 {cells.figure(value)}; B {cells.figure(2.0)}" for value in (0.31, 0.29, 0.33)]
    assert cells.cell(runs) == "A exits 7 0.31 s; B 2 s"


def test_runs_far_apart_show_how_far(cells):
    assert cells.cell([cells.figure(value) for value in (0.4, 6.0, 0.3)]) == "0.40 [0.30-6] s"


def test_runs_that_ended_differently_are_told_apart(cells):
    runs = ["hangs", f"exits {cells.figure(1.5)}", f"exits {cells.figure(2.5)}"]
    assert cells.cell(runs) == "exits 2 s (2 of 3); or: hangs (1 of 3)"


def test_a_unit_may_be_given(cells):
    assert cells.cell([cells.figure(0.25, "CPU s in 10 s")]) == "0.25 CPU s in 10 s"


def test_without_a_run_there_is_no_result(cells):
    assert cells.cell([]) == "no result"


@pytest.mark.slow
def test_the_bench_plays_a_scenario_and_leaves_nothing(tmp_path):
    command = [sys.executable, BENCH / "nodes.py", "--launcher", "fleetrun", "--runs", "1"]
    done = subprocess.run(
        [*command, "--only", "range", "--work", tmp_path], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "B exits 2" in done.stdout
    mark = f"BENCH_WORK={tmp_path.resolve()}".encode()
    eventually(lambda: not [entry for entry in Path("/proc").glob("[0-9]*") if mark in _environ(entry)])


def _environ(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
