"""The weight of an embedding whose rows are on servers: a parameter with the real shape and without the rows.

Forward passes give it to autograd as torch's own do, so that hooks, `torch.autograd.grad` and
`backward(inputs=...)` find it. Its gradient is collected by the `RowSource`, and becomes a sparse tensor when
the script reads it. Each operation that needs the rows is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from fleetrun.aliases import Fields
from trainers.errors import UsageError

without_overrides = torch._C.DisableTorchFunctionSubclass
"""Inside of it torch computes with a ServedWeight as with a Tensor, and much faster."""

_GRADIENT: Any = Tensor.grad
_WITHOUT_VALUES = frozenset(
    """
    __len__ __hash__ __format__ __dir__ size dim ndimension numel nelement stride storage_offset element_size
    is_floating_point is_complex is_contiguous is_pinned is_shared get_device data_ptr untyped_storage
    _typed_storage _has_compatible_shallow_copy_type detach requires_grad_ retain_grad register_hook
    register_post_accumulate_grad_hook
    """.split()  # noqa: SIM905  (a list of 40 lines says no more)
)
"""Functions of torch that need no values of the weight."""
_MOVES = frozenset({"to", "cpu", "cuda", "type", "float", "double", "half", "bfloat16"})
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})


class WeightGradient(Protocol):
    """The gradient of one weight, where forward and backward passes of its module collect it."""

    def has_gradient(self) -> bool:
        """Whether there is one, collected or of `keep_gradient`."""

    def take_gradient(self) -> tuple[Tensor, Tensor] | None:
        """Return what was collected, and forget it: keys (n,) int64 and rows (n, dim) float32. None: no
        backward pass has reached the weight.
        """

    def drop_gradient(self) -> None:
        """Forget what was collected, and the gradient of `keep_gradient`."""

    def keep_gradient(self) -> None:
        """Torch's own `grad` of the weight has a gradient from now on."""

    def return_gradients(self) -> None:
        """Give each further gradient to autograd, as a sparse tensor, instead of collecting it."""


class ServedWeight(Parameter):
    """The class of the weight while its rows are on servers. A view of it has no `collected`."""

    collected: WeightGradient | None = None
    name: str = ""
    former: type[Parameter] = Parameter
    bounded: bool = True
    """False: the table has no fixed number of rows, and its gradient has no shape."""
    hidden: ClassVar[bool] = False
    """Whether `grad` is None whatever was collected: see `hidden_gradients`."""
    wanted: ClassVar[bool] = False
    """Whether torch.autograd.grad asks for gradients of weights: then none is collected."""

    followed: ClassVar[bool] = False
    """Whether a backward pass is itself followed (create_graph): then autograd gets the gradients."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient since the last `zero_grad`, sparse: (num_embeddings, dim)."""
        if self.collected is None or ServedWeight.hidden:
            return None
        if not self.bounded and self.collected.has_gradient():
            raise self.without_shape()
        with torch.inference_mode(False), without_overrides():
            taken = self.collected.take_gradient()
            own: Tensor | None = _GRADIENT.__get__(self)
            if taken is None:
                return own
            fresh = self.sparse(*taken)
            own = fresh if own is None else own + fresh
            _GRADIENT.__set__(self, own)
        self.collected.keep_gradient()
        return own

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self.collected is None:
            raise _without_rows("grad")
        self.collected.drop_gradient()
        self.set_own(gradient)
        if gradient is not None:
            self.collected.keep_gradient()

    @property
    def own(self) -> Tensor | None:
        """Torch's own gradient, without what was collected."""
        with without_overrides():
            found: Tensor | None = _GRADIENT.__get__(self)
        return found

    def set_own(self, gradient: Tensor | None) -> None:
        """Set torch's own gradient, and leave what was collected."""
        with without_overrides():
            _GRADIENT.__set__(self, gradient)

    def sparse(self, keys: Tensor, rows: Tensor) -> Tensor:
        """Return a gradient as torch has it: (num_embeddings, dim), sparse. Raises UsageError for an
        unbounded table.
        """
        if not self.bounded:
            raise self.without_shape()
        with without_overrides():
            if not len(keys):  # torch resizes these when it adds to them, and cannot resize memory of numpy
                keys, rows = keys.clone(), rows.clone()
            values = rows.to(self.device, self.dtype)
            return torch.sparse_coo_tensor(
                keys[None].to(self.device), values, self.shape, check_invariants=False
            ).coalesce()

    def without_shape(self) -> UsageError:
        """The error for a gradient of an unbounded table."""
        return UsageError(
            f"the gradient of {self.name!r} has no shape, because the table is unbounded; use the "
            "gradient of the rows that the embedding returns (rows.register_hook)"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _without_rows("pickling or copying")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _without_rows("deepcopy")

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch's has tensor_contents
        with without_overrides():
            shape, dtype = tuple(self.shape), self.dtype
        return f"Parameter containing the rows of {self.name!r} on parameter servers: {shape}, {dtype}"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Fields | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        options = kwargs or {}
        if func is torch.autograd.grad:
            return _gradients(func, args, options)
        if func is torch.autograd.backward:
            with without_overrides():
                return func(*args, **options)
        if name in _HOOKS:
            cls._check_hook(args[0], name)
            args = args[0], _where_reached(*args)
        elif name in _MOVES:
            return _unmoved(func, name, args, options)
        elif name == "__set__":
            return _set(func.__self__, *args)
        elif name == "copy_" and _is_same(*args[:2]):  # load_state_dict does, when the rows go to the servers
            return args[0]
        elif name not in _WITHOUT_VALUES and name != "__get__":
            raise _without_rows(name)
        with without_overrides():
            result = func(*args, **options)
            # Arithmetic on `weight.data` and the like would need the rows too.
            return result.as_subclass(cls) if type(result) is Tensor else result

    @staticmethod
    def _check_hook(weight: Any, name: str) -> None:
        if weight.collected is None:
            raise _without_rows(name)
        if not weight.bounded:
            weight.sparse(torch.empty(0), torch.empty(0))  # raises
        weight.collected.return_gradients()


def _where_reached(weight: Any, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The hook, of either kind. torch also calls it after a forward pass that this weight shares with others,
    of which a backward pass has reached another one.
    """
    return lambda given: None if given is None or (given is weight and weight.own is None) else hook(given)


def _without_rows(name: str) -> UsageError:
    return UsageError(
        f"torch's {name} was called on the weight of an embedding that parameter servers hold: it has no "
        "rows here. Call the embedding with ids instead (a penalty can use the rows that it returns), read "
        "all rows by state_dict(), write them by load_state_dict(), or make the embedding with sparse=False"
    )


def _gradients(func: Any, args: Sequence[Any], options: Fields) -> Any:
    """torch.autograd.grad, for which backward passes return gradients and collect none. Raises UsageError for
    the weight of an unbounded table.
    """
    inputs = args[1] if len(args) > 1 else options["inputs"]
    for each in [inputs] if isinstance(inputs, Tensor) else inputs:
        if isinstance(each, ServedWeight) and not each.bounded:
            raise each.without_shape()
    before, ServedWeight.wanted = ServedWeight.wanted, True
    try:
        with without_overrides():
            return func(*args, **options)
    finally:
        ServedWeight.wanted = before


def _unmoved(func: Any, name: str, args: Sequence[Any], options: Fields) -> Any:
    """The weight itself, where it has the device and the type already."""
    weight, *rest = args
    with without_overrides():
        stand_in = torch.empty(0, dtype=weight.dtype, device=weight.device)
        moved = func(stand_in, *rest, **options)
        if isinstance(moved, Tensor) and (moved.dtype, moved.device) == (weight.dtype, weight.device):
            return weight
        if isinstance(moved, str):  # type() without arguments
            return moved
    raise UsageError(
        f"{name} would move the weight of an embedding that parameter servers hold, or change its type; call "
        "it before fleet.init_worker()"
    )


def _set(attribute: Any, weight: Any, value: Any) -> None:
    """Set an attribute of the weight that has nothing to do with its rows."""
    name = getattr(attribute, "__name__", "data")
    if name == "data" and _is_same(weight, value):
        return
    if name not in ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"):
        raise _without_rows(f"setter of {name}")
    with without_overrides():
        attribute.__set__(weight, value)


def _is_same(weight: Any, value: Any) -> bool:
    """Whether the value is the weight, or a view of the whole of it."""
    if not (isinstance(weight, ServedWeight) and isinstance(value, ServedWeight)):
        return False
    with without_overrides():
        return bool(weight.shape == value.shape and weight.data_ptr() == value.data_ptr())


def once(backward: Callable[..., Any]) -> Any:
    """The backward pass of an autograd.Function, which no gradient of a gradient can go through: torch says
    so where a script needs one.
    """
    followed = once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        before, ServedWeight.followed = ServedWeight.followed, True
        try:
            return followed(ctx, *grads)
        finally:
            ServedWeight.followed = before

    return call


def serve_weight(weight: Parameter, name: str, collected: WeightGradient, *, bounded: bool) -> ServedWeight:
    """Make the parameter a ServedWeight, without its rows: each of its values is the same NaN. Hooks that it
    has stay.
    """
    if bounded:
        nothing = torch.full((1, 1), math.nan, dtype=weight.dtype, device=weight.device)
        weight.data = nothing.expand(weight.shape)
    hooked = bool(weight._backward_hooks) or bool(getattr(weight, "_post_accumulate_grad_hooks", None))
    former: type[Parameter] = type(weight)
    weight.__class__ = ServedWeight
    assert isinstance(weight, ServedWeight)
    weight.former = former
    weight.name, weight.collected, weight.bounded = name, collected, bounded
    if hooked:
        collected.return_gradients()
    return weight


def end_serving(weight: ServedWeight, values: Tensor | None) -> None:
    """Make it an ordinary parameter with these values; None: it keeps the values that it has."""
    former: Any = weight.former
    for name in ("name", "collected", "bounded", "former"):
        del weight.__dict__[name]
    weight.__class__ = former
    if values is not None:
        weight.data = values


@contextlib.contextmanager
def hidden_gradients() -> Iterator[None]:
    """Inside of it torch finds no gradient at served weights: those are handled as rows of all tables."""
    before, ServedWeight.hidden = ServedWeight.hidden, True
    try:
        yield
    finally:
        ServedWeight.hidden = before
