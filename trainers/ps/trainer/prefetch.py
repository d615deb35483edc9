"""Prefetch: what scripts may say about the ids of a batch. Leaves rows to `worker`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from trainers.errors import UsageError

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
Ids: TypeAlias = Tensors | Mapping[torch.nn.Module, Tensors]
"""The tensors with which embeddings will be called: for each module, or of the only one."""


def by_module(
    ids: Ids, served: Sequence[torch.nn.Module]
) -> Mapping[torch.nn.Module, Sequence[torch.Tensor]]:
    """What a script said, in full. Raises UsageError for a module that is not served, and for tensors of
    no module when there are several.
    """
    if not isinstance(ids, Mapping):
        if len(served) != 1:
            raise UsageError(
                f"fleet.prefetch got ids without a module, and {len(served)} embeddings are served; "
                "return {module: ids, ...}"
            )
        ids = {served[0]: ids}
    known = {id(module) for module in served}
    for module in ids:
        if id(module) not in known:
            raise UsageError(f"fleet.prefetch got ids of {module}, which no server serves")
    return {module: [each] if isinstance(each, torch.Tensor) else each for module, each in ids.items()}
