"""Decide which loops may be read ahead. These are only loops in which no script can notice it.

Classes are compared by their exact names, because a subclass may do anything. A script can change the tensors
of a TensorDataset at any time, so `read_again` reads a batch once more at its turn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_READ_BY_THREADS = (
    "trainers.data.dataset.QueueDataset",
    "trainers.data.dataset.InMemoryDataset",
    "trainers.data.stream.Stream",
)
"""Data sets of this package. Their own threads read ahead, or their examples are in memory."""
_LOADERS = ("torch.utils.data.dataloader.DataLoader", "trainers.data.shard._Loader")
_TENSORS, _SUBSET = "torch.utils.data.dataset.TensorDataset", "torch.utils.data.dataset.Subset"
_RANDOM, _BATCHES = "torch.utils.data.sampler.RandomSampler", "torch.utils.data.sampler.BatchSampler"
_FIXED = (
    "torch.utils.data.sampler.SequentialSampler",
    "torch.utils.data.sampler.WeightedRandomSampler",
    "torch.utils.data.distributed.DistributedSampler",
    "trainers.data.shard.ShardSampler",
    "trainers.data.sampler.ElasticBatchSampler",
)
"""Samplers whose order is fixed when their first index is drawn."""
_COLLATES = (
    "torch.utils.data._utils.collate.default_collate",
    "torch.utils.data._utils.collate.default_convert",
)
_INDICES = (list, tuple, range, np.ndarray, Tensor)


def obstacle(batches: Any) -> str:
    """Return the reason why a script could notice early reading, such as "dataset Curriculum", or ""."""
    if _name(batches) in _READ_BY_THREADS:
        return ""
    if _name(batches) not in _LOADERS:
        return f"class {type(batches).__qualname__}"
    data, order = batches.dataset, batches.batch_sampler
    if order is None:
        order = batches.sampler
    while _name(order) == _BATCHES:
        order = order.sampler
    if isinstance(data, sys.modules["torch.utils.data"].IterableDataset):
        return f"dataset {type(data).__qualname__}"
    if not _is_fixed(order):
        return f"sampler {type(order).__qualname__}"
    return "" if batches.num_workers else _obstacle_here(batches)  # with workers, torch itself reads ahead


def _obstacle_here(batches: Any) -> str:
    """Return the same for items that are read in this process, in a known order."""
    data = batches.dataset
    if not _is_pure(data):
        return f"dataset {type(data).__qualname__}"
    if _name(batches.collate_fn) not in _COLLATES:
        return f"collate_fn {getattr(batches.collate_fn, '__qualname__', batches.collate_fn)}"
    # The items would be views of the data.
    if batches.batch_sampler is None and _name(batches.sampler) != _BATCHES:
        return "batch_size=None"
    return ""


def read_again(data: Any, index: Sequence[int]) -> list[Tensor]:
    """Return the batch with these items as torch's loader reads it now, for a loop without an obstacle."""
    while _name(data) == _SUBSET:
        index = [data.indices[each] for each in index]
        data = data.dataset
    at = torch.as_tensor(index)
    return [each[at] for each in data.tensors]


def _is_fixed(order: Any) -> bool:
    """Return True if a sampler draws all its indices with the first one. RandomSampler draws again at its
    end.
    """
    if _name(order) == _RANDOM:
        once = not order.replacement and order.num_samples <= len(order.data_source)
        return once or order.generator is None
    return _name(order) in _FIXED


def _is_pure(data: Any) -> bool:
    while _name(data) == _SUBSET and isinstance(data.indices, _INDICES):
        data = data.dataset
    return _name(data) == _TENSORS and all(
        type(each) is Tensor and each.is_cpu and each.layout is torch.strided and not each.requires_grad
        for each in data.tensors
    )


def _name(thing: object) -> str:
    """Return the full name of a function, or of the class of an object."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"
