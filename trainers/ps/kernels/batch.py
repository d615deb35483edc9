"""Whole batches of ids and gradients: their distinct keys, the server of each key, sums over equal keys, and
checks for NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainers.kernels.compiled import Floats, Keys, Places, Scalar, Words, compiled
from trainers.ps.kernels.index import SECRET, finalize, keyed_hash
from trainers.ps.kernels.memory import prefetch


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's own memory as an array for kernels, which are compiled for aligned ones; a copy if it has
    gaps or is not aligned, as bytes of a message may be.
    """
    array: NDArray[Any] = (tensor.detach() if tensor.requires_grad else tensor).contiguous().numpy()
    return array if array.flags.aligned else array.copy()


_EXPONENT = np.uint32(0x7F800000)


@compiled
def any_not_finite(values: Floats) -> bool:
    """All exponent bits are set in infinity and NaN, and in nothing else."""
    bits, bad = values.view(np.uint32), np.uint32(0)
    for place in range(len(bits)):
        bad |= np.uint32((bits[place] & _EXPONENT) == _EXPONENT)
    return bool(bad)


def all_finite(grad: torch.Tensor) -> bool:
    """Whether a float32 tensor holds neither NaN nor infinity."""
    return not any_not_finite(array_of(grad).reshape(-1))


# ---- The distinct ids of a batch, by hashing rather than sorting.

AHEAD = 32


@compiled
def unique_kernel(ids: Keys, secret: Words, table: Places, keys: Keys, place: Keys, counts: Keys) -> int:
    """Fill keys, place and counts; returns the number of keys. `table` is zeros (a power of two, at least
    twice the ids): the number of a key + 1 at its place.
    """
    mask = np.uint64(len(table) - 1)
    first, second = secret[0], secret[1]
    found = 0
    homes = np.empty(AHEAD, np.uint64)
    for position in range(min(AHEAD, len(ids))):
        homes[position] = keyed_hash(ids[position], first, second) & mask
    for position in range(len(ids)):
        key = ids[position]
        home = homes[position % AHEAD]
        if position + AHEAD < len(ids):  # so that its cache line is loaded in time
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


def unique(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distinct ids in the order of their first appearance, (u,) int64; the position among them of each
    id, (n,) int64; how often each occurs, (u,) int64. `ids`: (n,) int64, any values.
    """
    flat = ids.contiguous().numpy()
    size = len(flat)
    if not size:
        return torch.empty_like(ids), torch.empty_like(ids), torch.empty_like(ids)
    table = np.zeros(1 << (2 * size - 1).bit_length(), np.int32)
    keys, place, counts = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    found = unique_kernel(flat, SECRET, table, keys, place, counts)
    # Copies of the used parts: a view would keep the whole buffer in memory.
    return (
        torch.from_numpy(keys[:found].copy()),
        torch.from_numpy(place),
        torch.from_numpy(counts[:found].copy()),
    )


# ---- The server of each key. A hash: a plain modulo would put all multiples of the number of servers on one.


@compiled
def owners_kernel(keys: Keys, servers: Scalar, out: Keys) -> None:
    for position in range(len(keys)):
        out[position] = np.int64(finalize(np.uint64(keys[position])) % np.uint64(servers))


@compiled
def arrange_kernel(owner: Keys, starts: Keys, positions: Keys) -> bool:
    """Counting sort: positions of owner 0, then 1, ...; afterwards starts[s + 1] is the end of owner s.
    `starts`: zeros, one more than there are owners. False: they are in this order already, and positions were
    not filled.
    """
    last, sorted_already = 0, True
    for position in range(len(owner)):
        server = owner[position]
        starts[server + 1] += 1
        if server < last:
            sorted_already = False
        last = server
    for server in range(1, len(starts)):
        starts[server] += starts[server - 1]
    if sorted_already:
        return False
    ends = np.empty_like(starts)
    for server in range(len(starts)):
        ends[server] = starts[server]
    for position in range(len(owner)):
        server = owner[position]
        positions[ends[server]] = position
        ends[server] += 1
    return True


def owners(keys: torch.Tensor, servers: int) -> torch.Tensor:
    """The server of each sparse key, (n,) int64: the finalizer of splitmix64, modulo servers."""
    out = np.empty(len(keys), np.int64)
    owners_kernel(keys.contiguous().numpy(), servers, out)
    return torch.from_numpy(out)


def order_by_server(keys: torch.Tensor, servers: int) -> tuple[torch.Tensor | None, list[int]]:
    """The permutation that orders keys by server, (n,) int64, or None if they are ordered; and cuts: the keys
    of server s are then at [cuts[s], cuts[s + 1]), in their former order.
    """
    if servers == 1:
        return None, [0, len(keys)]
    starts, positions = np.zeros(servers + 1, np.int64), np.empty(len(keys), np.int64)
    moved = arrange_kernel(owners(keys, servers).numpy(), starts, positions)
    cuts: list[int] = starts.tolist()
    return (torch.from_numpy(positions) if moved else None), cuts


def split_by_server(keys: torch.Tensor, servers: int) -> list[torch.Tensor]:
    """For each server the positions of its keys, (n_s,) int64, ascending."""
    order, cuts = order_by_server(keys, servers)
    positions = torch.arange(len(keys)) if order is None else order
    return [positions[start:stop] for start, stop in pairwise(cuts)]


@compiled
def add_rows(place: Keys, rows: Floats, seen: Scalar, out: Floats) -> int:
    """out[place[i]] += rows[i] in the order of i; the first row of a place (a place >= seen) is copied.
    Returns how many places have been seen.
    """
    width = rows.shape[1]
    for position in range(len(place)):
        total, row = out[place[position]], rows[position]
        if place[position] >= seen:  # places are numbered by first appearance
            seen = place[position] + 1
            for column in range(width):
                total[column] = row[column]
        else:
            for column in range(width):
                total[column] += row[column]
    return int(seen)


def merge_rows(pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the rows of equal keys, in the order given: pieces of (keys (n,) int64, rows (n, width) float32)
    -> keys (u,) in the order of their first appearance, and (u, width) float32.

    Keys may repeat within a piece too. There must be at least one piece.
    """
    keys, place, _ = unique(torch.cat([keys for keys, _ in pieces]))
    out = np.empty((len(keys), pieces[0][1].shape[1]), np.float32)
    places, start, seen = place.numpy(), 0, 0
    for piece_keys, rows in pieces:
        stop = start + len(piece_keys)
        seen = add_rows(places[start:stop], rows.contiguous().numpy(), seen, out)
        start = stop
    return keys, torch.from_numpy(out)
