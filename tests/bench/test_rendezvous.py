"""The bench of how nodes meet: what is pure in it, and one small meeting."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """Imports a module of the bench folder, which is no package, by its name."""
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(BENCH))


def test_cells(bench):
    rendezvous = bench("rendezvous")
    runs = [{"met": 1.0}, {"met": 3.0}, {"met": 2.0}, {"met": None}]
    assert rendezvous.spread(runs, "met", 1) == "2.0 [1.0-3.0]"
    assert rendezvous.spread(runs[:1], "met", 1) == "1.0"
    assert rendezvous.spread(runs, "known") == "-"
    assert rendezvous.judged(2.0, 3.0) == "<= 3: yes"
    assert rendezvous.judged(4.0, 3.0) == rendezvous.judged(None, 3.0) == "<= 3: no"
    assert rendezvous.judged(4.0, None) == ""


def test_a_row_compares_with_torchrun_and_with_what_is_wanted(bench):
    rendezvous = bench("rendezvous")
    cells = rendezvous.row("embedded", 1000, [{"met": 1.0, "known": 2.0}], [{"met": 4.0}]).split(" | ")
    assert cells[2:6] == ["**1.000**", "<= 3: yes", "4.000", "0.250"]
    assert cells[-1] == "<= 1: no |"
    other = rendezvous.row("etcd", 1000, [{"met": 1.0}], []).split(" | ")
    assert other[3:6] == ["", "-", "-"]


@pytest.mark.slow
def test_seventeen_nodes_meet(bench):
    """In two processes, beside the store's."""
    job, peers = bench("_rendezvous_job"), bench("_rendezvous_peers")
    figures = job.meet(peers.EmbeddedStore, 17, 60.0, 2)
    assert 0 < figures["met"] < 60
    assert 0 < figures["known"] < 60
    assert figures["messages"] > 2
    assert figures["kilobytes"] > 0
