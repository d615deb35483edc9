"""Lookups: the ids of a batch, each of them once, and where in the batch they stand. Knows tensors of ids;
leaves rows to `remote` and `local`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainers.ps.kernels.owners import arranged
from trainers.ps.kernels.unique import unique


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """`keys` (u,) int64, all different, those of server s at [cuts[s], cuts[s + 1]); `place`: for each id of
    the batch the position of its key, in the shape of the ids; `counts` (u,) int64: how often each key occurs
    in it, which may be never.
    """

    keys: torch.Tensor
    cuts: Sequence[int]
    place: torch.Tensor
    counts: torch.Tensor


def lookup_of(ids: torch.Tensor, servers: int = 1) -> Lookup:
    return _lookup(_flat(ids), ids.shape, servers)


def lookups_of(batches: Sequence[torch.Tensor], servers: int = 1) -> list[Lookup]:
    """One lookup over all these tensors: the same keys for each, and places of its own."""
    if len(batches) == 1:
        return [lookup_of(batches[0], servers)]
    flat = torch.cat([_flat(ids) for ids in batches])
    every = _lookup(flat, flat.shape, servers)
    found, start = [], 0
    for ids in batches:
        place = every.place[start : start + ids.numel()]
        counts = torch.bincount(place, minlength=len(every.keys))
        found.append(Lookup(every.keys, every.cuts, place.view(ids.shape), counts))
        start += ids.numel()
    return found


def same_ids(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether these are the same numbers in the same memory."""
    return left is right or (
        left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.dtype == right.dtype
        and left.device == right.device
    )


def version_of(ids: torch.Tensor) -> int:
    """Grows with every change in place; inference tensors cannot be changed."""
    return 0 if ids.is_inference() else ids._version


def _lookup(flat: torch.Tensor, shape: torch.Size, servers: int) -> Lookup:
    keys, place, counts = unique(flat)
    order, cuts = arranged(keys, servers)
    if order is not None:
        # index_select and scatter_ take a quarter of the time of indexing.
        moved = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        keys, counts = keys.index_select(0, order), counts.index_select(0, order)
        place = moved.index_select(0, place)
    return Lookup(keys, cuts, place.view(shape), counts)


def _flat(ids: torch.Tensor) -> torch.Tensor:
    return ids.detach().reshape(-1).to("cpu", torch.int64)
