"""A script must not notice that batches are read ahead: each loop here reads as it does in plain torch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.trainers.ps.trainer.test_look_ahead import Looking
from trainers.data.sampler import ElasticBatchSampler
from trainers.data.shard import ShardSampler, shard_loader
from trainers.errors import DataError, UsageError

COUNT = 12
Step = Callable[[torch.Tensor], object]
Loop = Callable[[Step], object]


def rows(count: int = COUNT) -> torch.Tensor:
    """The ids of three tables for each item."""
    return torch.arange(3 * count).view(count, 3)


class Ids(Dataset[torch.Tensor]):
    """Items that depend on what the script did before: `make` makes one from its number."""

    def __init__(self, make: Callable[[int], torch.Tensor], count: int = COUNT) -> None:
        self.make, self.count, self.reads = make, count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        self.reads += 1
        return self.make(number)


def filled(number: float) -> torch.Tensor:
    return torch.full((3,), int(number))


# ---- Loops. Each returns what it has seen.


def curriculum(step: Step) -> object:
    level = [0]
    seen = []
    for batch in DataLoader(Ids(lambda number: filled(100 * level[0] + number)), batch_size=2):
        step(batch)
        seen.append(batch.tolist())
        level[0] += 1
    return seen


def popularity_counts(step: Step) -> object:
    counts: Counter[int] = Counter()

    def make(number: int) -> torch.Tensor:
        counts[number % 3] += 1
        return filled(counts[number % 3])

    seen = []
    for batch in DataLoader(Ids(make), batch_size=2):
        step(batch)
        seen.append((batch.tolist(), dict(counts)))
        counts[0] = 0
    return seen


def hard_negatives(step: Step) -> object:
    negatives = rows()
    seen = []
    for number, batch in enumerate(DataLoader(Ids(lambda number: negatives[number].clone()), batch_size=2)):
        step(batch)
        seen.append(batch.tolist())
        negatives[(number + 1) * 2 % COUNT :] += 100
    return seen


def shared_random(step: Step) -> object:
    chance = random.Random(3)
    data = Ids(lambda number: filled(chance.randrange(100)))
    return [(step(batch), batch.tolist(), chance.random()) for batch in DataLoader(data, batch_size=2)]


def shared_generator(step: Step) -> object:
    chance = np.random.default_rng(3)
    data = Ids(lambda number: filled(chance.integers(100)))
    return [(step(batch), batch.tolist(), chance.random()) for batch in DataLoader(data, batch_size=2)]


def global_random(step: Step) -> object:
    torch.manual_seed(1)
    random.seed(1)
    data = Ids(lambda number: torch.randint(100, (3,)) + random.randrange(9))
    loader = DataLoader(data, batch_size=2)
    return [(step(batch), batch.tolist(), torch.rand(1).item(), random.random()) for batch in loader]


def reused_buffer(step: Step) -> object:
    buffer = np.zeros((2, 3), np.int64)
    shared = torch.from_numpy(buffer)

    def make(number: int) -> torch.Tensor:
        buffer[:] = number
        return shared

    return [(step(batch), batch.tolist()) for batch in DataLoader(Ids(make), batch_size=None)]


class Position(Sampler[int]):
    """Its position is saved by the script in each step."""

    def __init__(self) -> None:
        self.used = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(COUNT):
            self.used = number + 1
            yield number


def counting_sampler(step: Step) -> object:
    sampler = Position()
    loader = DataLoader(TensorDataset(rows()), batch_size=2, sampler=sampler)
    return [(step(ids), ids.tolist(), sampler.used) for (ids,) in loader]


def counting_sampler_and_workers(step: Step) -> object:
    sampler = Position()
    loader = DataLoader(
        TensorDataset(rows()), batch_size=1, sampler=sampler, num_workers=1, prefetch_factor=1
    )
    return [(step(ids), ids.tolist(), sampler.used) for (ids,) in loader]


def counting_batch_sampler(step: Step) -> object:
    sampler = Position()
    loader = DataLoader(TensorDataset(rows()), batch_sampler=BatchSampler(sampler, 2, False))
    return [(step(ids), ids.tolist(), sampler.used) for (ids,) in loader]


def counting_collate(step: Step) -> object:
    made = []

    def collate(items: Sequence[tuple[torch.Tensor]]) -> torch.Tensor:
        made.append(len(items))
        return torch.stack([ids for (ids,) in items])

    loader = DataLoader(TensorDataset(rows()), batch_size=2, collate_fn=collate)
    return [(step(ids), ids.tolist(), len(made)) for ids in loader]


def subset_random_sampler(step: Step) -> object:
    torch.manual_seed(1)
    chosen = list(range(COUNT))
    seen = []
    for (ids,) in DataLoader(TensorDataset(rows()), batch_size=2, sampler=SubsetRandomSampler(chosen)):
        step(ids)
        seen.append(ids.tolist())
        chosen.reverse()
    return seen


class CountingTensors(TensorDataset):
    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def subclass_of_a_tensor_dataset(step: Step) -> object:
    data = CountingTensors(rows())
    return [(step(ids), ids.tolist(), data.reads) for (ids,) in DataLoader(data, batch_size=2)]


class OwnLoader(DataLoader[Any]):
    """Skips the batches that the script does not want."""

    wanted = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for (ids,) in super().__iter__():
            if ids[0, 0] >= self.wanted:
                yield ids


def subclass_of_a_loader(step: Step) -> object:
    loader = OwnLoader(TensorDataset(rows()), batch_size=1)
    seen = []
    for ids in loader:
        step(ids)
        seen.append(ids.tolist())
        loader.wanted = int(ids.max()) + 4
    return seen


def left_by_break(step: Step) -> object:
    data = Ids(filled)
    seen: list[object] = []
    for _ in range(2):
        for number, batch in enumerate(DataLoader(data, batch_size=2)):
            step(batch)
            seen.append((batch.tolist(), data.reads))
            if number == 3:
                break
        seen.append(data.reads)
    return seen


def by_hand(step: Step) -> object:
    data = Ids(filled)
    coming = iter(DataLoader(data, batch_size=2))
    seen: list[object] = []
    for batch in islice(coming, 3):
        step(batch)
        seen.append((batch.tolist(), data.reads))
    while (batch := next(coming, None)) is not None:
        step(batch)
        seen.append((batch.tolist(), data.reads))
    return [*seen, next(coming, None), data.reads]


def zipped(step: Step) -> object:
    first, second = Ids(filled), Ids(filled)
    pairs = zip(DataLoader(first, batch_size=2), DataLoader(second, batch_size=2), strict=True)
    return [(step(left), left.tolist(), right.tolist(), first.reads, second.reads) for left, right in pairs]


def an_error_of_an_item(step: Step) -> object:
    def make(number: int) -> torch.Tensor:
        if number == 5:
            raise DataError("item 5 is broken")
        return filled(number)

    coming = iter(DataLoader(Ids(make), batch_size=1))
    seen: list[object] = []
    for _ in range(COUNT):
        try:
            batch = next(coming)
            step(batch)
            seen.append(batch.tolist())
        except DataError as error:
            seen.append(str(error))
    return seen


class Flow(IterableDataset[torch.Tensor]):
    at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(COUNT):
            self.at = number
            yield filled(number)


def iterable(step: Step) -> object:
    data = Flow()
    return [(step(batch), batch.tolist(), data.at) for batch in DataLoader(data, batch_size=2)]


class More(IterableDataset[torch.Tensor]):
    """An iterator that goes on after its end."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> torch.Tensor:
        self.at += 1
        if self.at % 4 == 0:
            raise StopIteration
        return filled(self.at)


def goes_on_after_its_end(step: Step) -> object:
    coming = iter(DataLoader(More(), batch_size=None))
    return [[(step(batch[None]), batch.tolist()) for batch in coming] for _ in range(3)]


def changed_tensors(step: Step) -> object:
    """Only later, when batches have already been read ahead, and not all of them."""
    ids = rows()
    seen = []
    for number, (batch,) in enumerate(DataLoader(TensorDataset(ids), batch_size=2)):
        step(batch)
        seen.append(batch.tolist())
        if number >= 2:
            ids[2 * number + 3 :] += 100
    return seen


def tensors_changed_by_numpy(step: Step) -> object:
    ids = rows().numpy()
    seen = []
    for batch, weights in DataLoader(TensorDataset(torch.from_numpy(ids), torch.ones(COUNT)), batch_size=2):
        step(batch)
        seen.append((batch.tolist(), weights.tolist()))
        ids += 100
    return seen


def other_tensors(step: Step) -> object:
    data = TensorDataset(rows())
    seen = []
    for number, (batch, *_) in enumerate(DataLoader(data, batch_size=2)):
        step(batch)
        seen.append(batch.tolist())
        if number == 2:
            data.tensors = (rows() + 100, torch.ones(COUNT))
        if number == 3:
            data.tensors = (rows().int(),)
    return seen


def items_without_a_batch(step: Step) -> object:
    """They are views of the data."""
    ids = rows(2 * COUNT).view(-1, 2, 3).numpy()
    seen = []
    for (batch,) in DataLoader(TensorDataset(torch.from_numpy(ids)), batch_size=None):
        step(batch)
        batch[0, 0] = -1
        seen.append((batch.tolist(), ids.tolist()))
        ids += 100
    return seen


def other_indices(step: Step) -> object:
    data = Subset(Subset(TensorDataset(rows(20)), range(20)), list(range(COUNT)))
    seen = []
    for number, (batch,) in enumerate(DataLoader(data, batch_size=2)):
        step(batch)
        seen.append(batch.tolist())
        if number == 2:
            data.indices = [each + 5 for each in data.indices]
    return seen


class Lazy(Sequence[int]):
    """Indices that depend on how often one was asked for."""

    asked = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: Any) -> Any:
        self.asked += 1
        return (number + self.asked) % COUNT


def own_indices(step: Step) -> object:
    indices = Lazy()
    data = Subset(TensorDataset(rows()), indices)
    return [(step(ids), ids.tolist(), indices.asked) for (ids,) in DataLoader(data, batch_size=2)]


def too_few_tensors(step: Step) -> object:
    data = TensorDataset(rows())
    coming = iter(DataLoader(data, batch_size=2))
    seen: list[object] = []
    for number in range(COUNT // 2):
        try:
            (batch,) = next(coming)
            step(batch)
            seen.append(batch.tolist())
        except IndexError:
            seen.append("IndexError")
        if number in (2, 4):
            data.tensors = (rows(6) if number == 2 else rows(),)
    return seen


def shared_order(step: Step, *, replacement: bool = False, samples: int | None = None) -> object:
    """The script draws from the generator of the order, and leaves the loop."""
    chance = torch.Generator().manual_seed(5)
    data = TensorDataset(rows(40))
    order = RandomSampler(data, replacement=replacement, num_samples=samples, generator=chance)
    loader = DataLoader(data, batch_size=3, sampler=order)
    seen: list[object] = []
    for leave_at in (5, 11, 12, 99):
        for number, (ids,) in enumerate(loader):
            step(ids)
            seen.append((ids.tolist(), torch.rand(1, generator=chance).item()))
            if number == leave_at:
                break
        seen.append(torch.rand(1, generator=chance).item())
    return seen


def inference_mode(step: Step) -> object:
    seen = []
    coming = iter(DataLoader(TensorDataset(rows(), torch.ones(COUNT)), batch_size=2))
    for number in range(COUNT // 2):
        with torch.inference_mode(number < 3):
            ids, weights = next(coming)
        step(ids)
        seen.append((ids.tolist(), weights.is_inference()))
    return seen


def loops_over_one_iterator_of_workers(step: Step) -> object:
    """With persistent workers, another loop begins the iterator again."""
    loader = DataLoader(TensorDataset(rows()), batch_size=1, num_workers=1, persistent_workers=True)
    first = iter(loader)
    seen: list[object] = []
    for (ids,) in islice(first, 5):
        step(ids)
    second = iter(loader)
    seen.append(first is second)
    seen += [(step(ids), ids.tolist()) for (ids,) in islice(second, 2)]
    return seen + [(step(ids), ids.tolist()) for (ids,) in first]


LOOPS: list[Loop] = [
    curriculum,
    popularity_counts,
    hard_negatives,
    shared_random,
    shared_generator,
    global_random,
    reused_buffer,
    counting_sampler,
    counting_sampler_and_workers,
    counting_batch_sampler,
    counting_collate,
    subset_random_sampler,
    subclass_of_a_tensor_dataset,
    subclass_of_a_loader,
    left_by_break,
    by_hand,
    zipped,
    an_error_of_an_item,
    iterable,
    goes_on_after_its_end,
    changed_tensors,
    tensors_changed_by_numpy,
    other_tensors,
    items_without_a_batch,
    other_indices,
    own_indices,
    too_few_tensors,
    inference_mode,
    loops_over_one_iterator_of_workers,
]


def alike(loop: Loop) -> None:
    plain = loop(lambda ids: None)
    with Looking() as looking:
        assert loop(looking.step) == plain


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_reads_as_in_plain_torch(loop: Loop) -> None:
    alike(loop)


@pytest.mark.parametrize("options", [{}, {"replacement": True}, {"samples": 100}, {"samples": 35}], ids=str)
def test_an_order_from_the_generator_of_the_script(options: dict[str, Any]) -> None:
    alike(lambda step: shared_order(step, **options))


# ---- Loops that are read ahead


def tensors() -> TensorDataset:
    return TensorDataset(rows(), torch.ones(COUNT))


def part() -> Subset[Any]:
    return Subset(Subset(tensors(), torch.arange(COUNT)), np.arange(1, COUNT))


def early(loader: Any) -> list[int]:
    """The first ids of the batches that were prepared before their turns, in their order."""
    with Looking() as looking:
        for batch in loader:
            looking.step(batch[0])
        assert looking.reported == []
    return [number for number, _, now in looking.prepared if not now]


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(tensors(), batch_size=2),
        lambda: DataLoader(tensors(), batch_size=2, pin_memory=torch.cuda.is_available()),
        lambda: DataLoader(part(), batch_size=2),
        lambda: DataLoader(
            tensors(), batch_size=None, sampler=BatchSampler(SequentialSampler(range(COUNT)), 2, False)
        ),
        lambda: DataLoader(tensors(), batch_sampler=BatchSampler(SequentialSampler(range(COUNT)), 2, True)),
        lambda: DataLoader(tensors(), batch_size=2, sampler=ShardSampler(COUNT, 0, 1, shuffle=False)),
        lambda: shard_loader(tensors(), 2, rank=0, trainers=1, shuffle=False),
        lambda: DataLoader(
            tensors(),
            batch_sampler=ElasticBatchSampler(COUNT, 2, rank=0, trainers=1, shuffle=False),
        ),
        lambda: DataLoader(
            tensors(),
            batch_size=2,
            sampler=DistributedSampler(tensors(), num_replicas=1, rank=0, shuffle=False),
        ),
        lambda: DataLoader(
            Ids(filled), batch_size=2, collate_fn=lambda items: [torch.stack(items)], num_workers=1
        ),
    ],
)
def test_loops_in_which_nobody_can_notice_it_are_read_ahead(loader: Callable[[], Any]) -> None:
    found = early(loader())
    step = found[1] - found[0]
    assert len(found) == 3, "of six batches all but the first two and the last"
    assert found == [found[0] + each * step for each in range(3)]


@pytest.mark.parametrize(
    "order",
    [
        lambda data: {"shuffle": True},
        lambda data: {"shuffle": True, "generator": torch.Generator()},
        lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=COUNT)},
        lambda data: {"sampler": RandomSampler(data, num_samples=COUNT)},
        lambda data: {"sampler": WeightedRandomSampler([1.0] * COUNT, COUNT)},
    ],
)
def test_random_orders_that_are_drawn_at_once_are_read_ahead(order: Callable[[Any], dict[str, Any]]) -> None:
    data = tensors()
    assert len(early(DataLoader(data, batch_size=2, **order(data)))) == 3


# ---- What the job prints about others


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda: DataLoader(Ids(filled), batch_size=2), "dataset Ids"),
        (lambda: DataLoader(Flow(), batch_size=2), "dataset Flow"),
        (lambda: DataLoader(TensorDataset(rows()), sampler=Position(), batch_size=2), "sampler Position"),
        (lambda: DataLoader(TensorDataset(rows()), collate_fn=stacked, batch_size=2), "collate_fn stacked"),
        (
            lambda: DataLoader(TensorDataset(rows(2 * COUNT).view(-1, 2, 3)), batch_size=None),
            "batch_size=None",
        ),
        (lambda: OwnLoader(TensorDataset(rows()), batch_size=2), "class OwnLoader"),
    ],
)
def test_a_loop_that_could_be_read_ahead_is_reported_once(loader: Callable[[], Any], reason: str) -> None:
    with Looking() as looking:
        for _ in range(2):
            for batch in loader():
                looking.step(batch if isinstance(batch, torch.Tensor) else batch[0])
        (line,) = looking.reported
        assert f"the loop has the {reason}." in line
        assert '"read_ahead": True' in line
        assert all(now for *_, now in looking.prepared)


def stacked(items: Sequence[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([ids for (ids,) in items])


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_loop_that_would_gain_nothing_is_not_reported(ahead: int) -> None:
    with Looking(ahead) as looking:
        for batch in DataLoader(Ids(filled), batch_size=2):
            if ahead:
                looking.step(batch + 0)  # ids that are not in the batch
            else:
                looking.step(batch)
        assert looking.reported == []


def test_a_change_of_the_batch_size_in_the_loop_is_refused() -> None:
    """The next batches have the former size already."""
    order = BatchSampler(SequentialSampler(range(COUNT)), 2, False)
    with Looking() as looking:
        coming = iter(DataLoader(tensors(), batch_sampler=order))
        for ids, _ in islice(coming, 2):
            looking.step(ids)
        order.batch_size = 4
        with pytest.raises(UsageError, match="changed from 2 to 4"):
            next(coming)


def test_data_that_change_in_the_loop_are_read_ahead_no_more() -> None:
    ids = rows(20)
    with Looking() as looking:
        for number, (batch,) in enumerate(DataLoader(TensorDataset(ids), batch_size=2)):
            looking.step(batch)
            if number == 3:
                ids += 1
        assert looking.prepared == [
            *[(6, 3, True), (12, 3, False), (18, 3, False), (24, 3, False), (30, 3, False)],
            *[(25, 3, True), (31, 3, True), (37, 3, True), (43, 3, True), (49, 3, True), (55, 3, True)],
        ]
