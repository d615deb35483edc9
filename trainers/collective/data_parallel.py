"""Data parallel training: torch's DistributedDataParallel, and when and how its gradients are exchanged.

`Reducing` replaces DDP's own average. `Cadence` counts backward passes and updates: gradient_merge and
localsgd leave out exchanges, and `pace` makes the model follow it. `compute_in` runs the forward pass in
half precision.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.hooks import RemovableHandle

from fleetrun.frozen import frozen
from trainers.collective.configs import LocalSGDConfigs
from trainers.errors import NotSupportedError, UsageError


class DataParallel(DistributedDataParallel):
    """`DistributedDataParallel` on the device where the module is.

    In eval mode without gradients the module is called directly: no collective, so that one rank may
    evaluate alone. All ranks evaluate with the buffers of rank 0, such as the running statistics of batch
    norms: they are sent beside each training forward pass, and used when an evaluation begins.
    """

    in_step = False
    """True if all ranks make each forward pass together, also those without an exchange of gradients."""
    factor = 1.0
    """What gradients that have been exchanged are multiplied by before they are exchanged again: `Reducing`
    divides their sum by more or less than the number of ranks.
    """
    _pass, _expects, _exchanged = -1, False, False
    """The latest backward pass, whether torch exchanges the gradients of the next one, and whether it has
    exchanged those of the latest.
    """

    _sent: Any = ()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.training or torch.is_grad_enabled():
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch has no types here
            self._send()
            self._follow(output)
            return output
        self._take()
        return self.module(*inputs, **kwargs)

    def train(self, mode: bool = True) -> Self:
        if not mode:
            self._take()
        return super().train(mode)  # type: ignore[no-any-return, no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _follow(self, output: Any) -> None:
        """Exchange the gradients of each backward pass through the output. Torch exchanges those of one after
        a forward pass, and each rank would keep its own gradients of another: of a graph that was retained,
        or of the second of two forward passes.
        """
        leaf = next((get_gradient_edge(each).node for each in self.parameters() if each.requires_grad), None)
        if leaf is None:
            return

        def before(grad: Tensor) -> None:
            current = torch._C._current_graph_task_id()
            if current == self._pass or not torch._C._will_engine_execute_node(leaf):
                return
            exchanges = self.require_backward_grad_sync
            if exchanges and not self._expects:
                if self.find_unused_parameters:
                    raise NotSupportedError(
                        "NotSupported: two backward passes after a forward pass, with "
                        "find_unused_parameters; add the losses up"
                    )
                self.reducer._rebuild_buckets()  # as before a forward pass
                self.reducer.prepare_for_backward([])
            if exchanges and self._exchanged:
                self._multiply()
            self._pass, self._expects, self._exchanged = current, False, exchanges

        for each in _find_tensors(output):  # type: ignore[no-untyped-call]
            if each.requires_grad:
                self._expects |= self.require_backward_grad_sync
                each.register_hook(before)

    def _multiply(self) -> None:
        """Before gradients are exchanged again. Torch leaves those out that no rank has used meanwhile."""
        grads = [each.grad for each in self.parameters() if each.grad is not None and self.factor != 1]
        for each in grads:
            each *= self.factor
        versions = [each._version for each in grads]

        def over() -> None:
            for each, version in zip(grads, versions, strict=True):
                if each._version == version:
                    each /= self.factor

        if self.find_unused_parameters:  # torch's own callback comes before the inner one
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(over))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _send(self) -> None:
        """Send rank 0's buffers to all ranks, each of which keeps its own meanwhile: the backward pass may
        need them. As often as torch does that before the next forward pass, so that no rank waits alone.
        """
        self._sent = ()
        mine = [each for each in self.modules_buffers if each.is_floating_point()]
        if mine and (self.in_step or self.will_sync_module_buffers()):  # type: ignore[no-untyped-call]
            before, after = ([each.clone() for each in mine] for _ in range(2))
            self._distributed_broadcast_coalesced(after, self.broadcast_bucket_size)  # type: ignore[no-untyped-call]
            self._sent = list(zip(mine, before, after, strict=True))

    def _take(self) -> None:
        """Put them in the place of this rank's own, but for those that the script has set since."""
        for mine, before, after in self._sent:
            if torch.equal(mine, before):
                mine.data.copy_(after)  # without a new version, which a backward pass would refuse
        self._sent = ()

    def clear_gradients(self) -> None:
        """Paddle's name of `zero_grad`."""
        self.zero_grad()


# ---- How gradients of all ranks are combined when DDP's own average will not do


@frozen
class Reducing:
    """The sum of all ranks' gradients over `divisor`. `dtype`: in which they travel; None: in their own."""

    divisor: float
    dtype: torch.dtype | None = None


def reduce(how: Reducing, bucket: Any) -> torch.futures.Future[Tensor]:
    """What a communication hook of DDP does."""
    buffer = bucket.buffer()
    sent = buffer if how.dtype is None else buffer.to(how.dtype)
    sent.div_(how.divisor)  # before adding up: a sum of float16 overflows earlier than an average
    future: torch.futures.Future[list[Tensor]] = dist.all_reduce(sent, async_op=True).get_future()

    def back(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        summed = done.value()[0]
        return summed if summed.dtype == buffer.dtype else buffer.copy_(summed)

    return future.then(back)


def set_reducing(model: Module, how: Reducing) -> None:
    """Have a model's gradients reduced like this: one that DDP wraps, or that FSDP2 has sharded."""
    if isinstance(model, DataParallel):
        # torch wants the hook's annotations to be its own types, and not their names; a lambda has none.
        model.register_comm_hook(None, lambda _, bucket: reduce(how, bucket))
        model.factor = how.divisor / dist.get_world_size()
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(how.divisor)
            module.set_force_sum_reduction_for_comms(True)  # a factor before the sum is NCCL's alone


# ---- How many steps there are between two updates and between two exchanges


class Cadence:
    """Counted by the optimizer, asked by the model. `steps`: backward passes to an update."""

    def __init__(self, steps: int = 1, local: LocalSGDConfigs | None = None) -> None:
        self._steps = steps
        self._local = local
        self.followed = False
        """Whether an optimizer counts here."""
        self.merged = 0
        """Backward passes since the last update."""
        self.updates = 0
        self.apart = 0
        """Updates that each process has made on its own since models were equal."""

    @property
    def merges(self) -> bool:
        """Whether the next step is none yet: its gradients are only added to those before."""
        return self.merged + 1 < self._steps

    @property
    def alone(self) -> bool:
        """Whether the next update is each process's own."""
        return self._local is not None and self.updates + 1 >= self._local.begin_step

    @property
    def localized(self) -> bool:
        """Whether processes have made updates of their own, from which at least their optimizers differ."""
        return self._local is not None and self.updates >= self._local.begin_step

    @property
    def exchanges(self) -> bool:
        """Whether the next backward pass sends gradients to the other processes."""
        return not self.merges and not self.alone

    def merge(self) -> None:
        """A step that only added up."""
        self.merged += 1

    def update(self) -> bool:
        """An update; whether models are to be averaged now."""
        if self.alone:
            self.apart += 1
        self.updates += 1
        self.merged = 0
        return self._local is not None and self.apart >= self._local.k_steps

    def drop(self) -> None:
        """An update that did not take place: its gradients were not finite."""
        self.merged = 0

    def resume(self, updates: int, apart: int) -> None:
        """Go on where a checkpoint was taken."""
        self.updates, self.merged, self.apart = updates, 0, apart


# ---- Hooks of a wrapped model: half precision, and whether gradients are reduced


def device_of(params: Iterable[Tensor]) -> str:
    """The type of device that computes with them: an accelerator if any of them is there."""
    kinds = [param.device.type for param in params]
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), "cpu")


def compute_in(
    model: Module, dtype: torch.dtype, *, hook: Callable[[Any], Any] = lambda call: call
) -> list[RemovableHandle]:
    """Call the model under autocast, until the handles are removed. Its outputs are float32 again, so that a
    loss of them is computed in full precision. `hook` makes what the model calls out of a function.
    """
    device = device_of(model.parameters())
    open_contexts: list[torch.autocast] = []  # a model may call itself

    def before(module: Module, inputs: Any) -> None:
        context = torch.autocast(device, dtype)
        context.__enter__()  # type: ignore[no-untyped-call]  # torch's
        open_contexts.append(context)

    def after(module: Module, inputs: Any, output: Any) -> Any:
        if open_contexts:  # none when another hook has failed before ours
            open_contexts.pop().__exit__(None, None, None)
        return _in_full(output, dtype)

    return [
        model.register_forward_pre_hook(hook(before)),
        # After an error too, or the script stays in autocast.
        model.register_forward_hook(hook(after), always_call=True),
    ]


def pace(model: Module, cadence: Cadence) -> None:
    """Have gradients exchanged only when the cadence says so, and kept while they are being merged.

    With FSDP the parts are exchanged with every backward pass, and added up as parts: no rank has memory for
    all of them.
    """

    def before(module: Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not cadence.followed:
            if not module.training:  # an evaluation, as it seems: a script may also train without dropout
                return
            raise UsageError(
                "strategy.gradient_merge and strategy.localsgd count steps of the optimizer that "
                "fleet.distributed_optimizer() returns; call it before the first step, and use its optimizer"
            )
        if isinstance(module, DataParallel):
            module.require_backward_grad_sync = cadence.exchanges
            module.in_step = not cadence.alone

    def zero_grad(set_to_none: bool = True) -> None:
        if not cadence.merged:
            type(model).zero_grad(model, set_to_none)

    model.register_forward_pre_hook(before)
    model.__dict__["zero_grad"] = zero_grad


def _in_full(output: Any, dtype: torch.dtype) -> Any:
    """The same with tensors of this type as float32, in tuples, lists, mappings and dataclasses too."""
    put: Callable[[Any, Any, Any], None] = operator.setitem
    if isinstance(output, Tensor):
        return output.float() if output.dtype == dtype else output
    if isinstance(output, Mapping):
        values = dict(output)
    elif isinstance(output, list | tuple):
        values = dict(enumerate(output))
    elif is_dataclass(output) and not isinstance(output, type):
        put, values = object.__setattr__, {each.name: getattr(output, each.name) for each in fields(output)}
    else:
        return output
    full = {key: _in_full(value, dtype) for key, value in values.items()}
    changed = [key for key, value in values.items() if full[key] is not value]
    if isinstance(output, tuple) and changed:
        return type(output)(*full.values()) if hasattr(output, "_fields") else type(output)(full.values())
    made = copy.copy(output) if changed else output
    for key in changed:
        put(made, key, full[key])
    return made
