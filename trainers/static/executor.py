"""Feed a program and fetch its values, with devices, numpy and data sets.

The program makes the step, and `data.loop` prints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from fleetrun.aliases import Fields
from trainers import progress
from trainers.collective.data_parallel import DataParallel
from trainers.collective.group import in_step
from trainers.collective.sharding import Sharded
from trainers.data import loop
from trainers.data.slots import Bag, Batch
from trainers.errors import UsageError
from trainers.static.program import Data, Fed, Program, Values

Feed = Fields | Sequence[object]
"""Values by the names of the feeds, or in the order of the program's feeds, as from a DataLoader."""
Feeds = Mapping[str, Fed]
Prefetch = Callable[[Iterable[Feeds]], Iterable[Feeds]]
"""Yields the same feeds in the same order, and looks ahead."""


class Executor:
    """Runs programs on a torch device or its name, by default on the device of the program's model."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)

    def run(
        self,
        program: Program,
        feed: Feed = (),
        fetch_list: Sequence[str] = (),
        *,
        return_numpy: bool = True,
    ) -> list[Any]:
        """Run one step of the program, and return the values of `fetch_list` in order.

        The values are numpy arrays, or tensors on the device with `return_numpy=False`. bfloat16, which numpy
        lacks, becomes float32. In a job of several trainers, each one feeds its own examples and fetches its
        own values.

        Raises UsageError for feeds that differ from their declaration, before training. Also raises it for
        names that the network does not return.
        """
        if isinstance(fetch_list, str):
            raise UsageError(f"fetch_list is {fetch_list!r}; it must be a list of names")
        device = self._place(program)
        given = _by_name(program.feeds, feed)
        moved = {each.name: _moved(each.checked(given[each.name]), device) for each in program.feeds}
        if program.optimizer is not None:
            progress.meter.seen(_examples(moved))
        values = program.step(moved, fetch_list)
        fetched = [torch.as_tensor(values[name]).detach() for name in fetch_list]
        return [_array(each) for each in fetched] if return_numpy else fetched

    def train_from_dataset(
        self,
        program: Program,
        dataset: Iterable[Batch],
        *,
        prefetch: Prefetch | None = None,
        **printing: Unpack[loop.Printing],
    ) -> loop.Result:
        """Make one pass over a data set, with a step of the program for each batch.

        Each feed takes the slots of its name. For printing, see `trainers.data.loop.train_from_dataset`.
        `prefetch` receives the feeds of batches before their step. With parameter servers, use `lambda feeds:
        fleet.prefetch(feeds, lambda feed: feed["ids"])`. Raises UsageError for a program without an
        optimizer, and as `run` does.
        """
        if isinstance(program, Program) and program.optimizer is None:
            raise UsageError(
                f"train_from_dataset() was given a program for tests: {program}. Use infer_from_dataset()."
            )
        feeding = _Feeding(program, self._place(program), prefetch, printing.get("fetch_list", ()))
        ahead = feeding.ahead
        if isinstance(program.model, (DataParallel, Sharded)):
            ahead = lambda batches: in_step(feeding.ahead(batches))  # noqa: E731
        return loop.train_from_dataset(feeding.step, dataset, prefetch=ahead, **printing)

    def infer_from_dataset(
        self,
        program: Program,
        dataset: Iterable[Batch],
        *,
        prefetch: Prefetch | None = None,
        **printing: Unpack[loop.Printing],
    ) -> loop.Result:
        """Make one pass in evaluation mode, without training, with `program.clone(for_test=True)`."""
        device = self._place(program)
        feeding = _Feeding(program.clone(for_test=True), device, prefetch, printing.get("fetch_list", ()))
        with torch.no_grad():
            return loop.train_from_dataset(feeding.step, dataset, prefetch=feeding.ahead, **printing)

    def _place(self, program: Program) -> torch.device:
        """Return the device of the feeds. Raises UsageError if the model is on another device."""
        if not isinstance(program, Program):
            raise UsageError(f"The executor was given {program!r} to run. Pass a static.Program(...).")
        first = next((each for each in program.model.parameters() if not each.is_meta), None)
        if first is None or self._device is None:
            return self._device or (torch.device("cpu") if first is None else first.device)
        if first.device.type != self._device.type or self._device.index not in (None, first.device.index):
            raise UsageError(
                f"The program's model is on {first.device}, but the executor is on {self._device}. Call "
                f'model.to("{self._device}") before fleet.distributed_model().'
            )
        return first.device


class _Feeding:
    """A data set's batches as feeds of a program, made ahead on request."""

    def __init__(
        self, program: Program, device: torch.device, prefetch: Prefetch | None, fetch_list: Sequence[str]
    ) -> None:
        self._program = program
        self._device = device
        self._prefetch: Prefetch = prefetch or iter
        self._fetch_list = fetch_list
        self._feeds: Feeds = {}

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches. The feeds of the yielded batch are ready for `step`."""
        coming: deque[Batch] = deque()

        def feeds() -> Iterator[Feeds]:
            for batch in batches:
                made = self._made(batch)
                coming.append(batch)
                yield made

        for made in self._prefetch(feeds()):
            self._feeds = made
            yield coming.popleft()

    def step(self, batch: Batch) -> Values:
        return self._program.step(self._feeds, self._fetch_list)

    def _made(self, batch: Batch) -> Feeds:
        if not isinstance(batch, Batch):
            raise UsageError(
                "A data set returns trainers.data.slots.Batch, but this one returned a "
                f"{type(batch).__name__}. Loop over it with exe.run(program, feed=...)."
            )
        return {feed.name: _moved(feed.of(batch), self._device) for feed in self._program.feeds}


def _examples(moved: Feeds) -> int:
    """Return the number of examples in the first feed."""
    first = next(iter(moved.values()), None)
    if isinstance(first, Bag):
        return len(first.offsets) - 1
    return len(first) if first is not None and first.dim() else 1


def _by_name(feeds: Sequence[Data], feed: Feed) -> Fields:
    """Return the feeds by name. Raises UsageError unless they are exactly the declared ones."""
    names = [each.name for each in feeds]
    if isinstance(feed, Mapping):
        missing = [name for name in names if name not in feed]
        unknown = [name for name in feed if name not in names]
        if missing or unknown:
            wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(map(str, unknown))}"
            raise UsageError(f"feed {wrong}. The program's feeds are {', '.join(names) or 'none'}.")
        return feed
    if not isinstance(feed, list | tuple) or len(feed) != len(names):
        count = f"{len(feed)} values" if isinstance(feed, list | tuple) else f"a {type(feed).__name__}"
        raise UsageError(
            f"feed is {count}. Pass a dict, or a list in the order of the program's feeds: "
            f"{', '.join(names) or 'none'}."
        )
    return dict(zip(names, feed, strict=True))


def _moved(fed: Fed, device: torch.device) -> Fed:
    if isinstance(fed, Bag):
        return Bag(fed.values.to(device), fed.offsets.to(device))
    # This matters only for pinned memory. On the way to the CPU, the call would not wait for the values.
    return fed.to(device, non_blocking=device.type == "cuda")


def _array(tensor: Tensor) -> object:
    """Return an array with its own memory, because the next step may change the fetched tensor."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy(force=True).copy()
