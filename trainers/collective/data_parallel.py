"""Train data parallel with torch's DistributedDataParallel, and control when and how gradients are exchanged.

`Reducing` replaces DDP's own average. `Cadence` counts backward passes and updates. gradient_merge and
localsgd skip exchanges, and `pace` makes the model follow the cadence. `compute_in` runs the forward pass in
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
    """`DistributedDataParallel` on the device of the module.

    In eval mode without gradients, the module is called directly, without a collective, so one rank alone may
    evaluate. All ranks evaluate with the buffers of rank 0, such as the running statistics of batch norms.
    These buffers are sent beside each training forward pass, and used when an evaluation starts.
    """

    in_step = False
    """True if all ranks make each forward pass together, even without an exchange of gradients."""
    factor = 1.0
    """Factor for exchanged gradients before they are exchanged again.

    `Reducing` may divide their sum by more or less than the number of ranks.
    """
    _pass, _expects, _exchanged = -1, False, False
    """The latest backward pass, and two flags: torch will exchange the gradients of the next pass, and torch
    has exchanged those of the latest.
    """

    _sent: Any = ()

    def forward(self, *inputs: object, **kwargs: object) -> object:
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
    def _follow(self, output: object) -> None:
        """Exchange the gradients of each backward pass through the output.

        Torch exchanges only the gradients of one pass after a forward pass. In another pass, of a retained
        graph or of the second of two forward passes, each rank would keep its own gradients.
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
                        "NotSupported: two backward passes after one forward pass, with "
                        "find_unused_parameters. Add the losses, and call backward() once."
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
        """Multiply gradients before another exchange. Torch leaves out gradients that all ranks have left
        unused meanwhile.
        """
        grads = [each.grad for each in self.parameters() if each.grad is not None and self.factor != 1]
        for each in grads:
            each *= self.factor
        versions = [each._version for each in grads]

        def over() -> None:
            for each, version in zip(grads, versions, strict=True):
                if each._version == version:
                    each /= self.factor

        if self.find_unused_parameters:  # torch's own callback runs before the inner one
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(over))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _send(self) -> None:
        """Send rank 0's buffers to all ranks. Each rank keeps its own meanwhile, because the backward pass
        may need them.

        It sends as often as torch does before the next forward pass, so ranks do not wait alone.
        """
        self._sent = ()
        mine = [each for each in self.modules_buffers if each.is_floating_point()]
        if mine and (self.in_step or self.will_sync_module_buffers()):  # type: ignore[no-untyped-call]
            before, after = ([each.clone() for each in mine] for _ in range(2))
            self._distributed_broadcast_coalesced(after, self.broadcast_bucket_size)  # type: ignore[no-untyped-call]
            self._sent = list(zip(mine, before, after, strict=True))

    def _take(self) -> None:
        """Replace this rank's buffers by rank 0's, except buffers that the script has set since then."""
        for mine, before, after in self._sent:
            if torch.equal(mine, before):
                mine.data.copy_(after)  # without a new version, which a backward pass would refuse
        self._sent = ()

    def clear_gradients(self) -> None:
        """Clear the gradients, under Paddle's name for `zero_grad`."""
        self.zero_grad()


# ---- Combining the gradients of all ranks other than by DDP's average


@frozen
class Reducing:
    """The sum of all ranks' gradients over `divisor`. `dtype` is their type in transit, or None for
    their own.
    """

    divisor: float
    dtype: torch.dtype | None


def reduce(how: Reducing, bucket: Any) -> torch.futures.Future[Tensor]:
    """Reduce a bucket, as a communication hook of DDP."""
    buffer = bucket.buffer()
    sent = buffer if how.dtype is None else buffer.to(how.dtype)
    sent.div_(how.divisor)  # before adding, because a sum of float16 overflows earlier than an average
    future: torch.futures.Future[list[Tensor]] = dist.all_reduce(sent, async_op=True).get_future()

    def back(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        summed = done.value()[0]
        return summed if summed.dtype == buffer.dtype else buffer.copy_(summed)

    return future.then(back)


def set_reducing(model: Module, how: Reducing) -> None:
    """Set how the gradients of a model are reduced. The model is wrapped by DDP or sharded by FSDP2."""
    if isinstance(model, DataParallel):
        # torch requires the hook's annotations to be its own types and not their names. A lambda has no
        # annotations.
        model.register_comm_hook(None, lambda _, bucket: reduce(how, bucket))
        model.factor = how.divisor / dist.get_world_size()
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(how.divisor)
            module.set_force_sum_reduction_for_comms(True)  # only NCCL supports a factor before the sum


# ---- The number of steps between two updates and between two exchanges


class Cadence:
    """Counts steps for the optimizer, and decides for the model. `steps` is the number of backward passes per
    update.
    """

    def __init__(self, steps: int = 1, local: LocalSGDConfigs | None = None) -> None:
        self._steps = steps
        self._local = local
        self.followed = False
        """True if an optimizer counts here."""
        self.merged = 0
        """Backward passes since the last update."""
        self.updates = 0
        self.apart = 0
        """Updates that each process has made separately since the models were equal."""

    @property
    def merges(self) -> bool:
        """True if the next step only adds its gradients to earlier ones."""
        return self.merged + 1 < self._steps

    @property
    def alone(self) -> bool:
        """True if each process makes the next update separately."""
        return self._local is not None and self.updates + 1 >= self._local.begin_step

    @property
    def localized(self) -> bool:
        """True if processes have made separate updates, so that at least their optimizers differ."""
        return self._local is not None and self.updates >= self._local.begin_step

    @property
    def exchanges(self) -> bool:
        """True if the next backward pass sends gradients to the other processes."""
        return not self.merges and not self.alone

    def merge(self) -> None:
        """Count a step that only added gradients."""
        self.merged += 1

    def update(self) -> bool:
        """Count an update. Return True if models must be averaged now."""
        if self.alone:
            self.apart += 1
        self.updates += 1
        self.merged = 0
        return self._local is not None and self.apart >= self._local.k_steps

    def drop(self) -> None:
        """Count an update that did not take place, because its gradients were not finite."""
        self.merged = 0

    def resume(self, updates: int, apart: int) -> None:
        """Continue from a checkpoint."""
        self.updates, self.merged, self.apart = updates, 0, apart


# ---- Hooks of a wrapped model, for half precision and for the exchange of gradients


def device_of(params: Iterable[Tensor]) -> str:
    """Return the type of device that computes with the parameters, an accelerator if any of them is on
    one.
    """
    kinds = [param.device.type for param in params]
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), "cpu")


def compute_in(
    model: Module, dtype: torch.dtype, *, hook: Callable[[Any], Any] = lambda call: call
) -> list[RemovableHandle]:
    """Call the model under autocast, until the handles are removed.

    Its outputs are float32 again, so that a loss is computed in full precision. `hook` converts a function
    into a hook for the model.
    """
    device = device_of(model.parameters())
    open_contexts: list[torch.autocast] = []  # a model may call itself

    def before(module: Module, inputs: object) -> None:
        context = torch.autocast(device, dtype)
        context.__enter__()  # type: ignore[no-untyped-call]  # torch's
        open_contexts.append(context)

    def after(module: Module, inputs: object, output: object) -> object:
        if open_contexts:  # empty if an earlier hook has failed
            open_contexts.pop().__exit__(None, None, None)
        return _in_full(output, dtype)

    return [
        model.register_forward_pre_hook(hook(before)),
        # After an error too, because the script would otherwise stay in autocast.
        model.register_forward_hook(hook(after), always_call=True),
    ]


def pace(model: Module, cadence: Cadence) -> None:
    """Exchange gradients only when the cadence requires it, and keep them while they are merged.

    With FSDP, parts are exchanged in every backward pass and added as parts, because a rank lacks memory for
    all.
    """

    def before(module: Module, inputs: object) -> None:
        if not torch.is_grad_enabled():
            return
        if not cadence.followed:
            # probably an evaluation, although a script may also train without dropout
            if not module.training:
                return
            raise UsageError(
                "strategy.gradient_merge and strategy.localsgd count the steps of the optimizer that "
                "fleet.distributed_optimizer() returns. Call fleet.distributed_optimizer() before the first "
                "step, and use its optimizer."
            )
        if isinstance(module, DataParallel):
            module.require_backward_grad_sync = cadence.exchanges
            module.in_step = not cadence.alone

    def zero_grad(set_to_none: bool = True) -> None:
        if not cadence.merged:
            type(model).zero_grad(model, set_to_none)

    model.register_forward_pre_hook(before)
    model.__dict__["zero_grad"] = zero_grad


def _in_full(output: object, dtype: torch.dtype) -> Any:
    """Return the output with tensors of this type as float32, also inside tuples, lists, mappings and
    dataclasses.
    """
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
