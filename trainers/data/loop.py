"""Loop over a data set with a step for every batch, and print a line periodically, as Paddle does.

`prefetched` takes batches ahead of the current one, so that they can be prepared early. The step does the
training.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, Protocol, TypedDict, TypeVar, runtime_checkable

import torch

from fleetrun.frozen import frozen
from trainers import progress
from trainers.data.slots import Batch
from trainers.errors import UsageError

# ---- The loop over a data set

Number = torch.Tensor | float
Numbers = Mapping[str, Number]
"""The results of a step, by name."""

Step = Callable[[Batch], Numbers | Number | None]
"""A whole training step. Its results can be printed. A single tensor or number is the loss."""
Prefetch = Callable[[Iterable[Batch]], Iterable[Batch]]
"""Yields the same batches, and looks ahead."""

_LOSS = "loss"


@frozen
class Result:
    """The result of a loop.

    `fetches` holds the last batch's values by name. `skipped_lines` counts broken lines of the data set that
    were skipped.
    """

    batches: int
    examples: int
    seconds: float
    skipped_lines: int
    fetches: Numbers = field(default_factory=dict)


class Printing(TypedDict, total=False):
    """The printing arguments of `train_from_dataset`."""

    fetch_list: Sequence[str]
    fetch_info: Sequence[str]
    print_period: int


def train_from_dataset(
    step: Step,
    dataset: Iterable[Batch],
    *,
    fetch_list: Sequence[str] = (),
    fetch_info: Sequence[str] = (),
    print_period: int = 100,
    prefetch: Prefetch | None = None,
) -> Result:
    """Make one pass over the data set, calling `step(batch)` for each batch.

    Every `print_period` batches it prints the values of `fetch_list` (names in the step's results), with the
    number of values of each. `fetch_info` gives the printed names, by default the same.

        time: [2022-05-18 11:27:27], batch: [100], loss[1]:[0.666739]

    The batches pass through `prefetch`, which can start work before a step. Raises UsageError for names that
    the step does not return.
    """
    printer = _FetchPrinter(fetch_list, fetch_info, print_period)
    after = _trained if torch.is_grad_enabled() else _alive
    batches = examples = 0
    given: Numbers = {}
    began = time.monotonic()
    for batch in dataset if prefetch is None else prefetch(dataset):
        given = _by_name(step(batch))
        batches += 1
        examples += len(batch)
        after(given, len(batch))
        printer.after(batches, given)
    skipped = int(getattr(dataset, "skipped_lines", 0))
    fetches = {
        name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in given.items()
    }
    return Result(batches, examples, time.monotonic() - began, skipped, fetches)


@cache
def _steps() -> progress.Counter:
    """Return the step counter. Without a counter, the steps of torch's optimizers count, so make it
    only here.
    """
    return progress.Counter()


def _trained(given: Numbers, examples: int) -> None:
    """Report a step to the launcher."""
    progress.meter.seen(examples)
    if _LOSS in given:
        progress.meter.has_loss(given[_LOSS])
    _steps().tick()


def _alive(given: Numbers, examples: int) -> None:
    progress.heartbeat()


def _by_name(given: Numbers | Number | None) -> Numbers:
    if given is None:
        return {}
    return given if isinstance(given, Mapping) else {_LOSS: given}


class _FetchPrinter:
    """Prints values periodically."""

    def __init__(self, names: Sequence[str], labels: Sequence[str], period: int) -> None:
        if period < 1:
            raise UsageError(f"print_period is {period}; it must be at least 1")
        if isinstance(names, str) or isinstance(labels, str):
            raise UsageError(
                f"fetch_list and fetch_info must be lists of names, not {names!r} and {labels!r}"
            )
        if labels and len(labels) != len(names):
            raise UsageError(
                f"fetch_info has {len(labels)} names, but fetch_list has {len(names)}. Give one name for "
                "each value."
            )
        self._labels = dict(zip(names, labels or names, strict=True))
        self._period = period

    def after(self, batches: int, given: Numbers) -> None:
        if not self._labels or batches % self._period:
            return
        missing = [name for name in self._labels if name not in given]
        if missing:
            raise UsageError(
                f"fetch_list has {missing[0]!r}, but the step returned {', '.join(given) or 'nothing'}"
            )
        values = "".join(f", {label}{_shown(given[name])}" for name, label in self._labels.items())
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        sys.stdout.write(f"time: [{stamp}], batch: [{batches}]{values}\n")
        sys.stdout.flush()


def _shown(value: Number) -> str:
    """Return `[count]:[v1,v2]`."""
    flat = torch.as_tensor(value).detach().reshape(-1).tolist()
    return f"[{len(flat)}]:[{','.join(f'{number:.6g}' for number in flat)}]"


# ---- Prefetching

AnyBatch = TypeVar("AnyBatch")


@runtime_checkable
class Arriving(Protocol):
    """An iterator over batches that counts the batches given out, and may have to wait for the next."""

    @property
    def at_hand(self) -> bool:
        """True if the next batch is available."""

    def draw(self) -> Any:
        """Return the next batch, before its turn. Raises StopIteration."""

    def give(self, batch: object) -> None:
        """Count a drawn batch, because its turn has come."""


def prefetched(
    batches: Iterable[AnyBatch], prepare: Callable[[AnyBatch], object], ahead: int = 1
) -> Iterator[AnyBatch]:
    """Yield the same batches. Each except the first is prepared `ahead` batches early.

    An error is raised after the batches before it have been yielded.
    """
    found = iter(batches)
    arriving = found if isinstance(found, Arriving) else None
    coming: deque[AnyBatch] = deque()
    drawn = 0
    end: Exception | None = None
    while coming or end is None:
        while end is None and (len(coming) <= ahead if arriving is None or arriving.at_hand else not coming):
            try:
                batch = next(found) if arriving is None else arriving.draw()
            except Exception as error:  # noqa: BLE001  (iterators may raise anything; it comes at its turn)
                end = error
                break
            if drawn:
                prepare(batch)
            drawn += 1
            coming.append(batch)
        if coming:
            batch = coming.popleft()
            if arriving is not None:
                arriving.give(batch)
            yield batch
    if not isinstance(end, StopIteration):
        raise end
