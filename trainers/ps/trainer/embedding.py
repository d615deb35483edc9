"""Served embeddings: nn.Embedding and nn.EmbeddingBag whose rows live on the servers. Knows their forward
and backward; leaves transport to the `Rows` that it is given.

The module stays what it was (class, name, options); only its `forward` is replaced while training: the
unique ids of a batch are pulled as one small leaf tensor, looked up by position, and the gradient of that
leaf is already summed by id.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional

from trainers.errors import NotSupportedError

EmbeddingModule = torch.nn.Embedding | torch.nn.EmbeddingBag


class Rows(Protocol):
    """Where rows come from, and where their gradients go."""

    def pull_rows(self, keys: torch.Tensor) -> torch.Tensor:
        """(n, dim) float32 for (n,) int64 keys, strictly ascending."""

    def pull_all(self) -> torch.Tensor:
        """Every row of the module, (num_embeddings, dim) float32."""

    def add_gradient(self, keys: torch.Tensor, grad: torch.Tensor) -> None:
        """Keep the gradient of these rows for the next step."""


def find(model: torch.nn.Module) -> list[tuple[str, EmbeddingModule]]:
    """The sparse embeddings of a model by name. Raises NotSupportedError for one that cannot be served."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingModule) and module.sparse
    ]
    for name, module in found:
        _check(model, name, module)
    return found


def _check(model: torch.nn.Module, name: str, module: EmbeddingModule) -> None:
    if type(module).forward not in (torch.nn.Embedding.forward, torch.nn.EmbeddingBag.forward):
        raise NotSupportedError(f"embedding {name!r} is a {type(module).__name__} with a forward of its own")
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


class Serving:
    """One embedding module that is served: from construction until `end`."""

    def __init__(self, name: str, module: EmbeddingModule, rows: Rows) -> None:
        self._name = name
        self._module = module
        self._rows = rows
        self._device = module.weight.device
        module.weight.data = torch.empty(
            0, module.embedding_dim, device=self._device
        )  # the servers have it now
        lookup: Callable[..., torch.Tensor] = (
            self._embedding if isinstance(module, torch.nn.Embedding) else self._bag
        )
        module.forward = lookup  # type: ignore[method-assign]  # on the instance, and only while it is served
        self._hook: torch.utils.hooks.RemovableHandle = module.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            # A function of its own: torch sets an attribute on it, which a method does not take.
            lambda module, state, prefix, metadata: state.update({f"{prefix}weight": rows.pull_all()})
        )

    def end(self, weight: torch.Tensor) -> None:
        """Make it an ordinary module again, with these values."""
        self._module.weight.data = weight.to(self._device)
        del self._module.forward  # the class's own is back
        self._hook.remove()

    def _embedding(self, input: torch.Tensor) -> torch.Tensor:
        place, rows, keys = self._lookup(input)
        module = self._module
        return functional.embedding(
            place,
            rows,
            padding_idx=_place_of(module.padding_idx, keys),
            scale_grad_by_freq=module.scale_grad_by_freq,
        )

    def _bag(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        place, rows, keys = self._lookup(input)
        module: Any = self._module
        return functional.embedding_bag(
            place,
            rows,
            offsets,
            mode=module.mode,
            scale_grad_by_freq=module.scale_grad_by_freq,
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=_place_of(module.padding_idx, keys),
        )

    def _lookup(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(position of each id in `rows`, rows, the unique keys)."""
        keys, place = torch.unique(ids.detach().cpu().to(torch.int64), return_inverse=True)
        self._check_range(keys)
        rows = self._rows.pull_rows(keys).to(self._device)
        if torch.is_grad_enabled() and self._module.weight.requires_grad:
            rows.requires_grad_()
            collect = functools.partial(self._collect, keys)
            rows.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]  # torch's
        return place.to(self._device), rows, keys

    def _collect(self, keys: torch.Tensor, leaf: torch.Tensor) -> None:
        if leaf.grad is None:
            return
        grad, leaf.grad = leaf.grad.detach().cpu(), None  # a second backward adds only its own share
        padding = self._module.padding_idx
        if padding is not None:
            kept = keys != padding  # torch leaves the padding row out of the gradient altogether
            keys, grad = keys[kept], grad[kept]
        self._rows.add_gradient(keys, grad)

    def _check_range(self, keys: torch.Tensor) -> None:
        total = self._module.num_embeddings
        if len(keys) and (int(keys[0]) < 0 or int(keys[-1]) >= total):
            wrong = int(keys[0]) if int(keys[0]) < 0 else int(keys[-1])
            raise IndexError(
                f"embedding {self._name!r} has rows 0 to {total - 1}; id {wrong} is out of range"
            )


def _place_of(padding: int | None, keys: torch.Tensor) -> int | None:
    if padding is None:
        return None
    place = int(torch.searchsorted(keys, padding))
    return place if place < len(keys) and int(keys[place]) == padding else None
