"""Owners: which server holds which key, for a whole batch: a hash, since a plain modulo would put
keys that are multiples of the number of servers on one of them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from trainers.ps.kernels.compiled import Keys, Scalar, compiled
from trainers.ps.kernels.mixing import finalize


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


def arranged(keys: torch.Tensor, servers: int) -> tuple[torch.Tensor | None, list[int]]:
    """The order in which keys stand server by server, (n,) int64; None when they do already. In it those of
    server s are at [cuts[s], cuts[s + 1]), where they keep the order that they had.
    """
    if servers == 1:
        return None, [0, len(keys)]
    starts, positions = np.zeros(servers + 1, np.int64), np.empty(len(keys), np.int64)
    moved = arrange_kernel(owners(keys, servers).numpy(), starts, positions)
    cuts: list[int] = starts.tolist()
    return (torch.from_numpy(positions) if moved else None), cuts


def split(keys: torch.Tensor, servers: int) -> list[torch.Tensor]:
    """For each server the positions of its keys, (n_s,) int64, ascending."""
    order, cuts = arranged(keys, servers)
    positions = torch.arange(len(keys)) if order is None else order
    return [positions[start:stop] for start, stop in pairwise(cuts)]
