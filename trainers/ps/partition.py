"""Partition: which server holds what. Pure: names, sizes and keys in, server numbers out."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

SLICE_ABOVE = 8192
"""Dense parameters with more elements than this are sliced (Paddle's `slice_var_up` with its
`min_block_size`).
"""


def slices(elements: int, row: int, servers: int, slice_up: bool, largest: int) -> list[tuple[int, int]]:
    """`[start, stop)` of the blocks of a dense parameter of `elements`, whose rows have `row` elements.

    One block for up to 8192 elements; above, as many as there are servers while each keeps at least 8192
    elements (the rule of Paddle's slice_variable), cut between rows where rows are short enough. No block
    is larger than `largest`.
    """
    if not elements:
        return []
    count = min(servers, elements // SLICE_ABOVE) if slice_up and elements > SLICE_ABOVE else 1
    block = -(-elements // max(count, 1))
    if row <= block:
        block = -(-block // row) * row
    block = min(block, largest)
    return [(start, min(start + block, elements)) for start in range(0, elements, block)]


def place(names: Sequence[str], servers: int, method: str) -> list[int]:
    """The server of each dense block: in turn (RoundRobin), or by a hash of its name (HashName)."""
    if method == "HashName":
        return [zlib.crc32(name.encode()) % servers for name in names]
    return [index % servers for index in range(len(names))]
