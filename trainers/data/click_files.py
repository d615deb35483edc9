"""Write click logs as text, in Criteo's tab-separated lines or in MultiSlot lines.

`clicks` makes the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainers.data.clicks import DENSE, MISSING, SLOTS, Clicks, scaled
from trainers.data.slots import Slot

ID_SLOTS = tuple(f"C{slot + 1}" for slot in range(SLOTS))
CLICK_SLOTS = (
    Slot("dense_input", "float32", DENSE),
    *(Slot(name) for name in ID_SLOTS),
    Slot("label", "float32"),
)
"""The slots of a MultiSlot line in order: 13 floats, 26 slots of one id, one label."""

Column = list[Any]
_ROWS_AT_ONCE = 8192


def write_tsv(clicks: Clicks, paths: Sequence[Path]) -> None:
    """Write lines in Criteo's layout, with rows distributed over `paths` in order and in equal parts.

    A line has a label, 13 integers, and 26 categories of 8 hexadecimal digits. Missing values are empty.
    """

    def columns(rows: slice) -> Iterator[Column]:
        yield clicks.labels[rows].astype(int).tolist()
        for counts in clicks.counts[rows].T.tolist():
            yield ["" if count == MISSING else count for count in counts]
        for ids, categories in zip(clicks.ids[rows].T, clicks.categories[rows].T.tolist(), strict=True):
            yield [f"{category:08x}" if id_ else "" for id_, category in zip(ids, categories, strict=True)]

    _write(len(clicks), paths, columns, "\t".join(["{}"] * (1 + DENSE + SLOTS)) + "\n")


def write_slots(clicks: Clicks, paths: Sequence[Path]) -> None:
    """Write MultiSlot lines, with rows distributed over `paths` in order and in equal parts.

    A line has `n v1 .. vn` for each of CLICK_SLOTS: 13 floats in [0, 1], then `1 id` 26 times (id 0 means
    missing), then `1 label`. Floats have the shortest form that reads back as the same float32.
    """

    def columns(rows: slice) -> Iterator[Column]:
        for values in scaled(clicks.counts[rows]).T.astype(str).tolist():
            yield [value.removesuffix(".0") for value in values]
        yield from clicks.ids[rows].T.tolist()
        yield clicks.labels[rows].astype(int).tolist()

    _write(len(clicks), paths, columns, f"{DENSE}{' {}' * DENSE}{' 1 {}' * (SLOTS + 1)}\n")


def _write(
    count: int, paths: Sequence[Path], columns: Callable[[slice], Iterator[Column]], line: str
) -> None:
    """Write the lines of `count` rows. `columns` returns the words of some rows, field by field."""
    cuts = [count * part // len(paths) for part in range(len(paths) + 1)]
    for path, (first, last) in zip(paths, pairwise(cuts), strict=True):
        with path.open("w") as file:
            for start in range(first, last, _ROWS_AT_ONCE):
                rows = slice(start, min(start + _ROWS_AT_ONCE, last))
                file.writelines(map(line.format, *columns(rows)))
