"""Forward and backward passes of embeddings whose rows are on servers.

The module keeps its class, name and options. Only its `forward` is replaced while training. The unique ids of
a batch are pulled as one small leaf tensor, and looked up by position. The gradient of that leaf is therefore
summed by id already. A `RemoteTable` handles the transport.
"""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.nn import functional

from trainers.errors import UsageError
from trainers.ps.kernels.batch import add_rows
from trainers.ps.trainer.group import Batch, Call, RemoteTable
from trainers.ps.trainer.modules import (
    EmbeddingModule,
    SparseEmbedding,
    device_of,
    embeds,
    pools,
    row_limit,
    weight_of,
)
from trainers.ps.trainer.pooling import ends_of, pool, weighs
from trainers.ps.trainer.remote import Lookup
from trainers.ps.trainer.torchrec import remove_backward_hooks
from trainers.ps.trainer.weight import (
    ServedWeight,
    end_serving,
    once,
    serve_weight,
    without_overrides,
)

T = TypeVar("T")

# ---- Look up rows by position, with a backward pass that sums gradients in one pass. On a CPU, torch's own
# embedding backward takes seven times as long.


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Tensor, rows: Tensor) -> Tensor:
        ctx.place, ctx.count = place, len(rows)
        return functional.embedding(place, rows)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        grad = grads[0].detach().resolve_neg()
        dim = grad.shape[-1]
        out = np.zeros((ctx.count, dim), np.float32)
        add_rows(ctx.place.reshape(-1).numpy(), grad.reshape(-1, dim).contiguous().numpy(), out)
        return None, torch.from_numpy(out)


class _Embed(torch.autograd.Function):
    """The rows of several calls, computed together. A backward pass that reaches some calls adds their
    gradients to the batch's gradients in one operation.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, batch: Batch, calls: Sequence[Call], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.batch, ctx.calls = batch, calls
        ctx.set_materialize_grads(False)
        return tuple(batch.gather(calls))

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.batch.backward(ctx.calls, grads)


_apart: Any = torch.ops.aten._unsafe_view.default
"""Return the same memory with a separate node, as torch's embedding has one.

torch calls the hooks of an output among several, with None, when a backward pass reaches another output.
torch does not treat the result as a view, so hooks stay when the script changes the tensor in place.
"""


def embed(batch: Batch, call: Call, weight: Tensor) -> Tensor:
    """Return the rows of a call, (*ids.shape, dim). A backward pass trains them if the weight needs a
    gradient.

    The first call computes the rows of all calls of the batch for which this is possible.
    """
    with without_overrides():
        if not weight.requires_grad:
            return batch.gather([call])[0]
        if call.output is None:
            calls = batch.with_others(call)
            for each, rows in zip(calls, embedded(batch, calls), strict=True):
                each.output = rows
    output, call.output = call.output, None
    assert output is not None
    return output


def embedded(batch: Batch, calls: Sequence[Call]) -> list[Tensor]:
    """Return the rows of calls, computed together, for training."""
    outputs = _Embed.apply(batch.anchor, batch, calls, *batch.weights_of(calls))  # type: ignore[no-untyped-call]  # torch's
    return [each if len(calls) == 1 else _apart(each, each.shape) for each in outputs]


class _Rows(torch.autograd.Function):
    """The distinct rows of a call. `collect` receives their gradient, and returns the gradient of the
    weight.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Tensor, rows: Tensor, collect: _Collect) -> Tensor:
        ctx.collect = collect
        return rows.view_as(rows)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.collect(grads[0]), None, None


def gathered(place: Tensor, rows: Tensor) -> Tensor:
    """Return rows[place], (..., dim), for positions (...) int64 and rows (n, dim). It is differentiable in
    the rows.
    """
    if rows.is_cpu and rows.dtype is torch.float32:
        result: Tensor = _Gather.apply(place, rows)  # type: ignore[no-untyped-call]  # torch's
        return result
    return functional.embedding(place.to(rows.device), rows)


def outside_graphs(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function so that torch.compile leaves it out of its graphs, because it communicates with
    servers.

    This works like torch.compiler.disable, without its import (a second), and without its cost per call if
    nothing is compiled.
    """
    disabled: Callable[..., T] | None = None

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> T:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules or not get_eval_frame_callback():
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch's
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable sets too
    return call


_Collect = Callable[[Tensor], Tensor | None]


class _Given:
    """Rows in a state dict. In torch they would be the weight itself, including values that a script
    writes.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = weakref.ref(rows)
        self._counter = rows.detach()  # this shares the counter of changes
        self._counter.data = rows.new_empty(0)
        self._version = self._counter._version
        self._sum = _checksum(rows)
        self._looks = 0

    @property
    def alive(self) -> bool:
        """True while anything refers to the rows."""
        return self._rows() is not None

    def written(self) -> bool:
        """Return True if the rows have changed since. Calls 1, 2, 4, 8, ... also detect changes by numpy or
        `.data`.
        """
        rows = self._rows()
        self._looks += 1
        if rows is not None and self._looks.bit_count() == 1 and _checksum(rows) != self._sum:
            self._version = -1
        return self._counter._version != self._version


def _checksum(rows: Tensor) -> int:
    return zlib.crc32(rows.cpu().view(torch.uint8).numpy().data)


_COPYING = ("__deepcopy__", "__reduce_ex__")
"""The methods that copy.deepcopy and pickle call."""


class ServedEmbedding:
    """One embedding module that is served from construction until `end`. `called` receives its calls."""

    def __init__(
        self,
        name: str,
        module: EmbeddingModule,
        rows: RemoteTable,
        *,
        statistics: bool,
        zeros: int | None = None,
        called: Callable[[torch.nn.Module, Tensor], None] | None = None,
    ) -> None:
        self._name = name
        self._module = module
        self._rows = rows
        self._statistics = statistics
        self._called = called
        self._zeros = zeros
        self.given: list[_Given] = []
        """The rows in state dicts that the script holds."""
        self._embeds = embeds(module) and not statistics
        self._pools = pools(module) and not statistics
        self._device = device_of(module)
        self._dtype = module.weight.dtype
        remove_backward_hooks(weight_of(module))
        self._weight = serve_weight(weight_of(module), name, rows, bounded=row_limit(module) is not None)
        module.__dict__["forward"] = self._forward()  # on the instance, as long as it is served
        module.__dict__.update(dict.fromkeys(_COPYING, self._refuse_copy))
        self._hook: torch.utils.hooks.RemovableHandle = module.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            # Use a lambda instead of a bound method, because torch sets an attribute on the function.
            lambda module, state, prefix, metadata: self._add_weight(state, f"{prefix}weight")
        )

    @property
    def _in_place(self) -> bool:
        """True if the module has the weight that is served.

        torch.func.functional_call, a parametrization or an assignment replaces the weight. torch's own
        forward then computes with the replacement.
        """
        return self._module._parameters.get("weight") is self._weight

    def check(self) -> None:
        """Raise UsageError if the script has replaced the weight, or written into the rows of a state
        dict.
        """
        self.check_place()
        self.check_given()

    def check_place(self) -> None:
        """Raise UsageError if the script has replaced the served weight."""
        if not self._in_place:
            raise UsageError(
                f"The script replaced the weight of embedding {self._name!r}, but the servers train the "
                "weight that it had at fleet.init_worker(). Write values with load_state_dict(), or restore "
                "that weight."
            )

    def check_given(self) -> None:
        """Raise UsageError if the script has written into the rows of a state dict."""
        if any(each.written() for each in self.given):
            raise UsageError(
                f"The script wrote into the rows of {self._name!r} in a state dict, but these rows are a "
                "copy of the rows on parameter servers. Change a clone of the rows, and write it with "
                "load_state_dict()."
            )
        self.given[:] = [each for each in self.given if each.alive]

    def forget_given(self) -> None:
        """Forget the rows in state dicts, because the script loads other rows."""
        self.given.clear()

    @property
    def weight(self) -> ServedWeight:
        """A view of the weight, which torch loads from a state dict instead of rows."""
        view = self._weight.detach()
        assert isinstance(view, ServedWeight)
        return view

    def rows_of(self, given: Tensor) -> Tensor | None:
        """Return the rows of a weight in a state dict, (num_embeddings, dim) float32.

        Return None for another shape, which torch then reports. Raises UsageError for an unbounded table, and
        for a part of a table.
        """
        if type(given).__module__.startswith("torch.distributed."):
            raise UsageError(
                f"The state dict has a {type(given).__name__} for embedding {self._name!r}, with the rows of "
                "one process. Save it with torch.distributed.checkpoint, which loads it into whole tensors."
            )
        limit = self._rows.sparse.limit
        if limit is None:
            raise UsageError(
                f"A state dict has no rows of embedding {self._name!r}, because its table is unbounded and "
                f"the servers keep the rows. Remove {self._name!r} from the state dict and load the rest "
                "with strict=False, or load saved tables with fleet.init_server(dirname)."
            )
        if given.shape != (limit, self._module.embedding_dim):
            return None
        return given.detach().to("cpu", torch.float32)

    def end(self, weight: Tensor | None) -> None:
        """Make the module an ordinary module again, with these values."""
        end_serving(self._weight, None if weight is None else weight.to(self._device, self._dtype))
        for name in ("forward", *_COPYING):  # this restores the methods of the class
            del self._module.__dict__[name]
        self._hook.remove()

    def end_without_rows(self) -> None:
        """Make it a module without rows, because another trainer has them, or the servers have saved them.

        Its calls and its `state_dict()` are refused.
        """
        end_serving(self._weight, torch.empty(0, self._module.embedding_dim, dtype=self._dtype))
        for name in _COPYING:
            del self._module.__dict__[name]
        self._module.__dict__["forward"] = self._refuse_use
        self._hook.remove()
        self._module.register_state_dict_post_hook(lambda *_: self._refuse_use())  # type: ignore[no-untyped-call]  # torch's

    def _refuse_use(self, *args: object, **options: object) -> NoReturn:
        raise UsageError(
            f"Embedding {self._name!r} has no rows in this trainer. ps_configs rows_at_end gives the rows "
            "to all trainers ('all'), to the first trainer ('first'), or only to saved tables ('none'). Set "
            "it to 'all'."
        )

    def _refuse_copy(self, argument: object) -> NoReturn:
        raise UsageError(
            f"Embedding {self._name!r} is on parameter servers and cannot be copied or pickled. Copy "
            "model.state_dict() or the other modules of the model (for an average of dense parameters). You "
            "can also copy the model before fleet.init_worker() or after fleet.stop_worker()."
        )

    def _forward(self) -> Callable[..., Tensor]:
        if isinstance(self._module, SparseEmbedding):
            compute: Callable[..., Tensor] = self._sparse
        else:
            is_bag = isinstance(self._module, torch.nn.EmbeddingBag)
            compute = self._bag if is_bag else self._embedding
        kind: Any = type(self._module)
        own: Callable[..., Tensor] = functools.partial(kind.forward, self._module)
        own = self._refuse_weight if compute == self._sparse else own
        parameters, weight = self._module._parameters, self._weight

        @functools.wraps(compute)
        def forward(*args: object, **options: object) -> Tensor:
            given = parameters.get("weight")
            if torch._C._get_tracing_state() is not None:
                raise UsageError(
                    f"Embedding {self._name!r} cannot be traced, because its rows are on parameter servers. "
                    "Use fleet.save_inference_model(), or trace the model after fleet.stop_worker()."
                )
            if peek_interpreter_stack() is not None:
                self._check_transform(given)
            if self.given:
                self.check_given()
            call = compute if given is weight else own
            return call(*args, **options)

        return outside_graphs(forward)

    def _refuse_weight(self, *args: object, **options: object) -> NoReturn:
        raise UsageError(
            f"Embedding {self._name!r} was called with another weight (torch.func.functional_call, a "
            "parametrization, an assignment), but a SparseEmbedding has rows only on parameter servers. "
            "Call the embedding with its own weight."
        )

    def _check_transform(self, given: Tensor | None) -> None:
        """Raise UsageError if the served weight is used inside vmap, grad and other transforms of
        torch.func.
        """
        while given is not None and is_functorch_wrapped_tensor(given):
            given = get_unwrapped(given)
        if isinstance(given, ServedWeight):
            raise UsageError(
                f"Embedding {self._name!r} was called inside a transform of torch.func, which has no access "
                "to rows on parameter servers. Call the embedding outside, and pass its result to the "
                "transform."
            )

    def _sparse(self, ids: Tensor, clicks: Tensor | None = None) -> Tensor:
        """Return the rows. `clicks` (ids.shape[0],) gives for each example whether it was clicked."""
        self._note_lookup(ids)
        call = self._call(ids)
        if call is not None:
            return self._typed(embed(call.batch, call, self._weight))
        lookup, rows, _ = self._look_up(ids, clicks)
        return self._typed(gathered(lookup.place, rows))

    def _embedding(self, input: Tensor) -> Tensor:
        self._note_lookup(input)
        call = self._call(input)
        if call is not None:
            return self._typed(embed(call.batch, call, self._weight))
        lookup, rows, padding = self._look_up(input)
        module: Any = self._module
        if not module.scale_grad_by_freq:
            return self._typed(gathered(lookup.place, rows))
        place = lookup.place.to(self._device)
        return self._typed(functional.embedding(place, rows, padding_idx=padding, scale_grad_by_freq=True))

    def _bag(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        self._note_lookup(input)
        module: Any = self._module
        if self._pools and torch.is_grad_enabled() and weighs(per_sample_weights, input, module.mode):
            ends = ends_of(input, offsets, last=module.include_last_offset)
            if ends is not None and (call := self._rows.call(input)) is not None:
                return pool(call, self._weight, per_sample_weights, ends, mean=module.mode == "mean")
        lookup, rows, padding = self._look_up(input)
        return functional.embedding_bag(
            lookup.place.to(self._device),
            self._typed(rows),
            offsets,
            mode=module.mode,
            scale_grad_by_freq=module.scale_grad_by_freq,
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=padding,
        )

    def _typed(self, rows: Tensor) -> Tensor:
        """Return the rows in the type of the module. They arrive and are trained in float32."""
        return rows if self._dtype is torch.float32 else rows.to(self._dtype)

    def _call(self, ids: Tensor) -> Call | None:
        """Return the call of these ids in training. Gradients decide this, not `module.training`."""
        return self._rows.call(ids) if self._embeds and torch.is_grad_enabled() else None

    def _note_lookup(self, ids: Tensor) -> None:
        """Report a call once, before any request for it."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"Embedding {self._name!r} was given ids in {ids.dtype}; ids must be int64 or int32"
            )
        # A forward pass without gradients amid training does not predict later ones.
        if self._called is not None and (torch.is_grad_enabled() or not self._module.training):
            self._called(self._module, ids)

    def _look_up(self, ids: Tensor, clicks: Tensor | None = None) -> tuple[Lookup, Tensor, int | None]:
        """Return the keys, their rows, and the position of the padding key."""
        training = torch.is_grad_enabled()
        lookup, rows = self._rows.look_up(ids, insert=training)
        padding = _place_of(self._module.padding_idx, lookup.keys)
        if padding is not None and self._zeros is not None:
            rows[padding] = 0.0
        rows = rows.to(self._device)
        with without_overrides():
            if training and self._weight.requires_grad:
                stats = [_stats(lookup, clicks)] if self._statistics else []
                collect = functools.partial(self._collect, lookup.keys, padding, stats)
                rows = _Rows.apply(self._rows.anchor, self._weight, rows, collect)  # type: ignore[no-untyped-call]  # torch's
        return lookup, rows, padding

    def _collect(
        self, keys: Tensor, padding: int | None, stats: list[Tensor], given: Tensor
    ) -> Tensor | None:
        """Collect the gradient of these rows. Shows and clicks count with the first gradient."""
        grad = given.detach().resolve_neg().to("cpu", torch.float32)
        if padding is not None:  # torch excludes the padding row from the gradient
            keys, grad = _without(keys, padding), _without(grad, padding)
            stats[:] = [_without(each, padding) for each in stats]
        if stats and not ServedWeight.wanted:
            self._rows.add_stats(keys, stats.pop())
        return self._rows.collect(keys, grad)

    def _add_weight(self, state: dict[str, Tensor], name: str) -> None:
        if not self._in_place or name not in state:
            return
        if state[name] is self._weight:
            raise UsageError(
                f"state_dict(keep_vars=True) cannot return the rows of {self._name!r} as a parameter, "
                "because they are on parameter servers. Call state_dict(), or take the parameter from "
                "named_parameters()."
            )
        weight = self._rows.pull_all()
        # Without a bound, use an ordinary tensor without rows, because the state may be saved and read
        # elsewhere.
        own = state[name].as_subclass(Tensor).detach()
        state[name] = own if weight is None else weight.to(own.dtype)
        # torch does not count changes of inference tensors.
        if not (weight is None or state[name].is_inference()):
            self.given[:] = [each for each in self.given if each.alive or each.written()]
            self.given.append(_Given(state[name]))


def _place_of(padding: int | None, keys: Tensor) -> int | None:
    if padding is None:
        return None
    found = (keys == padding).nonzero()
    return int(found[0, 0]) if len(found) else None


def _stats(lookup: Lookup, clicks: Tensor | None) -> Tensor:
    """Return how often each key was shown and clicked, (u, 2) float32."""
    stats = torch.stack([lookup.counts.float(), torch.zeros(len(lookup.keys))], dim=1)
    if clicks is not None:
        each = clicks.detach().cpu().float().view(-1, *[1] * (lookup.place.dim() - 1))
        stats[:, 1].index_add_(0, lookup.place.reshape(-1), each.expand(lookup.place.shape).reshape(-1))
    return stats


def _without(tensor: Tensor, place: int) -> Tensor:
    return torch.cat([tensor[:place], tensor[place + 1 :]])
