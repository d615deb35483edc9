"""A pipe command for Paddle's datasets: Criteo lines on stdin, MultiSlot lines on stdout, by Paddle's own
MultiSlotDataGenerator, one line at a time as its documents show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mend  # noqa: F401
import paddle.distributed.fleet as fleet

DENSE, SLOTS = 13, 26
LEAST = (0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
RANGE = (20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50)
WORD = (1 << 64) - 1


def feature_sign(slot: int, category: str) -> int:
    """As trainers/data/clicks.py has it; 0 for a missing category."""
    if not category:
        return 0
    word = ((int(category, 16) | (slot + 1) << 33) + 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return (word ^ (word >> 31)) >> 1


class Reader(fleet.MultiSlotDataGenerator):
    def generate_sample(self, line: str) -> Callable[[], Iterator[list[tuple[str, list[Any]]]]]:
        def sample() -> Iterator[list[tuple[str, list[Any]]]]:
            label, *fields = line.rstrip("\n").split("\t")
            dense = [
                (float(count) - least) / width if count else 0.0
                for count, least, width in zip(fields, LEAST, RANGE)  # noqa: B905
            ]
            ids = [(f"C{slot + 1}", [feature_sign(slot, fields[DENSE + slot])]) for slot in range(SLOTS)]
            yield [("dense_input", dense), *ids, ("label", [int(label)])]

        return sample


if __name__ == "__main__":
    Reader().run_from_stdin()
