"""The weight of an embedding whose rows are on servers. It is a parameter with the real shape, but without
rows.

Forward passes give the weight to autograd as torch's own modules do. Hooks, `torch.autograd.grad` and
`backward(inputs=...)` therefore find it. The `RemoteTable` collects its gradient, which becomes a sparse
tensor when the script reads it. Each operation that needs the rows is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from fleetrun.aliases import Fields
from trainers.errors import UsageError

T = TypeVar("T")

without_overrides = torch._C.DisableTorchFunctionSubclass
"""A context in which torch computes with a ServedWeight as with a Tensor, and much faster."""

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

    stepped: bool
    """True with apply_optimizer_in_backward. The script then sees no gradient, as in torch."""

    def has_gradient(self) -> bool:
        """Return True if there is a gradient, collected or from `keep_gradient`."""

    def take_gradient(self) -> tuple[Tensor, Tensor] | None:
        """Return the collected gradient and forget it. It has keys (n,) int64 and rows (n, dim) float32.

        Return None if no backward pass has reached the weight.
        """

    def drop_gradient(self) -> None:
        """Forget the collected gradient, and the gradient of `keep_gradient`."""

    def keep_gradient(self) -> None:
        """Record that torch's own `grad` of the weight has a gradient from now on."""

    def return_gradients(self) -> None:
        """Return each further gradient to autograd as a sparse tensor, instead of collecting it."""


class ServedWeight(Parameter):
    """The class of the weight while its rows are on servers. A view of the weight has `collected` None."""

    collected: WeightGradient | None = None
    name: str = ""
    former = Parameter
    bounded: bool = True
    """If False, the table has no fixed number of rows, and its gradient has no shape."""
    hidden: ClassVar[bool] = False
    """If True, `grad` is None even if a gradient was collected. See `hidden_gradients`."""
    wanted: ClassVar[bool] = False
    """True while torch.autograd.grad computes gradients of weights. These gradients are not collected."""

    followed: ClassVar[bool] = False
    """True while a backward pass is itself recorded (create_graph). Autograd then gets the gradients."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient since the last `zero_grad`, sparse, (num_embeddings, dim)."""
        if self.collected is None or ServedWeight.hidden or self.collected.stepped:
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
        if self.collected.stepped:
            if gradient is not None:
                raise _without_rows("setter of grad")
            return
        self.collected.drop_gradient()
        self.set_own(gradient)
        if gradient is not None:
            self.collected.keep_gradient()

    @property
    def own(self) -> Tensor | None:
        """Torch's own gradient, without the collected gradient."""
        with without_overrides():
            found: Tensor | None = _GRADIENT.__get__(self)
        return found

    def set_own(self, gradient: Tensor | None) -> None:
        """Set torch's own gradient, and leave the collected gradient unchanged."""
        with without_overrides():
            _GRADIENT.__set__(self, gradient)

    def sparse(self, keys: Tensor, rows: Tensor) -> Tensor:
        """Return a gradient in torch's form, a sparse tensor (num_embeddings, dim). Raises UsageError for an
        unbounded table.
        """
        if not self.bounded:
            raise self.without_shape()
        with without_overrides():
            # torch resizes these tensors when it adds to them, and cannot resize memory of numpy.
            if not len(keys):
                keys, rows = keys.clone(), rows.clone()
            values = rows.to(self.device, self.dtype)
            return torch.sparse_coo_tensor(
                keys[None].to(self.device), values, self.shape, check_invariants=False
            ).coalesce()

    def without_shape(self) -> UsageError:
        """Return the error for a gradient of an unbounded table."""
        return UsageError(
            f"The gradient of {self.name!r} has no shape, because the table is unbounded. Use the gradient "
            "of the rows that the embedding returns (rows.register_hook)."
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise _without_rows("pickling or copying")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise _without_rows("deepcopy")

    def __repr__(self, **options: object) -> str:  # type: ignore[override]  # torch's has tensor_contents
        with without_overrides():
            shape, dtype = tuple(self.shape), self.dtype
        return f"Parameter containing the rows of {self.name!r} on parameter servers: {shape}, {dtype}"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Fields | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        options = kwargs or {}
        if func is torch.autograd.grad:
            return _gradients(func, args, options)
        if func is torch.autograd.backward:
            with without_overrides():
                return func(*args, **options)
        if name in _HOOKS:
            weight = args[0]
            if weight.collected is None:
                raise _without_rows(name)
            if not weight.bounded:
                weight.sparse(torch.empty(0), torch.empty(0))  # this call raises
            weight.collected.return_gradients()
            args = args[0], _where_reached(*args)
        elif name in _MOVES:
            return _unmoved(func, name, args, options)
        elif name == "__set__":
            return _set(func.__self__, *args)
        # load_state_dict does this when the rows go to the servers.
        elif name == "copy_" and _is_same(*args[:2]):
            return args[0]
        elif name not in _WITHOUT_VALUES and name != "__get__":
            raise _without_rows(name)
        with without_overrides():
            result = func(*args, **options)
            # Arithmetic on `weight.data` and the like would need the rows too.
            return result.as_subclass(cls) if type(result) is Tensor else result


def _where_reached(weight: ServedWeight, hook: Callable[[T], object]) -> Callable[[T | None], object]:
    """Return the hook, of either kind, for calls that belong to this weight.

    torch also calls the hook after a forward pass that this weight shares with others, if a backward pass has
    reached only another weight.
    """
    return lambda given: None if given is None or (given is weight and weight.own is None) else hook(given)


def _without_rows(name: str) -> UsageError:
    return UsageError(
        f"torch's {name} was called on the weight of an embedding whose rows are on parameter servers. Call "
        "the embedding with ids instead. To read all rows, call state_dict(). To write them, call "
        "load_state_dict(). A penalty can use the rows that the embedding returns. Or use sparse=False."
    )


def _gradients(func: Callable[..., object], args: Sequence[Any], options: Fields) -> object:
    """Run torch.autograd.grad. Backward passes then return gradients instead of collecting them.

    Raises UsageError for the weight of an unbounded table.
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


def _unmoved(func: Callable[..., object], name: str, args: Sequence[Any], options: Fields) -> object:
    """Return the weight itself if it already has the device and the type."""
    weight, *rest = args
    with without_overrides():
        stand_in = torch.empty(0, dtype=weight.dtype, device=weight.device)
        moved = func(stand_in, *rest, **options)
        if isinstance(moved, Tensor) and (moved.dtype, moved.device) == (weight.dtype, weight.device):
            return weight
        if isinstance(moved, str):  # type() was called without arguments
            return moved
    raise UsageError(
        f"{name} would move or convert the weight of an embedding whose rows are on parameter servers. Call "
        "it before fleet.init_worker()."
    )


def _set(attribute: Any, weight: object, value: object) -> None:
    """Set an attribute of the weight that does not concern its rows."""
    name = getattr(attribute, "__name__", "data")
    if name == "data" and _is_same(weight, value):
        return
    if name not in ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"):
        raise _without_rows(f"setter of {name}")
    with without_overrides():
        attribute.__set__(weight, value)


def _is_same(weight: object, value: object) -> bool:
    """Return True if the value is the weight, or a view of the whole weight."""
    if not (isinstance(weight, ServedWeight) and isinstance(value, ServedWeight)):
        return False
    with without_overrides():
        return bool(weight.shape == value.shape and weight.data_ptr() == value.data_ptr())


def once(backward: Callable[..., T]) -> Callable[..., T]:
    """Return the backward pass of an autograd.Function, without support for gradients of gradients.

    torch raises an error if a script needs a gradient of this gradient.
    """
    followed = once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: object, *grads: object) -> T:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        before, ServedWeight.followed = ServedWeight.followed, True
        try:
            return followed(ctx, *grads)
        finally:
            ServedWeight.followed = before

    return call


def serve_weight(weight: Parameter, name: str, collected: WeightGradient, *, bounded: bool) -> ServedWeight:
    """Make the parameter a ServedWeight without rows. All its values are the same NaN, and its hooks stay."""
    if bounded:
        nothing = torch.full((1, 1), math.nan, dtype=weight.dtype, device=weight.device)
        weight.data = nothing.expand(weight.shape)
    hooked = bool(weight._backward_hooks) or bool(getattr(weight, "_post_accumulate_grad_hooks", None))
    former = type(weight)
    weight.__class__ = ServedWeight
    assert isinstance(weight, ServedWeight)
    weight.former = former
    weight.name, weight.collected, weight.bounded = name, collected, bounded
    if hooked:
        collected.return_gradients()
    return weight


def end_serving(weight: ServedWeight, values: Tensor | None) -> None:
    """Make the weight an ordinary parameter with these values. With None, it keeps its current values."""
    former: Any = weight.former
    for name in ("name", "collected", "bounded", "former"):
        del weight.__dict__[name]
    weight.__class__ = former
    if values is not None:
        weight.data = values


@contextlib.contextmanager
def hidden_gradients() -> Iterator[None]:
    """Hide the gradients of served weights from torch, because they are handled as rows of all tables."""
    before, ServedWeight.hidden = ServedWeight.hidden, True
    try:
        yield
    finally:
        ServedWeight.hidden = before
