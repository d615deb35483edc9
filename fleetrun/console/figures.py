"""Numbers of a training for a person: the foot of a terminal, `status` and `ps` write them alike. Pure."""

from __future__ import annotations

import math

_UNITS = ("", "k", "M", "G", "T")


def count(number: float) -> str:
    """What is counted, such as steps, to the last one: `12,345`."""
    return f"{number:,}"


def loss(number: float) -> str:
    """Four digits that count: `0.02314`. What is no number says so."""
    return f"{number:.4g}"


def short(number: float) -> str:
    """A pace or an amount, in three digits or so: `512`, `12.3k`, `0.25`."""
    size = number
    for unit in _UNITS:
        if abs(size) < 999.5:
            return f"{size:.3g}{unit}"
        size /= 1000
    return f"{number:.3g}" if math.isfinite(number) else str(number)
