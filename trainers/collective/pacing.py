"""What a wrapped model does at every call besides computing: half precision around its forward pass, and
gradients that stay here or go to the others. Knows hooks and the cadence; leaves updates to the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainers.collective.cadence import Cadence
from trainers.errors import UsageError


def compute_in(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Call the model under autocast from now on. Its outputs are float32 again, so that a loss of them is
    computed in full precision.
    """
    device = next((param.device.type for param in model.parameters()), "cpu")
    open_contexts: list[torch.autocast] = []  # a model may call itself

    def before(module: torch.nn.Module, inputs: Any) -> None:
        context = torch.autocast(device, dtype)
        context.__enter__()  # type: ignore[no-untyped-call]  # torch's
        open_contexts.append(context)

    def after(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if open_contexts:  # none when another hook has failed before ours
            open_contexts.pop().__exit__(None, None, None)
        return _in_full(output, dtype)

    model.register_forward_pre_hook(before)
    model.register_forward_hook(
        after, always_call=True
    )  # after an error too, or the script stays in autocast


def pace(model: torch.nn.Module, cadence: Cadence) -> None:
    """Have gradients exchanged only when the cadence says so, and kept while they are being merged.

    With FSDP the parts are exchanged with every backward pass, and added up as parts: no rank has memory for
    all of them.
    """

    def before(module: torch.nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not cadence.followed:
            if not module.training:  # an evaluation, as it seems: a script may also train without dropout
                return
            raise UsageError(
                "strategy.gradient_merge and strategy.localsgd count steps of the optimizer that "
                "fleet.distributed_optimizer() returns; call it before the first step, and use its optimizer"
            )
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = cadence.exchanges

    def zero_grad(set_to_none: bool = True) -> None:
        if not cadence.merged:
            type(model).zero_grad(model, set_to_none)

    model.register_forward_pre_hook(before)
    model.__dict__["zero_grad"] = zero_grad


def _in_full(output: Any, dtype: torch.dtype) -> Any:
    """The same with tensors of this type as float32, in lists, tuples and dicts too."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype == dtype else output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(_in_full(each, dtype) for each in output))
    if type(output) in (list, tuple):
        return type(output)(_in_full(each, dtype) for each in output)
    if type(output) is dict:
        return {key: _in_full(each, dtype) for key, each in output.items()}
    return output
