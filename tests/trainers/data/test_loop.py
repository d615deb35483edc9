"""The loop: a step for each batch, lines as Paddle prints them, one batch ahead for who wants it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainers.data.dataset import QueueDataset
from trainers.data.loop import prefetched, train_from_dataset
from trainers.data.slots import Batch, Slot
from trainers.errors import UsageError


@pytest.fixture
def dataset(tmp_path: Path) -> QueueDataset:
    (tmp_path / "part-0").write_text("".join(f"1 {i} 1 {i % 2}\n" for i in range(10)) + "x\n")
    made = QueueDataset()
    made.init(use_var=[Slot("x", "float32"), Slot("label")], batch_size=3, max_bad_lines=1)
    made.set_filelist([tmp_path / "part-0"])
    return made


def test_training_lowers_the_loss_and_says_so(
    dataset: QueueDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step(batch: Batch) -> torch.Tensor:
        loss = (model(batch.tensor("x")) - 2 * batch.tensor("x")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    before = float((model.weight.detach() - 2).abs())
    result = train_from_dataset(step, dataset, fetch_list=["loss"], fetch_info=["mse"], print_period=2)
    assert (result.batches, result.examples, result.skipped_lines) == (4, 10, 1)
    assert result.seconds > 0
    assert float((model.weight.detach() - 2).abs()) < before
    stamp = r"time: \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\], "
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(stamp + r"batch: \[2\], mse\[1\]:\[[0-9.e+-]+\]", lines[0])
    assert re.fullmatch(stamp + rf"batch: \[4\], mse\[1\]:\[{float(result.fetches['loss']):.6g}\]", lines[1])


def test_several_values_are_printed_in_the_order_asked_for(
    dataset: QueueDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    train_from_dataset(
        lambda batch: {"a": 1, "b": torch.tensor([0.5, 2.0]), "c": batch.dense},
        dataset,
        fetch_list=["b", "a"],
        print_period=4,
    )
    assert capsys.readouterr().out.endswith("batch: [4], b[2]:[0.5,2], a[1]:[1]\n")


def test_nothing_is_printed_unless_asked_for(
    dataset: QueueDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_from_dataset(lambda batch: None, dataset, print_period=1).fetches == {}
    assert capsys.readouterr().out == ""


def test_batches_are_prefetched_before_the_step_of_the_one_before(dataset: QueueDataset) -> None:
    seen: list[tuple[str, int]] = []

    def first(batch: Batch) -> int:
        return int(batch.dense[0, 0])

    train_from_dataset(
        lambda batch: seen.append(("step", first(batch))),
        dataset,
        prefetch=lambda batches: prefetched(batches, lambda batch: seen.append(("ahead", first(batch)))),
    )
    wanted = [("ahead", 3), ("step", 0), ("ahead", 6), ("step", 3), ("ahead", 9), ("step", 6), ("step", 9)]
    assert seen == wanted


def test_inference_has_no_gradients(dataset: QueueDataset) -> None:
    model = torch.nn.Linear(1, 1)
    seen = []
    with torch.no_grad():
        result = train_from_dataset(lambda batch: seen.append(model(batch.tensor("x"))), dataset)
    assert result.examples == 10
    assert not any(output.requires_grad for output in seen)
    assert torch.is_grad_enabled()


def test_an_error_of_the_step_closes_the_data_set(dataset: QueueDataset) -> None:
    def step(batch: Batch) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_from_dataset(step, dataset, prefetch=lambda batches: prefetched(batches, lambda batch: None))
    assert sum(len(batch) for batch in dataset) == 10, "another pass can begin"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fetch_list": ["auc"]}, "fetch_list has 'auc', but the step returned loss"),
        ({"fetch_list": ["loss"], "fetch_info": ["a", "b"]}, "fetch_info has 2 names, but fetch_list has 1"),
        ({"fetch_list": "loss"}, "lists of names"),
        ({"print_period": 0}, "print_period is 0"),
    ],
)
def test_what_cannot_be_printed(dataset: QueueDataset, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        train_from_dataset(lambda batch: 1.0, dataset, **{"print_period": 1, **settings})  # type: ignore[arg-type]


def said(batches: str, ahead: int) -> list[str]:
    told: list[str] = []
    given = prefetched(iter(batches), lambda batch: told.append(f"prepare {batch}"), ahead)
    told.extend(f"train {batch}" for batch in given)
    return told


def test_an_error_of_a_batch_is_raised_when_the_batches_before_it_were_trained() -> None:
    def batches() -> Iterator[int]:
        yield from (1, 2)
        raise ZeroDivisionError

    coming = prefetched(batches(), lambda batch: None, ahead=2)
    assert [next(coming), next(coming)] == [1, 2]
    with pytest.raises(ZeroDivisionError):
        next(coming)


def test_the_next_batch_is_prepared_before_the_current_one_is_given() -> None:
    assert said("abc", 1) == ["prepare b", "train a", "prepare c", "train b", "train c"]


def test_two_batches_ahead() -> None:
    wanted = ["prepare b", "prepare c", "train a", "prepare d", "train b", "train c", "train d"]
    assert said("abcd", 2) == wanted
    assert said("ab", 2) == ["prepare b", "train a", "train b"]


@pytest.mark.parametrize("ahead", [1, 2])
def test_no_batches_and_one_batch(ahead: int) -> None:
    assert said("", ahead) == []
    assert said("a", ahead) == ["train a"]
