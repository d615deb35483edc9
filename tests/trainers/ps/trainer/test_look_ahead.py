"""Which batches are prepared when, over known loops. Here `called` calls the modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainers.errors import FleetError
from trainers.ps.trainer.look_ahead import Calls, LookAhead

TABLES = [torch.nn.Identity() for _ in range(3)]


class Batches(Dataset[Any]):
    """Ids of three tables as the columns of a matrix."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return {"ids": torch.full((4, 3), number), "dense": torch.zeros(4)}


class Looking:
    """What was prepared, in order: (number of the batch, how many calls, whether it was the next)."""

    def __init__(self, ahead: int = 2, *, every: bool = False) -> None:
        self.prepared: list[tuple[int, int, bool]] = []
        self.reported: list[str] = []
        self.look = LookAhead(self._prefetch, ahead, every=every, report=self.reported.append)

    def _prefetch(self, calls: Calls, now: bool) -> None:
        self.prepared.append((int(calls[0][1].flatten()[0]), len(calls), now))
        self.last = calls

    def __enter__(self) -> Looking:
        self.end = self.look.watch()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def step(self, ids: torch.Tensor) -> None:
        for table, column in zip(TABLES, ids.unbind(1), strict=True):
            self.look.called(table, column)


def test_batches_are_prepared_ahead_once_their_calls_are_known() -> None:
    with Looking(every=True) as looking:
        for batch in DataLoader(Batches(5), batch_size=None):
            looking.step(batch["ids"])
        assert looking.prepared == [(1, 3, True), (2, 3, False), (3, 3, False), (4, 3, False)]
        assert [module for module, _ in looking.last] == TABLES
        looking.prepared.clear()
        for batch in DataLoader(Batches(3), batch_size=None):
            looking.step(batch["ids"])
        assert [number for number, *_ in looking.prepared] == [0, 1, 2]
    assert "Loop" not in type(iter(DataLoader(Batches(3)))).__name__


def test_a_data_set_that_may_depend_on_the_loop_is_read_in_turn_unless_the_script_allows_more() -> None:
    """One request for all tables is made all the same."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for number in range(4):
                taken.append(number)
                yield {"ids": torch.full((4, 3), number)}

    taken: list[int] = []
    for every in (False, True):
        for data in (Batches(4), Stream()):
            with Looking(every=every) as looking:
                for number, batch in enumerate(DataLoader(data, batch_size=None)):
                    assert every or not taken or taken[-1] == number
                    looking.step(batch["ids"])
                assert looking.prepared == [(1, 3, True), (2, 3, not every), (3, 3, not every)]
                taken.clear()


def test_a_loop_whose_calls_change_is_soon_left_alone() -> None:
    """What is prepared in vain makes rows that the script has not asked for."""
    with Looking() as looking:
        for number, batch in enumerate(DataLoader(Batches(100), batch_size=None)):
            looking.look.called(TABLES[number % 2], batch["ids"])
        assert 0 < len(looking.prepared) < 20


def test_in_another_loop_the_calls_of_a_step_are_predicted_from_the_first() -> None:
    data = torch.arange(60).view(20, 3)
    with Looking() as looking:
        for start in range(0, 20, 4):  # a view of the whole data
            looking.step(data[start : start + 4])
        assert looking.prepared == [(3 * start, 3, True) for start in (4, 8, 12, 16)]
        assert [ids.tolist() for _, ids in looking.last] == data[16:].T.tolist()
        looking.prepared.clear()
        for number in range(3):
            for table in TABLES:
                looking.look.called(table, torch.full((2, 2, 2), number))
        assert looking.prepared == [], "their ids have nothing in common"


def test_what_would_be_outside_of_the_memory_of_the_first_ids_is_not_predicted() -> None:
    """A view made there would be an error, and the step has others."""
    memory = torch.arange(100)
    with Looking() as looking:
        for start in (0, 10, 60):
            looking.look.called(TABLES[0], memory[start : start + 5])
            looking.look.called(TABLES[1], memory[min(start + 50, 95) :][:5])
        assert looking.prepared == [(10, 2, True)]


def test_steps_with_parts_of_a_batch_are_not_those_of_the_batch() -> None:
    """Its rows are wanted one step after the other, and would be too old for the later ones."""
    with Looking() as looking:
        for chunk in DataLoader(Batches(3), batch_size=None):
            for row in chunk["ids"]:
                looking.step(row[None])
                looking.look.stepped()
        assert {calls for _, calls, _ in looking.prepared} == {3}
        assert len(looking.prepared) == 3 * 4 - 2, "all but the first step of each kind"


def test_a_script_that_prefetches_is_left_alone() -> None:
    with Looking(every=True) as looking:
        coming = iter(DataLoader(Batches(6), batch_size=None))
        looking.step(next(coming)["ids"])
        looking.look.active = False
        looking.prepared.clear()
        assert [int(each["ids"][0, 0]) for each in coming] == [1, 2, 3, 4, 5]
        assert looking.prepared == []


def test_an_error_of_an_item_is_raised_at_its_turn() -> None:
    class Broken(Batches):
        def __getitem__(self, number: int) -> Any:
            if number == 3:
                raise FleetError("broken")
            return super().__getitem__(number)

    with Looking(every=True) as looking:
        coming = iter(DataLoader(Broken(6), batch_size=None))
        seen = []
        for _ in range(3):
            seen.append(int((ids := next(coming)["ids"])[0, 0]))
            looking.step(ids)
        assert looking.prepared[-1] == (2, 3, False)
        with pytest.raises(FleetError, match="broken"):
            next(coming)
        seen += [int(each["ids"][0, 0]) for each in coming]
        assert seen == [0, 1, 2, 4, 5]
