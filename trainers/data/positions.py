"""Track trained records of a stream as half-open intervals of positions in its shards.

It also finds records that some of several servers lack. The unit of positions depends on the source: a byte
of a text file, a row of a Parquet file, an offset of a partition.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from trainers.errors import DataError


class Records(NamedTuple):
    """The records of a shard with positions in [start, stop)."""

    stream: str
    shard: str
    start: int
    stop: int


def encode_records(records: Sequence[Records]) -> bytes:
    return json.dumps(records).encode()


def decode_records(content: bytes) -> list[Records]:
    """Decode the result of `encode_records`. Raises DataError for invalid or repeated records."""
    try:
        found = [Records(*each) for each in json.loads(content)]
    except (ValueError, TypeError) as error:
        raise DataError(f"the records of a stream are malformed: {error}") from error
    for stream, shard, start, stop in found:
        names = isinstance(stream, str) and isinstance(shard, str)
        if not names or type(start) is not int or type(stop) is not int or not 0 <= start < stop:
            raise DataError(f"records [{start!r}, {stop!r}) of {shard!r} in {stream!r}")
    for left, right in pairwise(sorted(found)):
        if left[:2] == right[:2] and left.stop > right.start:
            raise DataError(f"records {right.start} of {right.shard!r} twice")
    return found


class Intervals:
    """Disjoint half-open intervals. `ends` holds their starts and stops, in order."""

    __slots__ = ("ends",)

    def __init__(self, ends: Sequence[int] = ()) -> None:
        self.ends = list(ends)

    def has(self, start: int, stop: int) -> bool | None:
        """Return True if the non-empty [start, stop) is included, False if not, and None if only a
        part is.
        """
        first = bisect_right(self.ends, start)
        return first % 2 == 1 if first == bisect_left(self.ends, stop) else None

    def add(self, start: int, stop: int) -> None:
        """Also what is in it already."""
        self._set(start, stop, 0)

    def remove(self, start: int, stop: int) -> None:
        """Also what is not in it."""
        self._set(start, stop, 1)

    def _set(self, start: int, stop: int, parity: int) -> None:
        """Put an end at `start`, and at `stop`, if it is at a place of this parity."""
        first, last = bisect_left(self.ends, start), bisect_right(self.ends, stop)
        self.ends[first:last] = [start] * (first % 2 == parity) + [stop] * (last % 2 == parity)


class Piece(NamedTuple):
    """Positions [start, stop) that some servers lack. `on` has True for each server with the whole piece."""

    start: int
    stop: int
    on: tuple[bool, ...]


def missing(servers: Sequence[Intervals], start: int, stop: int) -> Iterator[Piece]:
    """Yield the pieces of [start, stop) that some servers lack, in order.

    Each server has a whole piece or lacks it.
    """
    inner = {end for each in servers for end in each.ends if start < end < stop}
    for left, right in pairwise(sorted({start, stop} | inner)):
        on = tuple(bool(each.has(left, right)) for each in servers)
        if not all(on):
            yield Piece(left, right, on)


def of_servers(answers: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[Intervals]]:
    """Return intervals by shard from each server's answer. Equal answers of all servers appear once."""
    found: dict[str, list[Intervals]] = {}
    for shard in {shard for each in answers for shard in each}:
        ends = [list(each.get(shard, ())) for each in answers]
        same = all(each == ends[0] for each in ends)
        found[shard] = [Intervals(each) for each in (ends[:1] if same else ends)]
    return found
