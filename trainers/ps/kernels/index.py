"""Find the slot of an int64 key, by hash.

A segment has 4096 entries of 64 bits. An entry is a tag of 32 bits and slot + 1, or 0 if it is empty. In the
tag, 12 bits of the hash are the place in the segment where the search starts, and 20 more bits choose the
segment. Inside a segment, probing is linear. The next bit of its hashes splits a full segment (80 %) in two,
without a look at the keys. A directory of the leading bits leads to the segments (extendible hashing, Fagin,
Nievergelt, Pippenger, Strong 1979). Growth therefore moves 3,277 entries at a time, at any size.

The hash is spread unevenly over the segments, twice as densely at one end as at the other (as in spiral
storage, Martin 1979). Otherwise all segments would fill up at the same time, and one request would have to
split very many of them.
"""

from __future__ import annotations

import math
import secrets
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainers.kernels.compiled import Floats, Scalar, Words, compiled
from trainers.ps.kernels.memory import key_at

_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

SECRET = np.frombuffer(secrets.token_bytes(16), dtype=np.uint64).copy()
"""Two random words, secret to this process, so nobody can choose keys that collide."""


@compiled
def finalize(word: Scalar) -> Scalar:
    """Return the result of the splitmix64 finalizer (Steele, Lea, Flood 2014), a permutation of the 64-bit
    words.
    """
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))


@compiled
def keyed_hash(key: Scalar, first: Scalar, second: Scalar) -> Scalar:
    """Return a hash of one key under two secret words. All bits are well mixed."""
    word = np.uint64(key) ^ first
    word = (word ^ (word >> np.uint64(32))) * _FIRST
    word = (word ^ (word >> np.uint64(29))) + second
    word = word * _SECOND
    word = (word ^ (word >> np.uint64(32))) * GOLDEN
    return word ^ (word >> np.uint64(29))


SEGMENT = 4096
FULL = 3277
PLENTY = 3000
DEEPEST = 20
BLOCK = 32

DEPTH, SEGMENTS = 0, 1
ENOUGH, NEEDS_DIRECTORY, NEEDS_SEGMENTS = 0, 1, 2

_SLOT = np.uint64(0xFFFFFFFF)
_HOME = np.uint64(SEGMENT - 1)
_WHICH = np.uint64((1 << DEEPEST) - 1)
_THIRD, _TWO_THIRDS = np.uint64(1431655765), np.uint64(2863311530)


class Index(NamedTuple):
    """The arrays of an index."""

    entries: Words  # segment after segment, with room for more
    directory: NDArray[np.uint32]  # (2**depth,), from leading bits to segment
    fill: NDArray[np.int32]  # number of entries of each segment
    depths: NDArray[np.int32]  # number of leading bits that all entries of a segment share
    numbers: NDArray[np.int64]  # depth of the directory, segments in use
    secret: Words


def laid_out(index: Index, rows: int) -> Index:
    """Return an index with segments for `rows` rows, to replace an empty index.

    A segment gets up to PLENTY rows, so later splits are unnecessary. The caller provides the memory for the
    entries.
    """
    depth = min(DEEPEST, math.ceil(math.log2(max(1.0, 1.5 * rows / PLENTY))))
    size = 1 << depth
    # The density of keys at x is 3/2 / sqrt(1 + 3x) times the average (see `where`), from 3/2 at 0 to 3/4.
    # From some place on, a segment may therefore be twice as wide.
    wide = ((3 * rows / (size * PLENTY)) ** 2 - 1) / 3
    narrow = size if not depth else min(size, 2 * math.ceil(max(0.0, wide) * size / 2))
    directory = np.arange(size, dtype=np.uint32)
    directory[narrow:] = narrow + (directory[narrow:] - narrow) // 2
    segments = int(directory[-1]) + 1
    depths, fill = np.full(size, depth, np.int32), np.zeros(size, np.int32)
    depths[narrow:segments] = depth - 1
    numbers = np.array([depth, segments], np.int64)
    return index._replace(directory=directory, fill=fill, depths=depths, numbers=numbers)


@compiled
def where(index: Index, key: Scalar) -> tuple[Scalar, Scalar]:
    """Return the first entry of the key's segment, and the key's tag."""
    mixed = keyed_hash(key, index.secret[0], index.secret[1])
    even = mixed >> np.uint64(32)
    # u -> u(2 + u)/3 on [0, 1): the density of the result falls from 3/2 to 3/4.
    spread = even * _TWO_THIRDS + ((even * even) >> np.uint64(32)) * _THIRD
    leading = (spread >> np.uint64(1)) >> np.uint64(63 - index.numbers[DEPTH])
    segment = np.int64(index.directory[np.int64(leading)])
    return segment * SEGMENT, ((mixed & _HOME) << np.uint64(DEEPEST)) | (spread >> np.uint64(64 - DEEPEST))


@compiled
def probe(entries: Words, base: Scalar, tag: Scalar, place: Scalar) -> Scalar:
    """Return the next place from `place` on that has this tag or is empty."""
    while True:
        entry = entries[base + place]
        if entry == np.uint64(0) or entry >> np.uint64(32) == tag:
            return place
        place = (place + 1) & (SEGMENT - 1)


@compiled
def slot_at(entries: Words, position: Scalar) -> Scalar:
    """Return the slot of an entry, or -1 for an empty entry."""
    return np.int64(entries[position] & _SLOT) - 1


@compiled
def search(
    entries: Words, records: Floats, stride: Scalar, key: Scalar, base: Scalar, tag: Scalar, place: Scalar
) -> Scalar:
    """Return the position of the key's entry, or of the empty entry where the key belongs.

    In `records`, the key of slot s is at s * stride.
    """
    while True:
        place = probe(entries, base, tag, place)
        slot = slot_at(entries, base + place)
        if slot < 0 or key_at(records, slot * stride) == key:
            return base + place
        place = (place + 1) & (SEGMENT - 1)


@compiled
def home(tag: Scalar) -> Scalar:
    """Return the place in the segment where the search for a tag starts."""
    return np.int64(tag >> np.uint64(DEEPEST))


@compiled
def split(index: Index, segment: Scalar) -> int:
    """Move the entries of a segment whose next bit is 1 into a new segment.

    Return ENOUGH. If a resource is missing, change nothing and return what is missing.
    """
    entries, fill, depths, numbers = index.entries, index.fill, index.depths, index.numbers
    depth = np.int64(depths[segment])
    if depth == numbers[DEPTH]:
        return NEEDS_DIRECTORY
    new = numbers[SEGMENTS]
    if new == len(fill) or (new + 1) * SEGMENT > len(entries):
        return NEEDS_SEGMENTS
    old = np.empty(SEGMENT, np.uint64)
    # Loop here, because numba compiles loops many times faster than assignments of slices.
    for place in range(SEGMENT):
        old[place] = entries[segment * SEGMENT + place]
        entries[segment * SEGMENT + place] = np.uint64(0)
    fill[segment] = 0
    which = np.uint64(0)
    for entry in old:
        if entry != np.uint64(0):
            tag = entry >> np.uint64(32)
            which = tag & _WHICH
            target = new if (which >> np.uint64(DEEPEST - 1 - depth)) & np.uint64(1) else segment
            place = home(tag)
            while entries[target * SEGMENT + place] != np.uint64(0):
                place = (place + 1) & (SEGMENT - 1)
            entries[target * SEGMENT + place] = entry
            fill[target] += 1
    depths[segment] = depths[new] = depth + 1
    numbers[SEGMENTS] = new + 1
    span = 1 << (numbers[DEPTH] - depth)  # entries of the directory that lead to the old segment
    first = np.int64(which >> np.uint64(DEEPEST - depth)) * span
    for place in range(first + span // 2, first + span):
        index.directory[place] = np.uint32(new)
    return ENOUGH


@compiled
def remove_entry(index: Index, position: Scalar) -> None:
    """Empty an entry, and move up the entries that it displaced."""
    entries = index.entries
    base = position // SEGMENT * SEGMENT
    hole = place = position - base
    while True:
        place = (place + 1) & (SEGMENT - 1)
        entry = entries[base + place]
        if entry == np.uint64(0):
            break
        begin = home(entry >> np.uint64(32))
        if (place - begin) & (SEGMENT - 1) >= (place - hole) & (SEGMENT - 1):
            entries[base + hole] = entry
            hole = place
    entries[base + hole] = np.uint64(0)
    index.fill[base // SEGMENT] -= 1
