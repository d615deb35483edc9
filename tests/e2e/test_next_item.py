"""The example of next items learns nearly what can be known about its sessions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command import Fleetrun

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "next_item.py"


@pytest.mark.slow
def test_the_next_item_of_a_session_is_found(fleetrun: Fleetrun) -> None:
    small = ("--items=100", "--sessions=3000", "--epochs=4", "--negatives=50")
    launch = fleetrun.run("--server_num=1", "--trainer_num=2", str(EXAMPLE), *small)
    assert launch.code == 0, launch
    found = re.search(r"NDCG@10 (\S+); the best possible is (\S+)", launch.out)
    assert found is not None, launch
    reached, best = map(float, found.groups())
    assert 0.8 * best < reached < best + 0.03
    items = [re.findall(r"over (\d+) items", fleetrun.log(f"trainer.{rank}")) for rank in (0, 1)]
    assert len(items[0]) == 4
    assert all(abs(int(one) - int(two)) < 0.01 * int(one) for one, two in zip(*items, strict=True))
