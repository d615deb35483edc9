"""What several runs of a scenario gave, as one cell: their text with the medians of its figures. Pure."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence

_FIGURE = re.compile("\x00([^\x00]*)\x00([^\x00]*)\x00")


def figure(value: float, unit: str = "s") -> str:
    """A number to put into a run's text, of which the cell shows the median."""
    return f"\x00{value!r}\x00{unit}\x00"


def cell(texts: Sequence[str]) -> str:
    """Runs that differ in more than figures are told apart, each with its number."""
    if not texts:
        return "no result"
    alike: dict[str, list[list[float]]] = defaultdict(list)
    for text in texts:
        figures = [float(number) for number, _ in _FIGURE.findall(text)]
        alike[_FIGURE.sub(lambda found: f"\x00{found[2]}\x00", text)].append(figures)
    kinds = sorted(alike.items(), key=lambda item: -len(item[1]))
    if len(kinds) == 1:
        return _filled(*kinds[0])
    return "; or: ".join(f"{_filled(text, runs)} ({len(runs)} of {len(texts)})" for text, runs in kinds)


def _filled(text: str, runs: Sequence[Sequence[float]]) -> str:
    columns = iter(zip(*runs, strict=True))
    return re.sub("\x00([^\x00]*)\x00", lambda found: f"{spread(next(columns))} {found[1]}".strip(), text)


def spread(values: Sequence[float]) -> str:
    """The median; where the runs differ by much, the least and the most too."""
    middle, least, most = statistics.median(values), min(values), max(values)
    if most - least > max(0.1, 0.5 * middle):
        return f"{_number(middle)} [{_number(least)}-{_number(most)}]"
    return _number(middle)


def _number(value: float) -> str:
    return (
        f"{value:.0f}"
        if value == int(value) and value >= 1
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
    )
