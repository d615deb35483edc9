"""Forward and backward of embeddings whose rows are on servers.

The module keeps its class, name and options; only its `forward` is replaced while training: the unique ids of
a batch are pulled as one small leaf tensor and looked up by position, and the gradient of that leaf is
already summed by id. Transport belongs to a `RowSource`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn import functional

from trainers.errors import UsageError
from trainers.kernels.compiled import Keys
from trainers.ps.kernels.batch import add_rows
from trainers.ps.trainer.group import Batch, Call
from trainers.ps.trainer.modules import EmbeddingModule, SparseEmbedding, device_of, embeds, pools, row_limit
from trainers.ps.trainer.pooling import ends_of, pool, weighs
from trainers.ps.trainer.remote import Lookup

# ---- Rows by position, with a backward pass that sums gradients in one go: on a CPU, torch's own embedding
# backward takes seven times as long.


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.place, ctx.count = place, len(rows)
        return functional.embedding(place, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, torch.Tensor]:
        (grad,) = grads
        dim = grad.shape[-1]
        out = np.zeros((ctx.count, dim), np.float32)
        # The first gradient of a row is copied, so places must come in the order of their first appearance:
        # with several lookups over the same keys they may not, and all are added to zeros.
        add_rows(ctx.place.reshape(-1).numpy(), grad.reshape(-1, dim).contiguous().numpy(), ctx.count, out)
        return None, torch.from_numpy(out)


class _Embed(torch.autograd.Function):
    """The rows of several calls in one go. A backward pass that reaches some of them adds their gradients to
    the batch's, all at once.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, batch: Batch, calls: Sequence[Call]
    ) -> tuple[torch.Tensor, ...]:
        ctx.batch, ctx.calls = batch, calls
        ctx.set_materialize_grads(False)
        return tuple(batch.gather(calls))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        ctx.batch.scatter(ctx.calls, grads)
        return None, None, None


def embed(batch: Batch, call: Call, weight: torch.Tensor) -> torch.Tensor:
    """The rows of a call, (*ids.shape, dim), which a backward pass trains if the weight wants a gradient.
    Those of all calls of the batch that can be computed like that are computed with the first.
    """
    if call.output is None:
        with torch._C.DisableTorchFunctionSubclass():  # asking a ServedWeight takes much longer
            if not weight.requires_grad:
                return batch.gather([call])[0]
            calls = [call, *batch.others()]
        for each, output in zip(calls, _Embed.apply(batch.anchor, batch, calls), strict=True):  # type: ignore[no-untyped-call]  # torch's
            each.output = output
    output, call.output = call.output, None
    assert output is not None
    return output


def gathered(place: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """rows[place]: (...) int64 positions and (n, dim) -> (..., dim), differentiable in the rows."""
    if rows.is_cpu and rows.dtype is torch.float32:
        result: torch.Tensor = _Gather.apply(place, rows)  # type: ignore[no-untyped-call]  # torch's
        return result
    return functional.embedding(place.to(rows.device), rows)


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; torch.compile leaves it out of its graphs, because it talks to servers.

    As torch.compiler.disable, but without its import (a second) and its cost of each call where nothing is
    compiled.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules or not get_eval_frame_callback():
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch's
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable sets too
    return call


# ---- The weight of a served module has no rows here. Arithmetic on it would give zeros without a word.

_WITHOUT_VALUES = frozenset(
    """
    __get__ __set__ __delete__ __repr__ __len__ __hash__ __format__ __reduce_ex__ __setstate__ __deepcopy__
    size dim ndimension numel nelement stride storage_offset element_size is_floating_point is_complex
    is_contiguous is_pinned is_shared get_device data_ptr untyped_storage _typed_storage detach requires_grad_
    register_hook register_post_accumulate_grad_hook to cpu cuda type share_memory_ zero_
    """.split()  # noqa: SIM905  (a list of 40 lines says no more)
)
"""Functions of torch that need no values of the weight."""


class ServedWeight(torch.nn.Parameter):
    """The class of the weight of an embedding while it is served: it refuses what needs values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        loads_nothing = name == "copy_" and not args[1].numel()  # as load_state_dict does
        if name not in _WITHOUT_VALUES and not loads_nothing:
            raise UsageError(
                f"torch's {name} was called on the weight of an embedding that parameter servers hold: it "
                "has no rows here. Call the embedding with ids instead (a penalty can use the rows that it "
                "returns), read all rows by state_dict(), or make the embedding with sparse=False"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            # `weight.data` and the like: arithmetic on them would be as silent.
            return result.as_subclass(cls) if type(result) is torch.Tensor else result


class RowSource(Protocol):
    """Where rows come from, and where their gradients go."""

    def call(self, ids: torch.Tensor) -> Call | None:
        """The call of these ids in training, for `embed` or `pool`; None: use `look_up`."""
        return None

    def look_up(self, ids: torch.Tensor, *, insert: bool) -> tuple[Lookup, torch.Tensor]:
        """The distinct keys of a batch, and their rows, (u, dim) float32. Raises IndexError for an id out of
        range.
        """

    def pull_all(self) -> torch.Tensor | None:
        """Every row of the module, (num_embeddings, dim) float32; None when it is unbounded."""

    def add_gradient(self, keys: torch.Tensor, grad: torch.Tensor) -> None:
        """Keep the gradient of these rows for the next step."""

    def add_stats(self, keys: torch.Tensor, stats: torch.Tensor) -> None:
        """Keep shows and clicks, (keys, 2), of the rows that will have a gradient."""


_COPYING = ("__deepcopy__", "__reduce_ex__")
"""What copy.deepcopy and pickle call."""


class ServedEmbedding:
    """One embedding module that is served: from construction until `end`. `called` is told of its calls."""

    def __init__(
        self,
        name: str,
        module: EmbeddingModule,
        rows: RowSource,
        *,
        statistics: bool,
        evicts: bool = False,
        called: Callable[[torch.nn.Module, torch.Tensor], None] | None = None,
    ) -> None:
        self._name = name
        self._module = module
        self._rows = rows
        self._statistics = statistics
        self._called = called
        self._evicts = evicts
        self._bound = row_limit(module)
        self._embeds = embeds(module) and not statistics
        self._pools = pools(module) and not statistics
        self._device = device_of(module)
        self._dtype = module.weight.dtype
        module.weight.data = torch.empty(
            0, module.embedding_dim, device=module.weight.device, dtype=self._dtype
        )  # the servers have it now
        self._weight_class = type(module.weight)
        module.weight.__class__ = ServedWeight
        module.__dict__["forward"] = self._forward()  # on the instance, while it is served
        module.__dict__.update(dict.fromkeys(_COPYING, self._refuse_copy))
        self._hook: torch.utils.hooks.RemovableHandle = module.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            # Not a bound method: torch sets an attribute on the function.
            lambda module, state, prefix, metadata: _add_weight(state, f"{prefix}weight", rows)
        )

    def rows_of(self, given: torch.Tensor) -> torch.Tensor | None:
        """(num_embeddings, dim) float32: the rows of a weight in a state dict; None for another shape, which
        torch then reports. Raises UsageError for an unbounded table.
        """
        if self._bound is None:
            raise UsageError(
                f"a state dict has no rows of embedding {self._name!r}, which is unbounded, and its servers "
                f"keep theirs: remove {self._name!r} from it and load the rest with strict=False, or load a "
                "save of all rows with fleet.init_server(dirname)"
            )
        if given.shape != (self._bound, self._module.embedding_dim):
            return None
        return given.detach().to("cpu", torch.float32)

    def end(self, weight: torch.Tensor | None) -> None:
        """Make it an ordinary module again, with these values."""
        self._module.weight.__class__ = self._weight_class
        if weight is not None:
            self._module.weight.data = weight.to(self._device, self._dtype)
        for name in ("forward", *_COPYING):  # restores those of the class
            del self._module.__dict__[name]
        self._hook.remove()

    def end_without_rows(self) -> None:
        """Make it a module without rows: another trainer has them, or the servers have saved them. Its calls,
        and those of `state_dict()`, are refused.
        """
        self._module.weight.__class__ = self._weight_class
        for name in _COPYING:
            del self._module.__dict__[name]
        self._module.__dict__["forward"] = self._refuse_use
        self._hook.remove()
        self._module.register_state_dict_post_hook(lambda *_: self._refuse_use())  # type: ignore[no-untyped-call]  # torch's

    def _refuse_use(self, *args: object, **options: object) -> NoReturn:
        raise UsageError(
            f"embedding {self._name!r} has no rows in this trainer: ps_configs rows_at_end leaves them to "
            "the first trainer ('first') or to saves of the servers ('none'); with 'all' every one has them"
        )

    def _refuse_copy(self, argument: object) -> NoReturn:
        raise UsageError(
            f"embedding {self._name!r} is served and cannot be copied or pickled; copy model.state_dict(), "
            "the other modules of the model (for an average of dense parameters), or the model before "
            "fleet.init_worker() or after fleet.stop_worker()"
        )

    def _forward(self) -> Callable[..., torch.Tensor]:
        if isinstance(self._module, SparseEmbedding):
            return outside_graphs(self._sparse)
        return outside_graphs(self._embedding if isinstance(self._module, torch.nn.Embedding) else self._bag)

    def _sparse(self, ids: torch.Tensor, clicks: torch.Tensor | None = None) -> torch.Tensor:
        """`clicks`: a number for each example, (ids.shape[0],): whether it was clicked."""
        self._tell(ids)
        call = self._call(ids)
        if call is not None:
            return self._typed(embed(call.batch, call, self._module.weight))
        lookup, rows, _ = self._look_up(ids, clicks)
        return self._typed(gathered(lookup.place, rows))

    def _embedding(self, input: torch.Tensor) -> torch.Tensor:
        self._tell(input)
        call = self._call(input)
        if call is not None:
            return self._typed(embed(call.batch, call, self._module.weight))
        lookup, rows, padding = self._look_up(input)
        module: Any = self._module
        if not module.scale_grad_by_freq:
            return self._typed(gathered(lookup.place, rows))
        place = lookup.place.to(self._device)
        return self._typed(functional.embedding(place, rows, padding_idx=padding, scale_grad_by_freq=True))

    def _bag(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._tell(input)
        module: Any = self._module
        if self._pools and self._training and weighs(per_sample_weights, input, module.mode):
            ends = ends_of(input, offsets, last=module.include_last_offset)
            if ends is not None and (call := self._rows.call(input)) is not None:
                return self._pooled(call, per_sample_weights, ends)
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

    def _pooled(self, call: Call, weights: torch.Tensor | None, ends: Keys) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            trained = self._module.weight.requires_grad
        mean = isinstance(self._module, torch.nn.EmbeddingBag) and self._module.mode == "mean"
        return pool(call, weights, ends, mean=mean, trained=trained)

    def _typed(self, rows: torch.Tensor) -> torch.Tensor:
        """In the type of the module: they come and are trained in float32."""
        return rows if self._dtype is torch.float32 else rows.to(self._dtype)

    @property
    def _training(self) -> bool:
        return self._module.training and torch.is_grad_enabled()

    def _call(self, ids: torch.Tensor) -> Call | None:
        if self._embeds and self._training:
            return self._rows.call(ids)
        return None

    def _tell(self, ids: torch.Tensor) -> None:
        """Of a call, once, before anything is requested for it."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"embedding {self._name!r} needs ids in int64 or int32, not {ids.dtype}")
        # A forward pass without gradients in training is like none that comes: it makes no rows.
        if self._called is not None and (torch.is_grad_enabled() or not self._module.training):
            self._called(self._module, ids)

    def _look_up(
        self, ids: torch.Tensor, clicks: torch.Tensor | None = None
    ) -> tuple[Lookup, torch.Tensor, int | None]:
        """The keys, their rows, and the position of the padding key."""
        training = self._training
        lookup, rows = self._rows.look_up(ids, insert=training)
        padding = _place_of(self._module.padding_idx, lookup.keys)
        if padding is not None and (self._bound is None or self._evicts):
            rows.data[padding] = 0.0  # nothing else sets that row to zeros
        rows = rows.to(self._device)
        if training and self._module.weight.requires_grad:
            rows.requires_grad_()
            if self._statistics:
                self._rows.add_stats(lookup.keys, _stats(lookup, clicks))
            collect = functools.partial(self._collect, lookup.keys, padding)
            rows.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]  # torch's
        return lookup, rows, padding

    def _collect(self, keys: torch.Tensor, padding: int | None, leaf: torch.Tensor) -> None:
        if leaf.grad is None:
            return
        grad, leaf.grad = leaf.grad.detach().cpu(), None  # a second backward adds only its own share
        if padding is not None:  # torch excludes the padding row from the gradient
            keys, grad = _without(keys, padding), _without(grad, padding)
        self._rows.add_gradient(keys, grad)


def _place_of(padding: int | None, keys: torch.Tensor) -> int | None:
    if padding is None:
        return None
    found = (keys == padding).nonzero()
    return int(found[0, 0]) if len(found) else None


def _stats(lookup: Lookup, clicks: torch.Tensor | None) -> torch.Tensor:
    """(u, 2): how often each key was shown, and clicked."""
    stats = torch.stack([lookup.counts.float(), torch.zeros(len(lookup.keys))], dim=1)
    if clicks is not None:
        each = clicks.detach().cpu().float().view(-1, *[1] * (lookup.place.dim() - 1))
        stats[:, 1].index_add_(0, lookup.place.reshape(-1), each.expand(lookup.place.shape).reshape(-1))
    return stats


def _without(tensor: torch.Tensor, place: int) -> torch.Tensor:
    return torch.cat([tensor[:place], tensor[place + 1 :]])


def _add_weight(state: dict[str, torch.Tensor], name: str, rows: RowSource) -> None:
    weight = rows.pull_all()
    # Without a bound, an ordinary tensor without rows: the state may be saved, and read elsewhere.
    own = state[name].as_subclass(torch.Tensor).detach()
    state[name] = own if weight is None else weight.to(own.dtype)
