"""Unique: the different ids of a batch. By hash, not by sorting."""

from __future__ import annotations

import numpy as np
import torch

from trainers.ps.kernels.compiled import Keys, Places, Words, compiled
from trainers.ps.kernels.memory import prefetch
from trainers.ps.kernels.mixing import SECRET, keyed_hash

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
        if position + AHEAD < len(ids):  # its cache line shall be here when its turn comes
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
    """The different ids in the order of their first appearance, (u,) int64; the position among them of each
    id, (n,) int64; how often each occurs, (u,) int64. `ids`: (n,) int64, any values.
    """
    flat = ids.contiguous().numpy()
    size = len(flat)
    if not size:
        return torch.empty_like(ids), torch.empty_like(ids), torch.empty_like(ids)
    table = np.zeros(1 << (2 * size - 1).bit_length(), np.int32)
    keys, place, counts = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    found = unique_kernel(flat, SECRET, table, keys, place, counts)
    # Copies of the used parts: a view would hold the whole buffer for as long as its keys live.
    return (
        torch.from_numpy(keys[:found].copy()),
        torch.from_numpy(place),
        torch.from_numpy(counts[:found].copy()),
    )
