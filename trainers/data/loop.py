"""The loop over a data set: a step for every batch, and a line every so often, as Paddle prints it.

`prefetched` takes batches ahead of the one that is trained, for what can be prepared early. Leaves the
training to the step.
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

# ---- The loop over a data set: a step for every batch, and a line every so often, as Paddle prints it. Knows
# batches and their reports; the step does the training.

Number = torch.Tensor | float
Numbers = Mapping[str, Number]
"""What a step has computed, by name."""

Step = Callable[[Batch], Numbers | Number | None]
"""A whole training step: what it gives back can be printed. A tensor or a number alone is the loss."""
Prefetch = Callable[[Iterable[Batch]], Iterable[Batch]]
"""Gives out the same batches, and looks ahead."""

_LOSS = "loss"


@frozen
class Result:
    """What a loop did. `fetches`: the last batch's values by name; `skipped_lines`: broken lines of the data
    set that were passed over.
    """

    batches: int
    examples: int
    seconds: float
    skipped_lines: int
    fetches: Numbers = field(default_factory=dict)


class Printing(TypedDict, total=False):
    """What a loop prints: see `train_from_dataset`."""

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
    """One pass over the data set, `step(batch)` for each batch.

    Every `print_period` batches it prints the values of `fetch_list` (names in what the step gives back)
    under the names of `fetch_info` (by default the same), with the number of values each has:

        time: [2022-05-18 11:27:27], batch: [100], loss[1]:[0.666739]

    The batches go through `prefetch`, which can begin early what can be begun before a step. Raises
    UsageError for names that the step does not give.
    """
    told = _Told(fetch_list, fetch_info, print_period)
    after = _trained if torch.is_grad_enabled() else _alive
    batches = examples = 0
    given: Numbers = {}
    began = time.monotonic()
    for batch in dataset if prefetch is None else prefetch(dataset):
        given = _by_name(step(batch))
        batches += 1
        examples += len(batch)
        after(given, len(batch))
        told.after(batches, given)
    skipped = int(getattr(dataset, "skipped_lines", 0))
    fetches = {
        name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in given.items()
    }
    return Result(batches, examples, time.monotonic() - began, skipped, fetches)


@cache
def _steps() -> progress.Counter:
    """Not before a loop trains: without a counter the steps of torch's optimizers count."""
    return progress.Counter()


def _trained(given: Numbers, examples: int) -> None:
    """The report of a step to the launcher."""
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


class _Told:
    """What is printed, and when."""

    def __init__(self, names: Sequence[str], labels: Sequence[str], period: int) -> None:
        if period < 1:
            raise UsageError(f"print_period is {period}; it must be at least 1")
        if isinstance(names, str) or isinstance(labels, str):
            raise UsageError(f"fetch_list and fetch_info are lists of names, not {names!r} and {labels!r}")
        if labels and len(labels) != len(names):
            raise UsageError(
                f"fetch_info has {len(labels)} names and fetch_list {len(names)}; they belong together"
            )
        self._labels = dict(zip(names, labels or names, strict=True))
        self._period = period

    def after(self, batches: int, given: Numbers) -> None:
        if not self._labels or batches % self._period:
            return
        missing = [name for name in self._labels if name not in given]
        if missing:
            raise UsageError(f"fetch_list has {missing[0]!r}; the step gave {', '.join(given) or 'nothing'}")
        values = "".join(f", {label}{_shown(given[name])}" for name, label in self._labels.items())
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        sys.stdout.write(f"time: [{stamp}], batch: [{batches}]{values}\n")
        sys.stdout.flush()


def _shown(value: Number) -> str:
    """`[count]:[v1,v2]`."""
    flat = torch.as_tensor(value).detach().reshape(-1).tolist()
    return f"[{len(flat)}]:[{','.join(f'{number:.6g}' for number in flat)}]"


# ---- Ahead: some batches ahead of the one that is trained. Knows iterators; what is prepared is its
# caller's.

AnyBatch = TypeVar("AnyBatch")


@runtime_checkable
class Arriving(Protocol):
    """An iterator over batches that counts those whose turn it was, and may have to wait for the next."""

    @property
    def at_hand(self) -> bool:
        """Whether the next batch is there."""

    def draw(self) -> Any:
        """The next batch, before its turn. Raises StopIteration."""

    def give(self, batch: Any) -> None:
        """It is the turn of a batch that was drawn."""


def prefetched(
    batches: Iterable[AnyBatch], prepare: Callable[[AnyBatch], object], ahead: int = 1
) -> Iterator[AnyBatch]:
    """Yield the same batches. Each but the first is prepared before the batch `ahead` places before it is
    yielded. An error is raised when the batches before it have been yielded.
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
