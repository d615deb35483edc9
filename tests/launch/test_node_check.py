"""A node's part in a check before a start: a real helper process, and a clock that jumps."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetrun.elastic.rendezvous.checks import Check, Measured
from fleetrun.elastic.rendezvous.records import Node, Round, State
from fleetrun.launcher.node_check import NodeCheck
from fleetrun.plan.topology import Host, Offer
from fleetrun.pod.loop import Loop
from tests.support.pods import SLOWLY
from tests.support.ports import free_port

HANGS = """
import hashlib, pathlib, signal
def blake2b(data):
    pathlib.Path(__file__).with_name("computes").touch()
    signal.pause()
hashlib.blake2b = blake2b
"""
"""A processor that does not come to an end, for Python programs that find this as their sitecustomize."""


class Told:
    """The console."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)

    warning = info


def check(folder: Path, count: int = 1) -> tuple[Measured, list[str]]:
    """By the first of so many nodes. The time is over once it computes without an end."""
    computes = folder / "computes"
    loop = Loop(lambda: SLOWLY * time.monotonic() + 1000.0 * computes.exists())
    members = [
        Node(
            id=f"n{number}", host="127.0.0.1", name=f"h{number}",
            offer=Offer(service=f"127.0.0.1:{free_port()}"),
        )
        for number in range(count)
    ]  # fmt: skip
    round_ = Round(generation=1, state=State.FORMING, check=Check(turn=1), topology="1/a.0")
    found: list[Measured] = []
    told = Told()

    def then(measured: Measured) -> None:
        found.append(measured)
        loop.stop()

    def look() -> None:
        loop.after(0.01 * SLOWLY, look)

    settings = SimpleNamespace(check="fast")
    launch = SimpleNamespace(loop=loop, companions=set(), console=told, settings=settings)
    NodeCheck(launch, Host(address="127.0.0.1"), round_, members, 0, then)  # type: ignore[arg-type]
    look()
    loop.run()
    loop.close()
    return found[0], told.lines


def test_what_a_good_node_finds(tmp_path: Path):
    found, told = check(tmp_path)
    assert found.compute > 0 < found.memory
    assert (found.error, found.link_error, found.late) == ("", "", 0.0)
    assert found.took > 0
    assert told == ["checking this node (--check fast)"]


@pytest.mark.parametrize(("count", "way"), [(1, ""), (2, "no answer")])
def test_what_is_known_of_the_way_is_not_lost_when_the_rest_is_late(tmp_path, monkeypatch, count, way):
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found, told = check(tmp_path, count)
    assert (found.link_error, found.error, found.late) == (way, "", 4.0)
    assert found.took > 900
    assert told[1] == "check: this node: the check took longer than 4 s"
    assert told[2:] == ([f"check: the link to h1 (127.0.0.1): {way}"] if way else [])
