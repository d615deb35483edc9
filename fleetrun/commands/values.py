"""Values in the answer of a launcher, whatever stands there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleetrun.console.tail import printable

STYLES = {
    "running": "green",
    "completed": "green",
    "failed": "red",
    "terminating": "yellow",
    "restarting": "yellow",
    "ending": "yellow",
    "leaving": "yellow",
    "meeting": "cyan",
    "starting": "cyan",
}
"""Of states."""


_LONGEST = 4096


def text(one: Mapping[str, Any], name: str) -> str:
    value = one.get(name)
    return "" if value is None or isinstance(value, dict | list) else printable(str(value)[:_LONGEST])


def figure(one: Mapping[str, Any], name: str) -> float | None:
    value = one.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return value


def written(how: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else how(value)


def alive(containers: Sequence[Mapping[str, Any]]) -> int:
    """How many have a process: also those that are asked to end."""
    return sum(each.get("alive") is True for each in containers)
