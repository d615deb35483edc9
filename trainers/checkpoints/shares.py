"""Which rank saves what of that which all of them have alike. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def share(sizes: Mapping[str, int], rank: int, world: int) -> set[str]:
    """The keys that `rank` saves; `sizes` in bytes. The largest first, each to the rank with the least so
    far: every rank comes to the same answer without asking the others.
    """
    load = [(0, other) for other in range(world)]
    mine = set()
    for key in sorted(sizes, key=lambda each: (-sizes[each], each)):
        taken, least = load[0]
        heapq.heapreplace(load, (taken + sizes[key], least))
        if least == rank:
            mine.add(key)
    return mine
