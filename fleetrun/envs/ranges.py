"""Ranks in a few letters: `0-2,5`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", re.ASCII)
_MOST = 1_000_000


def written(ranks: Iterable[int]) -> str:
    """Ascending."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)


def read(text: str) -> frozenset[int] | None:
    """None for what is none."""
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low or high > _MOST:
            return None
        found.update(range(low, high + 1))
    return frozenset(found)
