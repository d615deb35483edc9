"""Several threads for the kernels of one request (`server_threads`), which run without the GIL. Each has a
part of the keys: whole tables, and some of the keys of a table that begins in one part and ends in another.
No row is in two parts, so the result is that of one thread, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trainers.kernels.compiled import Keys

_WORTH = 1 << 16
"""Values of rows for each thread, below which one thread does it: to tell another takes 30 microseconds."""

Work = Callable[[Keys | slice, Keys, Keys], int]
"""A kernel, for tables by number (some of them for a part of their keys), the bounds of their keys, and where
it says how many keys of each have no row; returns how many that are in all.
"""


class Threads:
    """So many threads, of which the one that calls is one."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "rows") if count > 1 else None

    def do(self, work: Work, starts: Keys, missing: Keys, counts: Keys, size: int) -> int:
        """As `work` does it in one thread: the missing keys of table t, at [starts[t], starts[t + 1]) of all,
        are at `missing[starts[t]]` and behind it, counts[t] of them. `size`: values of a row.
        """
        total = int(starts[-1])
        count = min(self.count, total * size // _WORTH)
        if self._pool is None or count < 2:
            return work(slice(None), starts, counts)
        cuts = total * np.arange(count + 1) // count
        bounds = np.unique(np.concatenate([starts, cuts]))
        owners = np.searchsorted(starts, bounds[:-1], side="right") - 1
        firsts, found = np.searchsorted(bounds, cuts), np.zeros(len(owners), np.int64)

        def part(number: int) -> int:
            first, last = firsts[number], firsts[number + 1]
            return work(owners[first:last], bounds[first : last + 1], found[first:last])

        others = [self._pool.submit(part, number) for number in range(1, count)]
        result = part(0) + sum(other.result() for other in others)
        counts[:] = 0
        for place in np.flatnonzero(found):  # those of a table one behind the other, as of its first key
            owner, bound, some = owners[place], bounds[place], found[place]
            begin = starts[owner] + counts[owner]
            missing[begin : begin + some] = missing[bound : bound + some] + (bound - starts[owner])
            counts[owner] += some
        return result
