"""Stage 1 of ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): the state of each parameter's
update is with one rank, which updates it and sends it to all. Knows optimizers and broadcasts; no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from trainers.errors import NotSupportedError

MESSAGE_BYTES = 25 << 20
"""Parameters are sent in messages of about this size, as DDP sends gradients."""

AS_ONE = frozenset(("AliG", "AdaGC", "LBFGS", "Prodigy"))
"""Optimizers, torch's and pytorch_optimizer's, that look at all gradients to update one parameter."""


class ZeroOptimizer(torch.optim.Optimizer):
    """Any optimizer that treats each parameter by itself, divided among the ranks. All ranks must have the
    same gradients, as DDP leaves them, and step together.

    It shares groups and hyperparameters with the one given, so that either may be given to a scheduler.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)  # the same group dicts: a change shows in both
        self.inner = inner
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._owners: dict[torch.Tensor, int] = {}
        self._bytes = [0] * self._world
        self._give_owners(self._params())
        self.state = inner.state
        inner.register_load_state_dict_post_hook(self._share)
        if self.state:
            self.load_state_dict(inner.state_dict())

    def owned_params(self) -> list[torch.Tensor]:
        """The parameters that this rank updates and whose state it has."""
        return [param for param in self._params() if self._owners[param] == self._rank]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        changed = [param for param in self._params() if param.grad is not None]
        with self._only_mine():
            self.inner.step()
        self._send(changed)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if "inner" in self.__dict__:
            if all(param_group is not group for group in self.inner.param_groups):
                self.inner.add_param_group(param_group)
            self._give_owners(param for param in self._params() if param not in self._owners)

    def state_dict(self) -> dict[str, Any]:
        """torch's, without the state that is with other ranks. Saved by fleet.save_checkpoint it is whole."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps this rank's part of what may be the whole."""
        owned = {
            index: entry
            for index, param in enumerate(self._params())
            if self._owners[param] == self._rank and (entry := state_dict["state"].get(index)) is not None
        }
        self.inner.load_state_dict({**state_dict, "state": owned})

    def _share(self, loaded: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _give_owners(self, params: Iterable[torch.Tensor]) -> None:
        """The largest first, each to the rank with least: equal on all ranks."""
        for param in sorted(params, key=lambda each: -each.numel()):
            least = min(range(self._world), key=lambda rank: self._bytes[rank])
            self._owners[param] = least
            self._bytes[least] += param.numel() * param.element_size()

    @contextmanager
    def _only_mine(self) -> Iterator[None]:
        whole = [group["params"] for group in self.param_groups]
        for group, params in zip(self.param_groups, whole, strict=True):
            group["params"] = [param for param in params if self._owners[param] == self._rank]
        try:
            yield
        finally:
            for group, params in zip(self.param_groups, whole, strict=True):
                group["params"] = params

    @torch.no_grad()
    def _send(self, params: Sequence[torch.Tensor]) -> None:
        underway = []
        for message in _messages(params, self._owners):
            owner = self._owners[message[0]]
            if owner == self._rank:
                flat = torch.cat([param.reshape(-1) for param in message])
            else:
                flat = message[0].new_empty(sum(param.numel() for param in message))
            underway.append((message, owner, flat, dist.broadcast(flat, owner, async_op=True)))
        for message, owner, flat, work in underway:
            work.wait()
            if owner != self._rank:
                pieces = torch.split(flat, [param.numel() for param in message])
                for param, piece in zip(message, pieces, strict=True):
                    param.copy_(piece.view_as(param))


def check_divisible(optimizer: torch.optim.Optimizer) -> None:
    """Raises NotSupportedError for an optimizer whose update of a parameter depends on all others."""
    name = type(optimizer).__name__
    if name in AS_ONE or name.startswith("DAdapt"):
        what, instead = name, "another optimizer, or strategy.sharding = False"
    elif optimizer.defaults.get("max_grad_norm") and getattr(optimizer, "pre_norm", True):  # Lamb has both
        what, instead = f"max_grad_norm of {name}", "torch.nn.utils.clip_grad_norm_"
    else:
        return
    raise NotSupportedError(
        f"NotSupported: sharding stage 1 gives each rank some of the parameters, and {what} looks at all of "
        f"them; use {instead}"
    )


def _messages(params: Iterable[torch.Tensor], owners: dict[torch.Tensor, int]) -> list[list[torch.Tensor]]:
    """Parameters that travel together: of one owner, type and device."""
    by_kind: dict[Any, list[list[torch.Tensor]]] = {}
    sizes: dict[Any, int] = {}
    for param in params:
        kind = (owners[param], param.dtype, param.device)
        size = param.numel() * param.element_size()
        if kind not in by_kind or sizes[kind] + size > MESSAGE_BYTES:
            by_kind.setdefault(kind, []).append([])
            sizes[kind] = 0
        by_kind[kind][-1].append(param)
        sizes[kind] += size
    return [message for messages in by_kind.values() for message in messages]
