"""Program: a step, declared once. Knows model, loss, optimizer and what can be fetched; leaves feeding,
devices and numpy to the executor.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from trainers import progress
from trainers.errors import UsageError
from trainers.optimizer import DistributedOptimizer
from trainers.static.feeds import Data, Fed

Values: TypeAlias = Mapping[str, Tensor | float]
"""What a network computes, by the names under which it can be fetched."""
Network: TypeAlias = Callable[..., Values]
"""`network(model, **feeds)`: the computation of one step, losses and metrics included."""


class Program:
    """One step of training, or without `optimizer` one of testing.

    `model`: what `fleet.distributed_model` gave back, or any torch module. `feeds`: what it is given, made by
    `static.data`. `network(model, x=..., y=...)` gets each feed by its name and gives back a dict of what can
    be fetched. `loss`: the name in it of what `optimizer` (of `fleet.distributed_optimizer`, or torch's own)
    minimizes: one value. `compile`: run the network through torch.compile, with inductor (True) or the
    backend of this name.

    A step of training puts the model into training mode and leaves it there. A step of testing has no
    gradients, is in evaluation mode, and leaves every module in the mode that it found.

    Raises UsageError for feeds, loss or optimizer that do not belong together.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        feeds: Sequence[Data],
        network: Network,
        *,
        loss: str = "loss",
        optimizer: torch.optim.Optimizer | None = None,
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
        """A program of the same model, feeds and network; `for_test`: without the optimizer."""
        cloned = object.__new__(Program)
        cloned.__dict__.update(self.__dict__)
        if for_test:
            cloned.optimizer = None
        return cloned

    def step(self, feed: Mapping[str, Fed], fetch_list: Sequence[str] = ()) -> Values:
        """One step with tensors of the declared types on the model's device, and all that the network gave.

        A name in `fetch_list` that it did not give is a UsageError before anything is trained.
        """
        if self.optimizer is None:
            with torch.no_grad(), _evaluating(self.model):
                return self._values(feed, fetch_list)
        if not self.model.training:
            self.model.train()
        with torch.enable_grad():
            values = self._values(feed, fetch_list)
            self._minimize(self._loss(values), self.optimizer)
        progress.meter.has_loss(values[self.loss])
        self._counter.tick()
        return {name: _detached(value) for name, value in values.items()}

    def _values(self, feed: Mapping[str, Fed], fetch_list: Sequence[str]) -> Values:
        values = self._network(self.model, **feed)
        if not isinstance(values, Mapping):
            raise UsageError(
                f"the network gave a {type(values).__name__}; it must give a dict of values by name"
            )
        for name in fetch_list:
            if name not in values:
                raise UsageError(
                    f"fetch_list has {name!r}; the network gives {', '.join(values) or 'nothing'}"
                )
        return values

    def _loss(self, values: Values) -> Tensor:
        loss = values.get(self.loss)
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"the program minimizes {self.loss!r}, and its network gives "
                f"{', '.join(values) or 'nothing'}; name the one to minimize: Program(..., loss=...)"
            )
        if loss.numel() != 1:
            raise UsageError(f"the loss {self.loss!r} has shape {list(loss.shape)}; take its mean first")
        return loss

    @staticmethod
    def _minimize(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.minimize(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's annotation
            optimizer.step()
            optimizer.zero_grad()

    def __repr__(self) -> str:
        trains = f"minimizes {self.loss!r}" if self.optimizer else "for test"
        return f"Program({type(self.model).__name__}, {', '.join(map(str, self.feeds))}; {trains})"


class _Compiled:
    """A network through torch.compile, from its first call on."""

    def __init__(self, network: Network, backend: str) -> None:
        from trainers.collective.compiling import check_compiler  # late: few programs are compiled

        check_compiler(backend, "static.Program(compile=True)")
        self._network = torch.compile(network, backend=backend)
        self._called = False

    def __call__(self, model: torch.nn.Module, **feed: Fed) -> Values:
        if not self._called:
            self._called = True
            for module in model.modules():
                # Embeddings on parameter servers: sockets and kernels, in which there is nothing to compile.
                if "forward" in vars(module):
                    module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        return self._network(model, **feed)


def _detached(value: Tensor | float) -> Tensor | float:
    """Whoever keeps it does not keep what it was computed from."""
    return value.detach() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is in its own again: some may be frozen on purpose."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode


def _check(
    model: torch.nn.Module, feeds: Sequence[Data], network: Network, optimizer: torch.optim.Optimizer | None
) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"Program wants a torch.nn.Module as its model, not {model!r}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"Program wants a torch.optim optimizer, not {optimizer!r}")
    strange = [feed for feed in feeds if not isinstance(feed, Data)]
    if strange:
        raise UsageError(f"feeds holds {strange[0]!r}; it is a list of static.data(name, shape, dtype)")
    names = [feed.name for feed in feeds]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"feeds has {doubled[0]!r} twice; every feed needs a name of its own")
    try:
        inspect.signature(network).bind(model, **dict.fromkeys(names))
    except TypeError as problem:
        raise UsageError(
            f"the network is called with the model and, by name, {', '.join(names) or 'no feeds'}; it does "
            f"not take that: {problem}"
        ) from problem
