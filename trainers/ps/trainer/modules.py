"""Modules that can be served: which of a model's embeddings, and how their tables begin. Leaves serving to
`embedding`.
"""

from __future__ import annotations

import torch

from trainers.errors import NotSupportedError
from trainers.ps.tables.spec import Initializer, InitKind, RowOptions
from trainers.ps.trainer.sparse_embedding import SparseEmbedding

EmbeddingModule = torch.nn.Embedding | torch.nn.EmbeddingBag | SparseEmbedding


def find(model: torch.nn.Module) -> list[tuple[str, EmbeddingModule]]:
    """The sparse embeddings of a model by name. Raises NotSupportedError for one that cannot be served."""
    found = []
    for name, module in model.named_modules():
        bounded = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        if isinstance(module, SparseEmbedding) or bounded:
            _check(model, name, module)
            found.append((name, module))
    return found


def bound(module: EmbeddingModule) -> int | None:
    """The number of rows; None where any id is one: SparseEmbedding, and weights on the meta device."""
    if isinstance(module, SparseEmbedding) or module.weight.is_meta:
        return None
    return module.num_embeddings


def rows_of(module: EmbeddingModule) -> RowOptions:
    """How rows begin that nobody assigned: of torch's modules, as their reset_parameters draws them."""
    if isinstance(module, SparseEmbedding):
        return RowOptions(
            init=module.init,
            entry=module.entry,
            low=module.low,
            high=module.high,
            statistics=module.statistics,
        )
    return RowOptions(init=Initializer(InitKind.NORMAL, 0.0, 1.0))


def _check(model: torch.nn.Module, name: str, module: EmbeddingModule) -> None:
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        if type(module).forward not in (torch.nn.Embedding.forward, torch.nn.EmbeddingBag.forward):
            raise NotSupportedError(
                f"embedding {name!r} is a {type(module).__name__} with a forward of its own"
            )
        if module.max_norm is not None:
            raise NotSupportedError(
                f"embedding {name!r} has max_norm={module.max_norm}, which servers do not apply"
            )
    if module.weight.dtype != torch.float32:
        raise NotSupportedError(f"embedding {name!r} is {module.weight.dtype}; servers keep float32")
    users = [
        where
        for where, other in model.named_modules()
        if any(parameter is module.weight for parameter in other.parameters(recurse=False))
    ]
    if len(users) > 1:
        raise NotSupportedError(
            f"embedding {name!r} shares its weight with {', '.join(users)}; use sparse=False there"
        )
