"""Divide the optimizer's state (stage 1), also gradients (2), and also parameters (3) among ranks.

Stage 1 follows ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). One rank updates each
parameter, holds its state, and sends the result to all. Stages 2 and 3 are torch's FSDP2. Units are the
modules that it fetches and frees together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module
from torch.optim import Optimizer

from fleetrun.aliases import Document
from trainers.checkpoints.tensors import Sharded as Sharded
from trainers.checkpoints.tensors import whole_state_dict as whole_state_dict  # documented here
from trainers.collective.averaging import messages_of, put_back
from trainers.collective.configs import ShardingConfigs
from trainers.collective.modules import matching_modules
from trainers.errors import NotSupportedError, UsageError
from trainers.optimizer import WrappingOptimizer, loss_of, parameters_of

# ---- Stage 1: one rank has the state of each parameter's update, and sends the result to all

AS_ONE = frozenset(("AliG", "AdaGC", "LBFGS", "Prodigy"))
"""Optimizers of torch and pytorch_optimizer that use all gradients to update one parameter."""


class ZeroOptimizer(WrappingOptimizer):
    """Any optimizer that updates each parameter separately, divided among the ranks.

    All ranks must have the same gradients, as with DDP, and step together. Its `state_dict` is torch's,
    without the state of other ranks. fleet.save_checkpoint saves the whole state.
    """

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._owners: dict[Tensor, int] = {}
        self._bytes = [0] * self._world
        self._give_owners(parameters_of(self))
        inner.register_load_state_dict_post_hook(self._share)
        if self.state:
            self.load_state_dict(inner.state_dict())

    def owned_params(self) -> list[Tensor]:
        """Return the parameters that this rank updates, and whose state it has."""
        return [param for param in parameters_of(self) if self._owners[param] == self._rank]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = loss_of(closure)
        changed = [param for param in parameters_of(self) if param.grad is not None]
        with self._only_mine():
            self.inner.step()
        self._send(changed)
        return loss

    def add_param_group(self, param_group: Document) -> None:
        super().add_param_group(param_group)
        if "inner" in self.__dict__:
            self._give_owners(param for param in parameters_of(self) if param not in self._owners)

    def load_state_dict(self, state_dict: Document) -> None:
        """Keep this rank's part of a state, which may be the whole."""
        owned = {
            index: entry
            for index, param in enumerate(parameters_of(self))
            if self._owners[param] == self._rank and (entry := state_dict["state"].get(index)) is not None
        }
        self.inner.load_state_dict({**state_dict, "state": owned})

    def _give_owners(self, params: Iterable[Tensor]) -> None:
        """Assign each parameter, largest first, to the rank with the fewest bytes. The result is equal on all
        ranks.
        """
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
    def _send(self, params: Sequence[Tensor]) -> None:
        underway = []
        for message in messages_of(params, lambda param: (self._owners[param], param.dtype, param.device)):
            owner = self._owners[message[0]]
            if owner == self._rank:
                flat = torch.cat([param.reshape(-1) for param in message])
            else:
                flat = message[0].new_empty(sum(param.numel() for param in message))
            underway.append((message, owner, flat, dist.broadcast(flat, owner, async_op=True)))
        for message, owner, flat, work in underway:
            work.wait()
            if owner != self._rank:
                put_back(flat, message)


def check_divisible(optimizer: Optimizer) -> None:
    """Raise NotSupportedError for an optimizer whose update of a parameter depends on all others."""
    name = type(optimizer).__name__
    if name in AS_ONE or name.startswith("DAdapt"):
        what, instead = name, "another optimizer, or strategy.sharding = False"
    elif optimizer.defaults.get("max_grad_norm") and getattr(optimizer, "pre_norm", True):  # Lamb has both
        what, instead = f"max_grad_norm of {name}", "torch.nn.utils.clip_grad_norm_"
    else:
        return
    raise NotSupportedError(
        f"NotSupported: sharding stage 1 gives each rank some of the parameters, but {what} needs all of "
        f"them. Use {instead}."
    )


# ---- The modules that FSDP2 fetches and frees as one

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are never called, so their parameters would not be fetched."""

WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that use the parameters of inner modules without calling these."""


def units(model: nn.Module, least: int) -> list[str]:
    """Return the names of unit modules, inner ones first.

    Each unit has at least `least` bytes of parameters outside its inner units. The remaining parameters
    belong to the model. This is the rule of torch's `size_based_auto_wrap_policy`.
    """
    found: list[str] = []
    _rest(model, model, "", least, found)
    return found


def _rest(model: nn.Module, module: nn.Module, name: str, least: int, found: list[str]) -> int:
    """Return the bytes of the module's parameters outside its units."""
    if isinstance(module, WHOLE):
        size = _bytes_of(module.parameters())
    else:
        size = _bytes_of(module.parameters(recurse=False))
        prefix = f"{name}." if name else ""
        size += sum(
            _rest(model, child, f"{prefix}{at}", least, found) for at, child in module.named_children()
        )
    if size < least or not name or isinstance(module, CONTAINERS) or is_shared(model, module):
        return size
    found.append(name)
    return 0


def is_shared(model: nn.Module, module: nn.Module) -> bool:
    """Return True if the module, or a parameter in it, also has another place in the model."""
    everywhere = Counter(map(id, _named_params(model)))
    inside = Counter(map(id, _named_params(module)))
    modules = Counter(id(each) for _, each in model.named_modules(remove_duplicate=False))
    return modules[id(module)] > 1 or any(everywhere[key] > count for key, count in inside.items())


def check_unit(model: nn.Module, name: str) -> None:
    """Raise UsageError for a module that cannot be a unit."""
    module = model.get_submodule(name)
    why = None
    if isinstance(module, CONTAINERS):
        why = f"is a {type(module).__name__} and never called. Name its members, as `{name}.*`."
    elif not any(True for _ in module.parameters()):
        why = "has no parameters. Remove it."
    elif is_shared(model, module):
        why = "shares parameters with other modules. Name a module that contains all of them, or remove it."
    if why is not None:
        raise UsageError(f"sharding_configs segment_anchors names {name!r}, which {why}")


def _named_params(module: nn.Module) -> list[nn.Parameter]:
    """Return every parameter once per name."""
    return [param for _, param in module.named_parameters(remove_duplicate=False)]


def _bytes_of(params: Iterable[Tensor]) -> int:
    return sum(param.numel() * param.element_size() for param in params)


# ---- Sharding of optimizers and models


def zero_optimizer(optimizer: Optimizer) -> Optimizer:
    """Apply stage 1 to the optimizer. One rank updates each parameter and sends it to all.

    The result shares `param_groups` with the given optimizer, which keeps only the state of this rank's
    parameters. Raises NotSupportedError for an optimizer whose update of a parameter depends on all others.
    """
    check_divisible(optimizer)
    return ZeroOptimizer(optimizer)


def shard(model: Module, configs: ShardingConfigs) -> Module:
    """Apply stages 2 and 3 to the model, in place of DataParallel.

    The model is the same object, and its parameters are now DTensors, of which each rank holds a part. It
    starts from rank 0's values, as DDP does, and has `clear_gradients`.

    All ranks must call the model equally often, even in eval mode, because each rank needs the parts of all
    others. To evaluate on one rank, see `whole_state_dict`. In training each rank has its own buffers, and in
    evaluation rank 0's. Raises UsageError for invalid anchors, and NotSupportedError for parameters that
    torch cannot divide.
    """
    # Late, so that other jobs do not wait for the import.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for name, param in model.named_parameters():
        if not (param.dim() and param.is_contiguous()):
            raise NotSupportedError(
                f"NotSupported: sharding stage {configs.stage} cannot divide parameter {name!r} of shape "
                f"{tuple(param.shape)} and strides {param.stride()}. Make it contiguous with at least one "
                "dimension, or use stage 1."
            )
    names = _units(model, configs)
    _from_first((*model.parameters(), *model.buffers()))
    kind = type(model)
    model.__class__ = type(f"Sharded{kind.__name__}", (Sharded, kind), {})
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    # With None, all units except the outermost release their parameters after the forward pass.
    how: Document = {"mesh": mesh, "reshard_after_forward": None if configs.stage == 3 else False}
    for name in sorted(names, key=lambda each: -each.count(".")):  # inner modules first
        fully_shard(model.get_submodule(name), **how)
    fully_shard(model, **how)
    assert isinstance(model, Sharded)
    model._shards = list(model.parameters())
    model.register_forward_pre_hook(
        lambda module, inputs: None if module.training else _from_first(module.buffers())
    )
    model.register_forward_hook(_give_back)
    return model


def rewire(optimizer: Optimizer, former: Mapping[str, torch.nn.Parameter], model: Module) -> None:
    """Make an optimizer from before `shard` update the model's new parameters.

    `former` is `dict(model.named_parameters())` from before `shard`. Parameters of other models stay. Raises
    UsageError if the optimizer has made steps.
    """
    now = dict(model.named_parameters())
    places = {param: now[name] for name, param in former.items()}
    if any(param in places for param in optimizer.state):
        raise UsageError(
            "The optimizer made steps before the model was sharded. Call fleet.distributed_model() before "
            "the first step, and load the optimizer's state after it."
        )
    for group in optimizer.param_groups:
        group["params"] = [places.get(param, param) for param in group["params"]]


def _units(model: Module, configs: ShardingConfigs) -> list[str]:
    if not configs.segment_anchors:
        return units(model, int(configs.segment_broadcast_MB * (1 << 20)))
    names = matching_modules(model, configs.segment_anchors, "sharding_configs segment_anchors")
    for name in names:
        check_unit(model, name)
    return names


@torch.no_grad()
def _from_first(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        whole = tensor.contiguous()
        dist.broadcast(whole, 0)
        tensor.copy_(whole)


def _give_back(module: Module, inputs: object, output: object) -> None:
    """Release parameters without a backward pass, so that `parameters()` matches the optimizer again."""
    if not torch.is_grad_enabled():
        from torch.distributed.fsdp import FSDPModule

        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
