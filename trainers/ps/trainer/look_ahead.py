"""Request the rows of a batch without a call in the script. The calls of embeddings show which tensors of a
batch are ids. One message requests all rows. The request comes before the turn of the batch, provided that no
script can notice the early read (see `purity`).

Loops over torch's DataLoader and over the data sets of `trainers.data` are recognized. In other loops, the
calls of a step are predicted from the first call if their ids are parts of one tensor. `exchange` makes the
requests.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from math import inf
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Module

from fleetrun.aliases import Callback, Integers, ShowText
from fleetrun.frozen import frozen
from trainers.data.loop import Arriving
from trainers.errors import UsageError
from trainers.ps.trainer.purity import obstacle, read_again
from trainers.ps.trainer.remote import same_ids
from trainers.ps.trainer.torchrec import is_jagged, jagged_parts

_KNOWN = (
    ("torch.utils.data", "DataLoader"),
    ("trainers.data.dataset", "QueueDataset"),
    ("trainers.data.dataset", "InMemoryDataset"),
    ("trainers.data.stream", "Stream"),
)
"""Classes whose iterators return batches."""

_DEEPEST = 8
_KINDS = 256
"""The number of kinds of batches to remember."""
_CHANGES = 8
"""The number of wrong predictions for a kind of batches, after which predictions for this kind end."""

_PIPELINE = 4
"""The most batches that a pipeline may have drawn without a call."""

Ids = Any
"""A tensor, or a KeyedJaggedTensor for a collection of TorchRec."""
Calls = list[tuple[Module, Ids]]
Kind = tuple[object, ...]
Prefetch = Callable[[Calls, bool], None]
"""A function that prepares the rows of a batch's calls. True means that they are used next."""


@frozen
class _View:
    """The ids of a module's call, as a leaf of the batch (`size` is None) or as a part of a leaf."""

    module: Module
    leaf: int
    size: Integers | None = None
    stride: Integers = ()
    offset: int = 0

    def of(self, leaves: Sequence[Ids]) -> Ids:
        leaf = leaves[self.leaf]
        if self.size is None:
            return leaf
        return leaf.as_strided(self.size, self.stride, leaf.storage_offset() + self.offset)


@dataclass(slots=True)
class _Prediction:
    """The calls in the step of a batch of some kind. `views` covers the calls that can be predicted."""

    views: Sequence[_View]
    calls: int
    changes: int = 0


class LookAhead:
    """Prepare batches ahead of their turn, at most `ahead` batches.

    With `every`, the script allows this for all loops. Otherwise `report` receives one line about the first
    loop that needs this permission.
    """

    def __init__(
        self,
        prefetch: Prefetch,
        ahead: int,
        *,
        every: bool,
        report: ShowText | None,
    ) -> None:
        self._prefetch, self.ahead, self.every, self._report = prefetch, ahead, every, report
        self._loops: WeakValueDictionary[int, _Loop] = WeakValueDictionary()
        """Loops by the id of the iterator that they read."""
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._predictions: dict[Kind, _Prediction] = {}
        self._given: _Given | None = None
        """The batch of the current step."""
        self._drawn: deque[_Given] = deque(maxlen=_PIPELINE)
        """Batches with a KeyedJaggedTensor without a step, the newest last."""
        self.lag = 0
        """The number of batches that the script draws before it uses one, as TorchRec's pipelines do."""
        self.active = True

    def watch(self) -> Callback:
        """Observe loops over known classes until the returned function is called."""
        found = [vars(sys.modules[module])[name] for module, name in _KNOWN if module in sys.modules]
        former = [(each, vars(each)["__iter__"]) for each in found]
        for each, method in former:
            setattr(each, "__iter__", self._looking(method))  # noqa: B010  mypy: a method

        def end() -> None:
            self.active = False
            for each, method in former:
                setattr(each, "__iter__", method)  # noqa: B010

        return end

    def called(self, module: Module, ids: Ids) -> None:
        """Record the call of a served embedding.

        Outside of known loops, a step starts when its first module is called again.
        """
        if not self.active:
            return
        if not isinstance(ids, Tensor):
            self._find(ids)
        if self._given is None or self._given.first is module:
            if self._given is not None:
                self.learn(self._given)
            self._given = self.expected(_Given(None, [ids], first=module), now=True)
        self._given.calls.append((module, ids))

    def _find(self, ids: Ids) -> None:
        """Find the batch of this KeyedJaggedTensor among those drawn."""
        for lag, given in enumerate(reversed(self._drawn)):
            if any(_same(leaf, ids) for leaf in given.leaves):
                self._given, self.lag = given, lag
                return

    def stepped(self) -> None:
        """Record a step of the optimizer. Later calls in the turn of a batch belong to other steps, each with
        a part of the batch.
        """
        if self._given is not None and self._given.first is None:
            if self._given in self._drawn:
                self.learn(self._given)
                while self._drawn.popleft() is not self._given:
                    pass
            self._given = None

    @property
    def usable(self) -> bool:
        """True while this is active, in the thread and process that made it. It is False in the workers of a
        data loader.
        """
        return self.active and self._thread == threading.get_ident() and self._process == os.getpid()

    def _looking(self, method: Callable[[object], Iterator[object]]) -> Callable[[object], Iterator[object]]:
        @wraps(method)
        def over(batches: object) -> Iterator[object]:
            found = method(batches)
            if not self.usable:
                return found
            loop = self._loops.get(id(found))
            if loop is None or not loop.reads(found):
                loop = self._loops[id(found)] = _Loop(self, found)
            loop.begin(batches)  # this may be a new pass, if the loader has persistent workers
            return loop

        return over

    def suggest(self, reason: str) -> None:
        """Print once how to read ahead in a loop like this."""
        if self._report is not None and self.ahead:
            self._report(
                "Rows are not requested ahead in this loop, because reading ahead could change what the "
                f"script sees: the loop has the {reason}. If its batches do not depend on earlier steps, "
                'set strategy.ps_configs = {"read_ahead": True}, or loop over fleet.prefetch(loader, ids).'
            )
            self._report = None

    def gives(self, given: _Given | None) -> None:
        """Start the turn of a batch, to which calls belong from now on. None means that a loop has ended."""
        self._given = given
        if given is not None and not all(isinstance(leaf, Tensor) for leaf in given.leaves):
            self._drawn.append(given)

    def expected(self, given: _Given, *, now: bool) -> _Given:
        """Prepare the rows of a batch as far as its calls can be predicted. `now` means that the batch is
        used next.
        """
        known = next((self._predictions[kind] for kind in given.kinds if kind in self._predictions), None)
        if known is not None:
            with contextlib.suppress(RuntimeError):  # a part would lie outside the memory of `first`
                given.predicted = [(view.module, view.of(given.leaves)) for view in known.views]
            if len(given.predicted) > (given.first is not None):  # a single call requests its rows itself
                self._prefetch(given.predicted, now)
        return given

    def learn(self, given: _Given) -> None:
        """Learn from the calls of this batch after its step."""
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


@dataclass(slots=True, eq=False)
class _Given:
    """A batch with its predicted and its actual calls."""

    batch: Any
    leaves: Sequence[Ids]
    """The tensors of the batch that may be ids. Outside of known loops, the ids in the call of the `first`
    module.
    """
    first: Module | None = None
    index: Sequence[int] | None = None
    """The items of a batch that must be read again at its turn."""
    predicted: Calls = field(default_factory=list)
    calls: Calls = field(default_factory=list)

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        """Two keys that batches of the same kind share. Use the first if all ids are leaves, and the second
        if some ids are parts.
        """
        tensors = [each for each in self.leaves if isinstance(each, Tensor)]
        jagged = [tuple(each.keys()) for each in self.leaves if not isinstance(each, Tensor)]
        loose = *((each.dtype, each.dim()) for each in tensors), *jagged
        exact = *((each.dtype, each.shape, each.stride()) for each in tensors), *jagged
        return (self.first, loose), (self.first, exact)

    @property
    def as_predicted(self) -> bool:
        """True if all predicted calls were made in this order, perhaps among other calls."""
        made = iter(self.calls)
        return all(
            any(module is each and _begins_as(ids, its) for each, its in made)
            for module, ids in self.predicted
        )

    def view(self, module: Module, ids: Ids) -> _View | None:
        """Return the view of these ids, or None if the ids are not in the batch."""
        for number, leaf in enumerate(self.leaves):
            if _same(leaf, ids):
                return _View(module, number)
        if not isinstance(ids, Tensor):
            return None
        memory = ids.untyped_storage().data_ptr()
        for number, leaf in enumerate(self.leaves):
            if (
                not isinstance(leaf, Tensor)
                or leaf.untyped_storage().data_ptr() != memory
                or leaf.dtype is not ids.dtype
            ):
                continue  # on another device, the addresses differ too
            offset = int(ids.storage_offset()) - int(leaf.storage_offset())
            if self.first is not None or 0 <= offset <= offset + _extent(ids) <= _extent(leaf):
                return _View(module, number, tuple(ids.shape), ids.stride(), offset)
        return None


class _Loop(Iterator[object]):
    """An iterator over batches. If its source is an `Arriving`, the source reports whether its next batch has
    arrived, and receives each batch at its turn.
    """

    def __init__(self, look: LookAhead, batches: Iterator[object]) -> None:
        self._look, self._batches = look, batches
        self._arriving = batches if isinstance(batches, Arriving) else None

    def reads(self, batches: Iterator[object]) -> bool:
        return self._batches is batches

    def begin(self, loader: Any) -> None:
        """Start a pass of this loader or data set."""
        self._coming: deque[_Given] = deque()
        self._held: deque[_Given] = deque()
        """The batches of a pipeline whose rows it is too early to request."""
        self._error: Exception | None = None
        """The error to raise once the batches before it have had their turns."""
        self._given: _Given | None = None
        self._drawn = 0
        self._reason = "" if self._look.every else obstacle(loader)
        self._end = 0.0 if self._reason else inf
        """The number of the first batch that is not read early."""
        self._data, self._indices = getattr(loader, "dataset", None), None
        self._order = getattr(loader, "batch_sampler", None)
        self._size = getattr(self._order, "batch_size", None)
        if self._data is not None and not (self._reason or obstacle(loader)):
            self._end = len(loader) - 1  # with its last index, a sampler may draw random numbers again
            if not loader.num_workers:
                self._indices = self._batches._sampler_iter = _Indices(self._batches._sampler_iter)  # type: ignore[attr-defined]  # torch's

    def __next__(self) -> object:
        look = self._look
        if look.usable:
            if self._given is not None:
                look.learn(self._given)
            self._given = None
            look.gives(None)
        if self._coming:
            self._check_size()
        elif self._error is None:
            self._draw(early=False)
        else:
            try:
                raise self._error
            finally:
                self._error = None
        given = self._current(self._coming.popleft())
        while self._may_read:
            self._draw(early=True)
        if look.usable:
            self._given = given
            look.gives(given)
        if self._arriving is not None:
            self._arriving.give(given.batch)
        return given.batch

    @property
    def _may_read(self) -> bool:
        """True if another batch may be read before its turn."""
        look = self._look
        return (
            1 < self._drawn < self._end
            and not look.lag
            and len(self._coming) < look.ahead
            and self._error is None
            and look.usable
            and (self._arriving is None or self._arriving.at_hand)
            and not torch.is_inference_mode_enabled()  # such tensors cannot be used outside
        )

    def __getattr__(self, name: str) -> object:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # TypeError where it has none

    def _draw(self, *, early: bool) -> None:
        batch = None
        try:
            batch = next(self._batches) if self._arriving is None else self._arriving.draw()
        except Exception as error:
            if not early:
                raise
            if self._indices is None:
                self._error = error
                return
        self._drawn += 1
        given = _Given(batch, [], index=self._indices.last if early and self._indices is not None else None)
        self._coming.append(self._expected(given, now=not early))
        if given.predicted and self._reason and not self._look.lag:
            self._look.suggest(self._reason)

    def _expected(self, given: _Given, *, now: bool) -> _Given:
        if self._look.usable:
            given.leaves = list(_leaves(given.batch))
            if not self._look.lag:
                self._look.expected(given, now=now)
                return given
            self._held.append(given)
            while len(self._held) > max(0, self._look.lag - self._look.ahead):
                self._look.expected(self._held.popleft(), now=False)
        return given

    def _check_size(self) -> None:
        """Raise UsageError if the script has changed the size of batches that were read already."""
        size = getattr(self._order, "batch_size", None)
        if size != self._size:
            raise UsageError(
                f"The batch_size of a loader's sampler changed from {self._size} to {size} in a loop that "
                "had already read the next batches. Change it between two loops, or use your own sampler."
            )

    def _current(self, given: _Given) -> _Given:
        """Return the batch as it is now, if the script has changed the data since the batch was read. From
        then on, nothing is read ahead.
        """
        if given.index is None:
            return given
        batch = read_again(self._data, given.index)
        if given.batch is not None and len(batch) == len(given.batch):
            pairs = zip(batch, given.batch, strict=True)
            if all(now.dtype is early.dtype and torch.equal(now, early) for now, early in pairs):
                return given
        self._end = 0.0
        return self._expected(_Given(batch, []), now=True)


class _Indices(Iterator[Sequence[int]]):
    """The indices of a loader. `last` is the newest index."""

    def __init__(self, indices: Iterator[Sequence[int]]) -> None:
        self._indices = indices
        self.last: Sequence[int] | None = None

    def __next__(self) -> Sequence[int]:
        self.last = next(self._indices)
        return self.last


def _same(leaf: Ids, ids: Ids) -> bool:
    """Return True if both are the same memory. The weights of a KeyedJaggedTensor do not matter."""
    if isinstance(leaf, Tensor) or isinstance(ids, Tensor):
        return isinstance(leaf, Tensor) and isinstance(ids, Tensor) and same_ids(leaf, ids)
    one, other = jagged_parts(leaf), jagged_parts(ids)
    return one[0] == other[0] and all(map(same_ids, one[1:], other[1:]))


def _begins_as(ids: Ids, its: Ids) -> bool:
    if isinstance(ids, Tensor) and isinstance(its, Tensor):
        return ids.data_ptr() == its.data_ptr()
    return _same(ids, its)


def _leaves(batch: object, depth: int = 0) -> Iterator[Ids]:
    """Yield the tensors of a batch that may be ids, and its KeyedJaggedTensors."""
    if is_jagged(batch):
        yield batch
        return
    if isinstance(batch, Tensor):
        if batch.is_cpu and batch.dtype in (torch.int64, torch.int32) and batch.layout is torch.strided:
            yield batch
        return
    inner: Iterable[object] = ()
    if isinstance(batch, Mapping):
        inner = batch.values()
    elif isinstance(batch, list | tuple):
        inner = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        inner = (getattr(batch, each.name) for each in fields(batch))
    if depth < _DEEPEST:
        for each in inner:
            yield from _leaves(each, depth + 1)


def _extent(tensor: Tensor) -> int:
    """Return the distance from the first element to the last."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
