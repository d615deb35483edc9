"""Embedding bags over the rows of servers against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from trainers.ps.client import Client, Request
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.trainer.embedding import ServedEmbedding
from trainers.ps.trainer.group import TableGroup
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.wire import Field, Kind, Message, Part

ROWS, DIM, SERVERS = 12, 3, 3
MEAN = {"mode": "mean"}
PADDED = {"padding_idx": 4}


class Answers:
    """Servers of one table, whose rows are those of a weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def send(self, requests: Sequence[Request]) -> Sequence[Request]:
        return requests

    def wait(self, requests: Sequence[Request]) -> list[Message]:
        return [
            Message(kind=Kind.DATA, parts=(Part(0, Field.ROWS, self.weight[each.parts[-1].data]),))
            for each in requests
        ]


class Twins:
    """A bag of torch's and a served one with the same rows."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.own = torch.nn.EmbeddingBag(ROWS, DIM, **{"mode": "sum", **options})
        self.served = torch.nn.EmbeddingBag(ROWS, DIM, sparse=True, **{"mode": "sum", **options})
        spec = TableSpec(kind=TableKind.SPARSE, name="bag", size=DIM, rule=SGD())
        sparse: Any = SparseParameter(
            name="bag",
            module=self.served,
            group={"lr": 1.0},
            own_lr=None,
            table=0,
            spec=spec,
            rule=SGD(),
        )
        client = cast(Client, Answers(self.own.weight.detach().clone()))
        self.group = TableGroup([sparse], SERVERS, client)
        ServedEmbedding("bag", self.served, self.group.tables[0], statistics=False)

    def gradient(self) -> torch.Tensor:
        """That of the served bag, as servers get it."""
        found = torch.zeros(ROWS, DIM)
        gradient = self.group.take_gradients()
        self.group.drop_gradients()
        if gradient is not None:
            assert len(gradient.keys) == len(gradient.keys.unique())
            found[gradient.keys] = gradient.rows
        return found


def loss_of(bags: torch.Tensor) -> torch.Tensor:
    return (bags * torch.arange(1.0, bags.numel() + 1).view_as(bags)).sin().sum()


FLAT = torch.tensor([1, 2, 4, 1, 4, 9, 0, 4])
IDS: dict[str, tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]] = {
    "rows": (FLAT.view(2, 4), None, {}),
    "rows of another layout": (FLAT.view(4, 2).t(), None, {}),
    "no ids": (FLAT[:0], torch.tensor([0, 0]), {}),
    "empty bags": (FLAT, torch.tensor([0, 3, 3, 7, 8]), {}),
    "last offset": (FLAT, torch.tensor([0, 2, 2, 8]), {"include_last_offset": True}),
    "int32": (FLAT.int(), torch.tensor([0, 5], dtype=torch.int32), {}),
}


@pytest.mark.parametrize("options", [{}, MEAN, PADDED, MEAN | {"padding_idx": 1}], ids=str)
@pytest.mark.parametrize("kind", IDS)
def test_sums_and_means_are_torchs(kind: str, options: dict[str, Any]) -> None:
    ids, offsets, more = IDS[kind]
    twins = Twins(**options, **more)
    found = twins.served(ids, offsets)
    wanted = twins.own(ids, offsets)
    assert type(found.grad_fn).__name__ == "_PoolBackward"
    torch.testing.assert_close(found, wanted)
    for bags in (found, wanted):
        loss_of(bags).backward()  # type: ignore[no-untyped-call]
    assert twins.own.weight.grad is not None
    torch.testing.assert_close(twins.gradient(), twins.own.weight.grad)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("options", [{}, PADDED], ids=str)
def test_weights_of_samples_are_used_and_trained(options: dict[str, Any], trained: bool) -> None:
    twins = Twins(**options)
    drawn = torch.randn(8, 2)[:, 0]  # with gaps
    weights = [drawn.clone().requires_grad_(), drawn.detach().requires_grad_()]
    for bag, weight in zip((twins.own, twins.served), weights, strict=True):
        bag.weight.requires_grad_(trained)
        loss_of(bag(FLAT, torch.tensor([0, 3, 7]), weight)).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(weights[1].grad, weights[0].grad)
    wanted = torch.zeros(ROWS, DIM) if twins.own.weight.grad is None else twins.own.weight.grad
    torch.testing.assert_close(twins.gradient(), wanted)


def test_calls_and_backward_passes_add_up() -> None:
    twins = Twins(**PADDED)
    for bag in (twins.own, twins.served):
        both = bag(FLAT.view(2, 4)) + bag(FLAT.view(4, 2))[:2]
        loss_of(both).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        both.sum().backward()
    assert twins.own.weight.grad is not None
    torch.testing.assert_close(twins.gradient(), twins.own.weight.grad)


def beyond(bag: torch.nn.EmbeddingBag) -> torch.Tensor:
    return bag(FLAT, torch.tensor([0, 9]))


def from_one(bag: torch.nn.EmbeddingBag) -> torch.Tensor:
    return bag(FLAT, torch.tensor([1, 3]))


def no_ids(bag: torch.nn.EmbeddingBag) -> torch.Tensor:
    return bag(FLAT[:0].view(3, 0))


def without_offsets(bag: torch.nn.EmbeddingBag) -> torch.Tensor:
    return bag(FLAT)


def other_weights(bag: torch.nn.EmbeddingBag) -> torch.Tensor:
    return bag(FLAT.view(2, 4), per_sample_weights=torch.ones(8))


def out_of_range(bag: torch.nn.EmbeddingBag) -> torch.Tensor:
    return bag(torch.tensor([[0, ROWS]]))


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (beyond, {}),
        (beyond, {"include_last_offset": True}),
        (from_one, {}),
        (no_ids, {}),
        (without_offsets, {}),
        (other_weights, {}),
        (out_of_range, {}),
    ],
)
def test_what_torch_refuses_is_refused(
    call: Callable[[torch.nn.EmbeddingBag], torch.Tensor], options: dict[str, Any]
) -> None:
    """Kernels would read memory that is not theirs."""
    twins = Twins(**options)
    with pytest.raises((ValueError, RuntimeError, IndexError)) as refused:
        call(twins.own)
    with pytest.raises((refused.type, IndexError)):
        call(twins.served)
