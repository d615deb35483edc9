"""What ranks divide among themselves: the optimizer's state (stage 1), gradients too (2), parameters too (3).
Knows torch's FSDP2; leaves stage 1 to `zero`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from trainers.collective.names import matching
from trainers.collective.shardingconfigs import ShardingConfigs
from trainers.collective.units import check_unit, units
from trainers.collective.zero import ZeroOptimizer, check_divisible
from trainers.errors import NotSupportedError, UsageError


class Sharded(torch.nn.Module):
    """What a fleet script expects of a model, for one that FSDP2 has sharded: mixed into its class, as
    FSDP2 does with its own: parameters keep their names.
    """

    _shards: list[torch.nn.Parameter]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also between forward and backward, when other parameters than the optimizer's are in place."""
        for param in self._shards:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def clear_gradients(self) -> None:
        """Paddle's name of `zero_grad`."""
        self.zero_grad()


def zero_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Stage 1: the optimizer, each of whose parameters one rank updates and sends to all. Shares
    `param_groups` with the one given, which keeps the state of this rank's parameters only.

    Raises NotSupportedError for one whose update of a parameter depends on all others.
    """
    check_divisible(optimizer)
    return ZeroOptimizer(optimizer)


def shard(model: torch.nn.Module, configs: ShardingConfigs) -> torch.nn.Module:
    """Stages 2 and 3: the model itself, its parameters now DTensors of which each rank holds its part; with
    `clear_gradients`. Starts from rank 0's values, as DDP does. In place of DataParallel.

    All ranks call the model equally often, in eval mode too: it has its parameters from all of them. For an
    evaluation on one rank see `whole_state_dict`. Buffers stay each rank's own: running statistics are alike
    with `sync_batch_norm` only. Raises UsageError for anchors that cannot be.
    """
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise NotSupportedError(
            f"NotSupported: sharding stage {configs.stage} needs torch 2.6 or newer, and this is "
            f"{torch.__version__}; use stage 1"
        ) from error
    names = _units(model, configs)
    _from_first(model)
    kind = type(model)
    model.__class__ = type(f"Sharded{kind.__name__}", (Sharded, kind), {})
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    # None: all but the outermost unit give their parameters back after the forward pass.
    how: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": None if configs.stage == 3 else False}
    for name in sorted(names, key=lambda each: -each.count(".")):  # from the inside
        fully_shard(model.get_submodule(name), **how)
    fully_shard(model, **how)
    assert isinstance(model, Sharded)
    model._shards = list(model.parameters())
    model.register_forward_hook(_give_back)
    return model


def rewire(
    optimizer: torch.optim.Optimizer, former: Mapping[str, torch.nn.Parameter], model: torch.nn.Module
) -> None:
    """Make an optimizer that was made before `shard` update the model's parameters of now. `former`:
    `dict(model.named_parameters())` from before `shard`. Parameters of other models stay.

    Raises UsageError when the optimizer has been used before.
    """
    now = dict(model.named_parameters())
    places = {param: now[name] for name, param in former.items()}
    if any(param in places for param in optimizer.state):
        raise UsageError(
            "the optimizer has made steps before the model was sharded; call fleet.distributed_model before "
            "the first step, and load its state after it"
        )
    for group in optimizer.param_groups:
        group["params"] = [places.get(param, param) for param in group["params"]]


def whole_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of a wrapped or sharded model under its own names, whole, in host memory: on rank 0; empty on
    the others. All ranks call it. A model of the same kind that loads it can be evaluated on one rank.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: dict[str, torch.Tensor] = dict(get_model_state_dict(model, options=options))  # type: ignore[arg-type]  # torch's
    return found


def _units(model: torch.nn.Module, configs: ShardingConfigs) -> list[str]:
    if not configs.segment_anchors:
        return units(model, int(configs.segment_broadcast_MB * (1 << 20)))
    names = matching(model, configs.segment_anchors, "sharding_configs segment_anchors")
    for name in names:
        check_unit(model, name)
    return names


@torch.no_grad()
def _from_first(model: torch.nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        whole = tensor.contiguous()
        dist.broadcast(whole, 0)
        tensor.copy_(whole)


def _give_back(module: torch.nn.Module, inputs: Any, output: Any) -> None:
    """Without a backward pass nobody else would: `parameters()` would no longer be the optimizer's."""
    if not torch.is_grad_enabled():
        from torch.distributed.fsdp import FSDPModule

        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
