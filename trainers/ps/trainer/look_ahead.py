"""Requests the rows of a batch without a call in the script: which of its tensors are ids is learned from the
calls of embeddings. One message asks for all of them, and earlier than the batch's turn where that has no
other effect.

Loops over torch's DataLoader and the data sets of `trainers.data` are known. In other loops the calls of a
step are predicted from the first of them, as far as their ids are parts of one tensor. Requests belong to
`exchange`.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch

from trainers.data.loop import Arriving
from trainers.ps.trainer.remote import same_ids

_KNOWN = (
    ("torch.utils.data", "DataLoader"),
    ("trainers.data.dataset", "QueueDataset"),
    ("trainers.data.dataset", "InMemoryDataset"),
    ("trainers.data.stream", "Stream"),
)
"""Classes whose iterators give out batches."""

_DEEPEST = 8
_KINDS = 256
"""Kinds of batches that are remembered."""
_CHANGES = 8
"""How often a prediction for a kind of batches may be wrong; then there is none any more."""

Calls = list[tuple[torch.nn.Module, torch.Tensor]]
Kind = tuple[object, ...]
Prefetch = Callable[[Calls, bool], None]
"""Prepares the rows of the calls of a batch; True: they are used next."""


@dataclass(frozen=True, slots=True)
class _View:
    """A module is called with a leaf of the batch (`size` is None), or with a part of it."""

    module: torch.nn.Module
    leaf: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0

    def of(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        leaf = leaves[self.leaf]
        if self.size is None:
            return leaf
        return leaf.as_strided(self.size, self.stride, leaf.storage_offset() + self.offset)


@dataclass(slots=True)
class _Prediction:
    """What the step of a batch of some kind calls: `views` are those of its calls that can be predicted."""

    views: Sequence[_View]
    calls: int
    changes: int = 0


class LookAhead:
    """`ahead`: how many batches in advance a batch is prepared, at most."""

    def __init__(self, prefetch: Prefetch, ahead: int) -> None:
        self._prefetch, self.ahead = prefetch, ahead
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._predictions: dict[Kind, _Prediction] = {}
        self._given: _Given | None = None
        """The batch whose step it is."""
        self.active = True

    def watch(self) -> Callable[[], None]:
        """Look into the loops over known classes until the returned function is called."""
        found = [vars(sys.modules[module])[name] for module, name in _KNOWN if module in sys.modules]
        former = [(each, vars(each)["__iter__"]) for each in found]
        for each, method in former:
            setattr(each, "__iter__", self._looking(method))  # noqa: B010  mypy: a method

        def end() -> None:
            self.active = False
            for each, method in former:
                setattr(each, "__iter__", method)  # noqa: B010

        return end

    def called(self, module: torch.nn.Module, ids: torch.Tensor) -> None:
        """A served embedding is called. Outside of known loops a step begins where its first module is called
        again.
        """
        if not self.active:
            return
        if self._given is None or self._given.first is module:
            if self._given is not None:
                self.learn(self._given)
            self._given = self.expected(_Given(None, [ids], first=module), now=True)
        self._given.calls.append((module, ids))

    def stepped(self) -> None:
        """The optimizer has made a step: later calls in the turn of a batch are of other steps, each with a
        part of it.
        """
        if self._given is not None and self._given.first is None:
            self._given = None

    @property
    def usable(self) -> bool:
        """Whether it may be used here: not in another thread, nor in the workers of a data loader."""
        return self.active and self._thread == threading.get_ident() and self._process == os.getpid()

    def _looking(self, method: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @wraps(method)
        def over(batches: Any) -> Iterator[Any]:
            found = method(batches)
            return _Loop(self, found, early=_is_at_hand(batches)) if self.usable else found

        return over

    def gives(self, given: _Given | None) -> None:
        """It is the turn of a batch, and calls are its own from now on; None: a loop is over."""
        self._given = given

    def expected(self, given: _Given, *, now: bool) -> _Given:
        """Prepare the rows of a batch as far as its calls can be predicted; `now`: it is used next."""
        known = next((self._predictions[kind] for kind in given.kinds if kind in self._predictions), None)
        if known is not None:
            with contextlib.suppress(RuntimeError):  # a part would be outside of the memory of `first`
                given.predicted = [(view.module, view.of(given.leaves)) for view in known.views]
            if len(given.predicted) > (given.first is not None):  # one call requests its rows by itself
                self._prefetch(given.predicted, now)
        return given

    def learn(self, given: _Given) -> None:
        """The step of this batch is over."""
        loose, exact = given.kinds
        known = self._predictions.get(loose) or self._predictions.get(exact)
        if known is None:
            new = len(self._predictions) < _KINDS
        else:
            new = known.calls != len(given.calls) or not given.as_predicted
        if not given.calls or not new:
            return
        views = [view for module, ids in given.calls if (view := given.view(module, ids)) is not None]
        kind = loose if all(each.size is None for each in views) else exact
        if known is None:
            self._predictions[kind] = _Prediction(views, len(given.calls))
            return
        known.changes += 1
        known.calls = len(given.calls)
        known.views = views if known.changes < _CHANGES and self._predictions.get(kind) is known else ()


@dataclass(slots=True)
class _Given:
    """A batch, its calls as predicted, and as they were made. `leaves`: its tensors that may be ids; outside
    of known loops those with which its `first` module was called.
    """

    batch: Any
    leaves: Sequence[torch.Tensor]
    first: torch.nn.Module | None = None
    predicted: Calls = field(default_factory=list)
    calls: Calls = field(default_factory=list)

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        """What batches of the same kind have in common: if all ids are leaves, and if some are parts."""
        loose = tuple((each.dtype, each.dim()) for each in self.leaves)
        exact = tuple((each.dtype, each.shape, each.stride()) for each in self.leaves)
        return (self.first, loose), (self.first, exact)

    @property
    def as_predicted(self) -> bool:
        """Whether all that were predicted were made, in this order; others may have been made as well."""
        made = iter(self.calls)
        return all(
            any(module is each and ids.data_ptr() == its.data_ptr() for each, its in made)
            for module, ids in self.predicted
        )

    def view(self, module: torch.nn.Module, ids: torch.Tensor) -> _View | None:
        """None: the ids are not in the batch."""
        for number, leaf in enumerate(self.leaves):
            if same_ids(leaf, ids):
                return _View(module, number)
        memory = ids.untyped_storage().data_ptr()
        for number, leaf in enumerate(self.leaves):
            if leaf.untyped_storage().data_ptr() != memory or leaf.dtype is not ids.dtype:
                continue  # on another device the addresses are others, too
            offset = int(ids.storage_offset()) - int(leaf.storage_offset())
            if self.first is not None or 0 <= offset <= offset + _extent(ids) <= _extent(leaf):
                return _View(module, number, tuple(ids.shape), ids.stride(), offset)
        return None


class _Loop(Iterator[Any]):
    """An iterator over batches. `early`: batches may be taken before their turn, if that draws no random
    numbers, which would change those of the model. An `Arriving` one says when the next is there, and is told
    whose turn it is.
    """

    def __init__(self, look: LookAhead, batches: Iterator[Any], *, early: bool) -> None:
        self._look, self._batches = look, batches
        self._arriving = batches if isinstance(batches, Arriving) else None
        self._coming: deque[_Given] = deque()
        self._given: _Given | None = None
        self._drawn = 0
        self._early = early
        self._over = False

    def __next__(self) -> Any:
        look = self._look
        if not look.usable:
            return self._turn_of(self._coming.popleft().batch if self._coming else self._next())
        if self._given is not None:
            look.learn(self._given)
        self._given = None
        look.gives(None)
        while len(self._coming) <= self._most and not self._over:
            self._draw()
        if not self._coming:
            raise StopIteration
        self._given = self._coming.popleft()
        look.gives(self._given)
        return self._turn_of(self._given.batch)

    def _turn_of(self, batch: Any) -> Any:
        if self._arriving is not None:
            self._arriving.give(batch)
        return batch

    def _next(self) -> Any:
        return next(self._batches) if self._arriving is None else self._arriving.draw()

    @property
    def _most(self) -> int:
        """Batches that may wait for their turn."""
        there = self._arriving is None or self._arriving.at_hand
        return self._look.ahead if self._early and self._drawn > 1 and there else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # TypeError where it has none

    def _draw(self) -> None:
        looked = self._early and self._drawn > 0  # the first draws the order
        before = _random_states(every=self._drawn == 1) if looked else ()
        try:
            batch = self._next()
        except StopIteration:
            self._over = True
            return
        if before:
            self._early = before == _random_states(every=self._drawn == 1)
        self._drawn += 1
        given = _Given(batch, list(_leaves(batch)))
        self._coming.append(self._look.expected(given, now=not self._coming))


def _is_at_hand(batches: Any) -> bool:
    """Whether the next batch is certainly there: that of an IterableDataset may still have to come."""
    data = sys.modules.get("torch.utils.data")
    return data is None or not isinstance(getattr(batches, "dataset", None), data.IterableDataset)


def _random_states(*, every: bool) -> tuple[object, ...]:
    """Of torch, with which models draw too; `every`: and of the others, which takes much longer."""
    torchs = torch.get_rng_state().numpy().tobytes()
    if not every:
        return (torchs,)
    numpys: Any = np.random.get_state()
    return torchs, random.getstate(), numpys[1].tobytes(), numpys[2:]


def _leaves(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors of a batch that may be ids."""
    if isinstance(batch, torch.Tensor):
        if batch.is_cpu and batch.dtype in (torch.int64, torch.int32) and batch.layout is torch.strided:
            yield batch
        return
    inner: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        inner = batch.values()
    elif isinstance(batch, list | tuple):
        inner = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        inner = (getattr(batch, each.name) for each in fields(batch))
    if depth < _DEEPEST:
        for each in inner:
            yield from _leaves(each, depth + 1)


def _extent(tensor: torch.Tensor) -> int:
    """From its first element to its last."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
