"""Process whole batches of ids and gradients. The kernels find distinct keys and the server of each key, sum
rows of equal keys, and check for NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainers.kernels.compiled import Floats, Keys, Mask, Words, compiled
from trainers.ps.kernels.index import SECRET, finalize, keyed_hash
from trainers.ps.kernels.memory import carray, pointer, prefetch


def array_of(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's own memory as an array for kernels, or a copy if the tensor has gaps or is not
    aligned.

    Kernels are compiled for aligned arrays, but the bytes of a message may not be aligned.
    """
    array: NDArray[Any] = (tensor.detach() if tensor.requires_grad else tensor).contiguous().numpy()
    return array if array.flags.aligned else array.copy()


_EXPONENT = np.uint32(0x7F800000)


@compiled
def any_not_finite(values: Floats) -> bool:
    """Return True if a value is infinite or NaN. Exactly these values have all exponent bits set."""
    bits, bad = values.view(np.uint32), np.uint32(0)
    for place in range(len(bits)):
        bad |= np.uint32((bits[place] & _EXPONENT) == _EXPONENT)
    return bool(bad)


def all_finite(grad: Tensor) -> bool:
    """Return True if every value of a float32 tensor is finite."""
    return not any_not_finite(array_of(grad).reshape(-1))


# ---- The distinct ids of a batch, by hashing instead of sorting.

AHEAD = 32


@compiled
def unique_kernel(ids: Keys, secret: Words, keys: Keys, place: Keys, counts: Keys) -> int:
    """Find the distinct ids, with any values, and return their number.

    The kernel fills `keys` with the ids in the order of their first appearance, `place` with the position of
    each input id among them, and `counts` with how often each occurs.
    """
    size = np.int64(2)
    while size < 2 * len(ids):
        size *= 2
    # The number of a key plus 1 is stored at the key's place.
    table = np.zeros(size, np.int32)
    mask = np.uint64(len(table) - 1)
    first, second = secret[0], secret[1]
    found = 0
    homes = np.empty(AHEAD, np.uint64)
    for position in range(min(AHEAD, len(ids))):
        homes[position] = keyed_hash(ids[position], first, second) & mask
    for position in range(len(ids)):
        key = ids[position]
        home = homes[position % AHEAD]
        if position + AHEAD < len(ids):  # loads its cache line in time
            later = keyed_hash(ids[position + AHEAD], first, second) & mask
            homes[position % AHEAD] = later
            prefetch(table, np.int64(later))
        while True:
            number = table[home]
            if number == 0:
                table[home] = found + 1
                keys[found] = key
                place[position] = found
                counts[found] = 1
                found += 1
                break
            if keys[number - 1] == key:
                place[position] = number - 1
                counts[number - 1] += 1
                break
            home = (home + np.uint64(1)) & mask
    return found


# ---- The server of each key, by a hash. A plain modulo would put all multiples of the number of servers on
# one server.


@compiled
def owners_kernel(keys: Keys, holders: Keys, out: Keys) -> None:
    """Write the server of keys[i] to out[i]. See `owners`."""
    servers = np.uint64(len(holders))
    for position in range(len(keys)):
        out[position] = holders[np.int64(finalize(np.uint64(keys[position])) % servers)]


def owners(keys: Tensor, holders: Keys) -> Tensor:
    """Return the server of each key of a table, (n,) int64.

    The server is the holder with the number (finalizer of splitmix64) modulo (number of holders).
    """
    out = np.empty(len(keys), np.int64)
    owners_kernel(keys.contiguous().numpy(), holders, out)
    return torch.from_numpy(out)


@compiled
def add_rows(place: Keys, rows: Floats, out: Floats) -> None:
    """Add rows[i] to out[place[i]] in the order of i."""
    width = rows.shape[1]
    for position in range(len(place)):
        total, row = out[place[position]], rows[position]
        for column in range(width):
            total[column] += row[column]


# ---- The same for a run of tables at once. The keys of table t are at [starts[t], starts[t + 1]). Keys of
# different tables are different, even if their values are equal.


@compiled
def union_kernel(keys: Keys, starts: Keys, secret: Words, spans: Keys, to_keys: Keys, place: Keys) -> int:
    """Merge the keys of all pieces, as `union_runs` describes, and return the number of keys.

    `starts` (pieces, tables + 1) holds places in `keys`. Tables with spans[t] = 0 get their number of keys.
    """
    total = np.int64(0)
    for table in range(len(spans)):
        size = np.int64(0)
        for piece in range(len(starts)):
            size += starts[piece, table + 1] - starts[piece, table]
        if not size:
            continue
        some, where, counts = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
        at = 0
        for piece in range(len(starts)):
            for position in range(starts[piece, table], starts[piece, table + 1]):
                some[at] = keys[position]
                at += 1
        found = unique_kernel(some, secret, to_keys[total : total + size], where, counts)
        at = 0
        for piece in range(len(starts)):
            for position in range(starts[piece, table], starts[piece, table + 1]):
                place[position] = total + where[at]
                at += 1
        spans[table] = found
        total += found
    return int(total)


def union_runs(
    pieces: Sequence[tuple[Keys, Keys]],
) -> tuple[Keys, Keys, Keys]:
    """Return the distinct keys of a run of tables, from at least one piece.

    A piece has spans (tables,) int64, see `tables.run`, and keys (n,) int64. The result has the spans and
    keys of the union, and the place of each input key among them, piece after piece. The keys of each table
    are in the order of their first appearance.
    """
    spans = np.array([each for each, _ in pieces])
    starts = np.zeros((len(pieces), spans.shape[1] + 1), np.int64)
    np.cumsum(np.maximum(spans, 0), axis=1, out=starts[:, 1:])
    starts[1:] += np.cumsum(starts[:-1, -1])[:, None]
    keys = np.concatenate([each for _, each in pieces])
    merged = np.minimum(spans.max(axis=0), 0)
    to_keys, place = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
    found = union_kernel(keys, starts, SECRET, merged, to_keys, place)
    return merged, to_keys[:found].copy(), place


@compiled
def sum_rows(place: Keys, rows: Floats, out: Floats) -> None:
    """Add rows[i] to out[place[i]] in the order of i. The first row of a place is copied."""
    width = rows.shape[1]
    seen = np.zeros(len(out), np.bool_)
    for position in range(len(place)):
        target, row = out[place[position]], rows[position]
        if seen[place[position]]:
            for column in range(width):
                target[column] += row[column]
        else:
            seen[place[position]] = True
            for column in range(width):
                target[column] = row[column]


def merge_runs(
    pieces: Sequence[tuple[Keys, Tensor, Tensor]],
) -> tuple[Keys, Tensor, Tensor]:
    """Sum the rows of equal keys of a run of tables, in the order given.

    A piece has spans (tables,) int64, keys (n,) int64 and rows (n, width) float32. The result has the same
    three parts for the union of all keys, see `union_runs`.
    """
    spans, keys, place = union_runs([(spans, array_of(keys)) for spans, keys, _ in pieces])
    rows = array_of(torch.cat([each for *_, each in pieces]))
    out = np.empty((len(keys), rows.shape[1]), np.float32)
    sum_rows(place, rows, out)
    return spans, torch.from_numpy(keys), torch.from_numpy(out)


@compiled
def distinct_run(
    addresses: Keys,
    starts: Keys,
    firsts: Keys,
    secret: Words,
    ids: Keys,
    keys: Keys,
    place: Keys,
    counts: Keys,
    ends: Keys,
) -> int:
    """Find the distinct ids of all calls of a run of tables, and return the number of keys.

    The ids of each call are an int64 array at one of `addresses`. Call c uses [starts[c], starts[c + 1]) of
    `ids` and `place`. Table t has the calls [firsts[t], firsts[t + 1]). The kernel fills `ids`, and the keys
    and counts of table t at [ends[t], ends[t + 1]). It also fills `place` with the place of each id among the
    keys of its table.
    """
    for call in range(len(addresses)):
        given = carray(pointer(addresses[call]), (starts[call + 1] - starts[call],), np.int64)
        for position in range(len(given)):
            ids[starts[call] + position] = given[position]
    total = np.int64(0)
    for table in range(len(firsts) - 1):
        start, stop = starts[firsts[table]], starts[firsts[table + 1]]
        if start < stop:
            to_keys, to_counts = keys[total:], counts[total:]
            total += unique_kernel(ids[start:stop], secret, to_keys, place[start:stop], to_counts)
        ends[table + 1] = total
    return int(total)


@compiled
def arrange_run(
    keys: Keys,
    ends: Keys,
    skipped: Keys,
    holders: Keys,
    shares: Keys,
    moved: Keys,
    spans: Keys,
    to_keys: Keys,
) -> None:
    """Order the keys of a run by server, and the keys of each server by table.

    `skipped` holds for each table the place of a key to leave out, or -1. The rows of table t are on
    holders[shares[t] : shares[t + 1]]. The kernel sets moved[k] to the new position of key k, or to -1 if the
    key is left out. `spans` (servers, tables) must contain zeros and receives the number of keys.
    """
    servers, tables = spans.shape
    starts = np.zeros((servers, tables), np.int64)
    owner = np.zeros(len(keys), np.int64)
    for table in range(tables):
        if servers > 1:
            start, stop = ends[table], ends[table + 1]
            owners_kernel(keys[start:stop], holders[shares[table] : shares[table + 1]], owner[start:stop])
        left_out = ends[table] + skipped[table] if skipped[table] >= 0 else -1
        for position in range(ends[table], ends[table + 1]):
            if position == left_out:
                owner[position] = -1
            else:
                spans[owner[position], table] += 1
    total = np.int64(0)
    for server in range(servers):
        for table in range(tables):
            starts[server, table] = total
            total += spans[server, table]
    for table in range(tables):
        for position in range(ends[table], ends[table + 1]):
            server = owner[position]
            if server < 0:
                moved[position] = -1
            else:
                target = starts[server, table]
                starts[server, table] = target + 1
                moved[position] = target
                to_keys[target] = keys[position]


@compiled
def find_run(
    keys: Keys, ends: Keys, wanted: Keys, has: Mask, limits: Keys, found: Keys, outside: Keys
) -> None:
    """Find the wanted key of each table, and keys outside the limits.

    found[t] is the place of wanted[t] among the keys of table t, or -1. outside[t] is the place of a key
    outside [0, limits[t]), or -1. A limit of -1 means that the table has no limit.
    """
    for table in range(len(wanted)):
        found[table] = outside[table] = -1
        for position in range(ends[table], ends[table + 1]):
            key = keys[position]
            if has[table] and key == wanted[table]:
                found[table] = position - ends[table]
            if limits[table] >= 0 and not 0 <= key < limits[table]:
                outside[table] = position - ends[table]


@compiled
def gather_calls(
    rows: Floats, places: Keys, begins: Keys, sizes: Keys, moved: Keys, firsts: Keys, addresses: Keys
) -> None:
    """Fill the float32 arrays (size, width) at `addresses`, one for each call.

    Row i of a call is the row of the key at places[begin + i] of its table. `first` is the first key of the
    table, and `moved` gives the position of the row.
    """
    width = rows.shape[1]
    for call in range(len(addresses)):
        begin, size, first = begins[call], sizes[call], firsts[call]
        out = carray(pointer(addresses[call]), (size, width), np.float32)
        for position in range(size):
            source, target = rows[moved[first + places[begin + position]]], out[position]
            for column in range(width):
                target[column] = source[column]


@compiled
def scatter_calls(
    addresses: Keys,
    strides: Keys,
    places: Keys,
    begins: Keys,
    sizes: Keys,
    moved: Keys,
    firsts: Keys,
    out: Floats,
) -> None:
    """Reverse `gather_calls`. Add the rows at `addresses` to `out`.

    The distance between rows is `strides` values. Rows with -1 in `moved` are left out.
    """
    width = out.shape[1]
    for call in range(len(addresses)):
        begin, size, first, stride = begins[call], sizes[call], firsts[call], strides[call]
        if not size:
            continue
        given = carray(pointer(addresses[call]), ((size - 1) * stride + width,), np.float32)
        for position in range(size):
            to = moved[first + places[begin + position]]
            if to >= 0:
                source, target = given[position * stride : position * stride + width], out[to]
                for column in range(width):
                    target[column] += source[column]
