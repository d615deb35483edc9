"""The processes of a job that are on other machines, as far as the record of this one knows of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleetrun.console.tail import printable
from fleetrun.envs import ranges
from fleetrun.record.history import History


@dataclass(frozen=True, slots=True)
class Away:
    """One of them. `node` is its machine: `node 1, h2 (10.0.0.2)`."""

    node: str
    role: str
    rank: int


def away(history: History) -> list[Away]:
    """As the machines met last."""
    for event in reversed(history.all("node")):
        nodes, placed = event.get("nodes"), event.get("processes")
        if isinstance(nodes, list) and isinstance(placed, list):
            return [
                each
                for number, (title, here) in enumerate(zip(nodes, placed, strict=False))
                if number != event.get("rank") and isinstance(here, dict)
                for each in _of(f"node {number}, {printable(str(title))}", here)
            ]
    return []


def _of(node: str, here: Mapping[str, Any]) -> Iterator[Away]:
    for role, text in here.items():
        for rank in sorted(ranges.read(str(text)) or ()):
            yield Away(node, role, rank)
