"""Declare a step of training or testing once, as a program with its feeds.

A feed has a name, shape and type, and its values are checked before any computation. A program has a model, a
loss, an optimizer, and values to fetch. The executor handles devices, data sets and numpy.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from fleetrun.aliases import Strings
from fleetrun.frozen import frozen
from trainers import progress
from trainers.checks import is_whole
from trainers.data.slots import Bag, Batch, Slot
from trainers.errors import UsageError
from trainers.optimizer import DistributedOptimizer
from trainers.shapes import Sizes, fits, shape_text

# ---- Feeds

Fed = Tensor | Bag
"""The value of a feed, a Bag for lod_level=1."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip


@frozen
class Data:
    """A declared feed. See `data`."""

    name: str
    shape: Sizes
    dtype: torch.dtype
    lod_level: int
    joins: Strings

    def __str__(self) -> str:
        kind = "any number of values per example" if self.lod_level else f"shape {shape_text(self.shape)}"
        return f"{self.name!r} ({_name(self.dtype)}, {kind})"

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of a data set's line for this feed, which data sets request in `use_var`.

        Raises UsageError for a feed that a line of text cannot hold, because of its type (not int64 or
        float32), or of several dimensions without a size.
        """
        if any(size is None for size in self.shape[1:]) or self.shape[:1] != (None,):
            raise UsageError(
                f"feed {self} cannot come from a data set, because only the first dimension may have any size"
            )
        if self.lod_level:
            return (Slot(self.name, self.dtype, None),)
        if len(self.joins) > 1:
            each = self._width // len(self.joins)
            return tuple(Slot(name, self.dtype, each) for name in self.joins)
        return (Slot(self.joins[0], self.dtype, self._width),)

    @property
    def _width(self) -> int:
        """Values per example."""
        return math.prod(size or 1 for size in self.shape[1:])

    def checked(self, value: object) -> Fed:
        """Return a value to feed as a tensor.

        The value is an array or tensor of the declared type, or numbers, which are converted. The tensor
        shares memory with the value if torch can. Raises UsageError with the feed, the given value and the
        declaration.
        """
        if self.lod_level:
            return self._bag(value)
        tensor = _tensor(value, self)
        if tensor.dtype != self.dtype:
            if isinstance(value, Tensor | np.ndarray) or not torch.can_cast(tensor.dtype, self.dtype):
                raise self._unlike(f"{_name(tensor.dtype)}. Convert it first.")
            whole, tensor = tensor, tensor.to(self.dtype)
            if not self.dtype.is_floating_point and not torch.equal(tensor.to(whole.dtype), whole):
                raise self._unlike(f"numbers from {whole.min()} to {whole.max()}")
        if not fits(tensor.shape, self.shape):
            raise self._unlike(f"shape {shape_text(tensor.shape)}")
        return tensor

    def of(self, batch: Batch) -> Fed:
        """Return this feed's part of a data set's batch, (examples, ...) in the declared shape.

        Raises UsageError if the batch lacks the slot, or has another length or type.
        """
        if self.lod_level:
            return self._bag(batch.bag(self.joins[0]))
        tensor = batch.joined(*self.joins) if len(self.joins) > 1 else batch.tensor(self.joins[0])
        sizes = (len(batch), *(size or -1 for size in self.shape[1:]))
        if -1 not in sizes and tensor.shape[1] == self._width:
            tensor = tensor.reshape(sizes)
        return self.checked(tensor)

    def _bag(self, value: object) -> Bag:
        if not isinstance(value, Bag):
            raise self._unlike(f"{_kind(value)}. Pass a trainers.data.slots.Bag of values and offsets.")
        if value.values.dtype != self.dtype:
            raise self._unlike(f"values of {_name(value.values.dtype)}")
        return value

    def _unlike(self, what: str) -> UsageError:
        return UsageError(f"feed {self} was given {what}")


def data(
    name: str,
    shape: Sequence[int | None],
    dtype: str | torch.dtype = "float32",
    lod_level: int = 0,
    *,
    joins: Sequence[str] = (),
) -> Data:
    """Declare a feed.

    In `shape`, None (or Paddle's -1) accepts any size, such as the batch size. `dtype` is torch's type or its
    name. `lod_level=1` accepts any number of values per example, as a `Bag` of shape [None, 1]. `joins` are
    slots of a data set's batch that the feed takes side by side, by default the slot with its name. Raises
    UsageError for an invalid declaration.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"static.data was given the name {name!r}; it must be a non-empty text")
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in _DTYPES.values():
        raise UsageError(f"feed {name!r} has dtype {dtype!r}; it must be one of {', '.join(_DTYPES)}")
    if isinstance(shape, int | str) or not all(
        size is None or (is_whole(size) and size >= -1) for size in shape
    ):
        raise UsageError(f"feed {name!r} has shape {shape!r}; give sizes of at least 0, or None for any size")
    sizes = tuple(None if size in (None, -1) else size for size in shape)
    if lod_level not in (0, 1):
        raise UsageError(f"feed {name!r} has lod_level {lod_level!r}; 0 is a tensor and 1 a Bag")
    if lod_level and sizes not in ((None,), (None, 1)):
        raise UsageError(
            f"feed {name!r} has lod_level 1 and shape {shape_text(sizes)}; its shape is [None, 1]"
        )
    made = Data(name, sizes, found, lod_level, tuple(joins) or (name,))
    if len(made.joins) > 1 and (len(sizes) != 2 or made._width % len(made.joins)):
        raise UsageError(
            f"feed {made} joins {len(joins)} slots; its second size must be a multiple of {len(joins)}"
        )
    return made


def _tensor(value: object, feed: Data) -> Tensor:
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch has no read-only tensors
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise UsageError(
            f"feed {feed} was given {_kind(value)}, which torch cannot convert into a tensor: {problem}"
        ) from problem


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- Program

Values = Mapping[str, Tensor | float]
"""The results of a network, by the names for fetching."""
Network = Callable[..., Values]
"""`network(model, **feeds)` computes one step, including losses and metrics."""


class Program:
    """One step of training, or without `optimizer` one step of testing.

    `model` comes from `fleet.distributed_model`, or is any torch module. `feeds` are its inputs, from
    `static.data`. `network(model, x=..., y=...)` receives each feed by name, and returns a dict of values to
    fetch. `loss` is the name of the single value to minimize. `optimizer` comes from
    `fleet.distributed_optimizer`, or is one of torch's. `compile` runs the network through torch.compile,
    with inductor (True) or the named backend.

    A training step sets the model to training mode and leaves it there. A test step has no gradients, runs in
    evaluation mode, and restores the mode of every module. Raises UsageError for feeds, loss or optimizer
    that do not fit together.
    """

    def __init__(
        self,
        model: Module,
        feeds: Sequence[Data],
        network: Network,
        *,
        loss: str = "loss",
        optimizer: Optimizer | None = None,
        compile: bool | str = False,
    ) -> None:
        _check(model, feeds, network, optimizer)
        self.model = model
        self.feeds = tuple(feeds)
        self.loss = loss
        self.optimizer = optimizer
        self._network: Network = network
        self._counter = progress.Counter()
        if compile:
            self._network = _Compiled(network, "inductor" if compile is True else compile)

    def clone(self, for_test: bool = False) -> Program:
        """Return a program with the same model, feeds and network. `for_test` removes the optimizer."""
        cloned = object.__new__(Program)
        cloned.__dict__.update(self.__dict__)
        if for_test:
            cloned.optimizer = None
        return cloned

    def step(self, feed: Mapping[str, Fed], fetch_list: Sequence[str] = ()) -> Values:
        """Run one step with tensors of the declared types on the model's device, and return all results.

        Raises UsageError, before training, if a name in `fetch_list` is missing from the results.
        """
        if self.optimizer is None:
            with torch.no_grad(), _evaluating(self.model):
                return self._values(feed, fetch_list)
        if not self.model.training:
            self.model.train()
        with torch.enable_grad():
            values = self._values(feed, fetch_list)
            loss = self._loss(values)
            self.optimizer.zero_grad()  # clears gradients of other programs and of the script
            if isinstance(self.optimizer, DistributedOptimizer):
                self.optimizer.minimize(loss)
            else:
                loss.backward()  # type: ignore[no-untyped-call]  # torch's annotation
                self.optimizer.step()
                self.optimizer.zero_grad()
        progress.meter.has_loss(values[self.loss])
        self._counter.tick()
        # A value that is kept must not keep the tensors behind it.
        return {
            name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()
        }

    def _values(self, feed: Mapping[str, Fed], fetch_list: Sequence[str]) -> Values:
        values = self._network(self.model, **feed)
        if not isinstance(values, Mapping):
            raise UsageError(
                f"The network returned a {type(values).__name__}; it must return a dict of values by name"
            )
        for name in fetch_list:
            if name not in values:
                raise UsageError(
                    f"fetch_list has {name!r}, but the network returns {', '.join(values) or 'nothing'}"
                )
        return values

    def _loss(self, values: Values) -> Tensor:
        loss = values.get(self.loss)
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"The program minimizes {self.loss!r}, but its network returns "
                f"{', '.join(values) or 'nothing'}. Name the value to minimize: Program(..., loss=...)"
            )
        if loss.numel() != 1:
            raise UsageError(f"The loss {self.loss!r} has shape {list(loss.shape)}. Return its mean instead.")
        return loss

    def __repr__(self) -> str:
        trains = f"minimizes {self.loss!r}" if self.optimizer else "for test"
        return f"Program({type(self.model).__name__}, {', '.join(map(str, self.feeds))}; {trains})"


class _Compiled:
    """A network that torch.compile compiles at its first call."""

    def __init__(self, network: Network, backend: str) -> None:
        from trainers.collective.modules import check_compiler  # late, because few programs are compiled

        check_compiler(backend, "static.Program(compile=True)")
        self._network = torch.compile(network, backend=backend)
        self._called = False

    def __call__(self, model: Module, **feed: Fed) -> Values:
        if not self._called:
            self._called = True
            for module in model.modules():
                # Embeddings on parameter servers consist of sockets and kernels, which cannot be compiled.
                if "forward" in vars(module):
                    module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        return self._network(model, **feed)


@contextlib.contextmanager
def _evaluating(model: Module) -> Iterator[None]:
    """Set evaluation mode, and restore the mode of each module afterwards, because some may be frozen on
    purpose.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode


def _check(model: Module, feeds: Sequence[Data], network: Network, optimizer: Optimizer | None) -> None:
    if not isinstance(model, Module):
        raise UsageError(f"Program needs a torch.nn.Module as its model, not {model!r}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UsageError(f"Program needs a torch.optim optimizer, not {optimizer!r}")
    strange = [feed for feed in feeds if not isinstance(feed, Data)]
    if strange:
        raise UsageError(
            f"feeds contains {strange[0]!r}; it must be a list of static.data(name, shape, dtype)"
        )
    names = [feed.name for feed in feeds]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"feeds has {doubled[0]!r} twice; each feed needs a different name")
    try:
        inspect.signature(network).bind(model, **dict.fromkeys(names))
    except TypeError as problem:
        raise UsageError(
            f"The network is called with the model and, by name, {', '.join(names) or 'no feeds'}, but does "
            f"not accept these arguments: {problem}"
        ) from problem
