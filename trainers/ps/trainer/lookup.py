"""Lookups: the ids of a batch, each of them once, and where in the batch they stand. Knows tensors of ids;
leaves rows to `remote` and `local`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainers.ps.kernels.unique import unique


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """`keys` (u,) int64, all different; `place`: for each id of the batch the position of its key, in the
    shape of the ids; `counts` (u,) int64: how often each key occurs in it, which may be never.
    """

    keys: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor


def lookup_of(ids: torch.Tensor) -> Lookup:
    keys, place, counts = unique(_flat(ids))
    return Lookup(keys, place.view(ids.shape), counts)


def lookups_of(batches: Sequence[torch.Tensor]) -> list[Lookup]:
    """One lookup over all these tensors: the same keys for each, and places of its own."""
    if len(batches) == 1:
        return [lookup_of(batches[0])]
    keys, places, _ = unique(torch.cat([_flat(ids) for ids in batches]))
    found, start = [], 0
    for ids in batches:
        place = places[start : start + ids.numel()]
        found.append(Lookup(keys, place.view(ids.shape), torch.bincount(place, minlength=len(keys))))
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


def _flat(ids: torch.Tensor) -> torch.Tensor:
    return ids.detach().reshape(-1).to("cpu", torch.int64)
