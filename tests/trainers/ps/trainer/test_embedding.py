"""Served embeddings against torch's own, with rows that live in a tensor instead of on servers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainers.errors import NotSupportedError
from trainers.ps.trainer.embedding import ServedEmbedding
from trainers.ps.trainer.modules import EmbeddingModule, SparseEmbedding, find_embeddings
from trainers.ps.trainer.remote import Lookup

MODULES: dict[str, Callable[[], EmbeddingModule]] = {
    "plain": lambda: torch.nn.Embedding(10, 3, sparse=True),
    "padding": lambda: torch.nn.Embedding(10, 3, padding_idx=4, sparse=True),
    "last_padding": lambda: torch.nn.Embedding(10, 3, padding_idx=-1, sparse=True),
    "bag_sum": lambda: torch.nn.EmbeddingBag(10, 3, mode="sum", sparse=True),
    "bag_mean": lambda: torch.nn.EmbeddingBag(10, 3, mode="mean", padding_idx=4, sparse=True),
}
BATCHES = {
    "repeated": torch.tensor([[1, 4, 1], [9, 1, 0]]),
    "one": torch.tensor([[4]]),
    "int32": torch.tensor([[2, 9]], dtype=torch.int32),
}


class LocalRows:
    """A table in this process; gradients are kept as they come."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.gradient = torch.zeros_like(weight)
        self.touched: set[int] = set()
        self.stats: dict[int, torch.Tensor] = {}

        self.anchor = torch.empty(0, requires_grad=True)

    def call(self, ids: torch.Tensor) -> None:
        """All calls are looked up."""

    def look_up(self, ids: torch.Tensor, *, insert: bool) -> tuple[Lookup, torch.Tensor]:
        keys, place, counts = torch.unique(ids.long(), return_inverse=True, return_counts=True)
        lookup = Lookup(keys, place, counts)
        return lookup, self.weight[lookup.keys]

    def pull_all(self) -> torch.Tensor:
        return self.weight.clone()

    def add_stats(self, keys: torch.Tensor, stats: torch.Tensor) -> None:
        for key, pair in zip(keys.tolist(), stats, strict=True):
            self.stats[key] = self.stats.get(key, torch.zeros(2)) + pair

    def collect(self, keys: torch.Tensor, grad: torch.Tensor) -> None:
        self.touched |= set(keys.tolist())
        self.gradient.index_add_(0, keys, grad)


def served(
    make: Callable[[], EmbeddingModule],
) -> tuple[EmbeddingModule, EmbeddingModule, LocalRows, ServedEmbedding]:
    """(torch's own, a served twin, its rows, the serving)."""
    torch.manual_seed(0)
    own = make()
    torch.manual_seed(0)
    twin = make()
    rows = LocalRows(twin.weight.detach().clone())
    return own, twin, rows, ServedEmbedding("twin", twin, rows, statistics=False)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", MODULES)
def test_values_and_gradients_are_torchs(name: str, batch: str) -> None:
    own, twin, rows, _ = served(MODULES[name])
    ids = BATCHES[batch]
    wanted, got = own(ids), twin(ids)
    assert torch.equal(wanted, got)
    factors = torch.randn_like(wanted)
    (wanted * factors).sum().backward()
    (got * factors).sum().backward()
    assert own.weight.grad is not None
    gradient = own.weight.grad.coalesce()
    assert torch.allclose(rows.gradient, gradient.to_dense(), atol=1e-6)
    if isinstance(own, torch.nn.Embedding):  # the bag's gradient in torch names the padding row, with zeros
        assert rows.touched == set(gradient.indices()[0].tolist())


def test_gradients_may_be_scaled_by_frequency() -> None:
    """Which torch itself does for dense gradients only."""
    own, twin, rows, _ = served(lambda: torch.nn.Embedding(10, 3, scale_grad_by_freq=True))
    for module in (own, twin):
        module(BATCHES["repeated"]).square().sum().backward()
    assert own.weight.grad is not None
    assert torch.allclose(rows.gradient, own.weight.grad)


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_with_offsets_and_weights(mode: str, kind: torch.dtype, last: bool, padding: int | None) -> None:
    """A bag may be empty; weights in a bag are trained. Torch itself takes no maximum of sparse weights."""
    own, twin, rows, _ = served(
        lambda: torch.nn.EmbeddingBag(
            10, 3, mode=mode, padding_idx=padding, include_last_offset=last, sparse=False
        )
    )
    ids, offsets = torch.tensor([1, 2, 4, 1, 4, 9], dtype=kind), torch.tensor([0, 3, 3, 4, *[6][: int(last)]])
    weights = [torch.tensor([0.5, 2.0, 1.0, -1.0, 3.0, 0.25], requires_grad=True) for _ in (own, twin)]
    given = weights if mode == "sum" else [None, None]
    results = []
    for module, weight in zip((own, twin), given, strict=True):
        results.append(module(ids, offsets.to(kind), weight))
        (results[-1] * torch.arange(len(results[-1]) * 3.0).view(-1, 3)).sum().backward()
    assert torch.allclose(*results)
    assert own.weight.grad is not None
    assert torch.allclose(rows.gradient, own.weight.grad)
    if mode == "sum":
        assert torch.allclose(weights[0].grad, weights[1].grad)  # type: ignore[arg-type]


def test_two_uses_and_two_backward_passes_add_up() -> None:
    own, twin, rows, _ = served(MODULES["plain"])
    for module in (own, twin):
        (module(torch.tensor([1, 2])).sum() + 2 * module(torch.tensor([2, 3])).sum()).backward()
        loss = module(torch.tensor([7])).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert own.weight.grad is not None
    assert torch.allclose(rows.gradient, own.weight.grad.to_dense())


def test_nothing_is_collected_without_gradients() -> None:
    _, twin, rows, _ = served(MODULES["plain"])
    with torch.no_grad():
        twin(torch.tensor([1]))
    twin(torch.tensor([1])).detach()
    assert rows.touched == set()


def test_an_empty_batch_is_looked_up() -> None:
    _, twin, _, _ = served(MODULES["plain"])
    assert twin(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, 3)


def test_state_dict_is_whole_while_served_and_after() -> None:
    _, twin, rows, serving = served(MODULES["plain"])
    assert twin.weight.shape == (10, 3)
    rows.weight += 1
    assert torch.equal(torch.nn.Sequential(twin).state_dict()["0.weight"], rows.weight)
    serving.end(rows.pull_all())
    assert torch.equal(twin.state_dict()["weight"], rows.weight)
    assert torch.equal(twin(torch.tensor([3])), rows.weight[3:4])
    assert "forward" not in vars(twin)


class Own(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def tied() -> torch.nn.Module:
    model = torch.nn.ModuleDict({"a": torch.nn.Embedding(4, 2, sparse=True), "b": torch.nn.Linear(2, 4)})
    model["b"].weight = model["a"].weight
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (torch.nn.Sequential(torch.nn.Embedding(4, 2, max_norm=1.0, sparse=True)), "max_norm"),
        (torch.nn.Sequential(Own(4, 2, sparse=True)), "its own forward"),
        (torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True, dtype=torch.float64)), "float32"),
        (tied(), "shares its weight with a, b"),
    ],
)
def test_an_embedding_that_cannot_be_served_is_named(model: torch.nn.Module, words: str) -> None:
    with pytest.raises(NotSupportedError, match=words):
        find_embeddings(model)


def test_dense_embeddings_are_left_alone() -> None:
    assert find_embeddings(torch.nn.Sequential(torch.nn.Embedding(4, 2))) == []


def test_shows_and_clicks_of_calls_with_a_gradient_are_counted_once_by_id() -> None:
    table = SparseEmbedding(2, statistics=True)
    rows = LocalRows(torch.zeros(10, 2))
    ServedEmbedding("t", table, rows, statistics=True)
    first = table(torch.tensor([[1, 2], [2, 2]]), clicks=torch.tensor([0, 1])).sum()
    first.backward(retain_graph=True)
    first.backward()
    table(torch.tensor([3, 1])).sum().backward()
    table(torch.tensor([3, 1]))
    assert {key: pair.tolist() for key, pair in rows.stats.items()} == {1: [2, 0], 2: [3, 2], 3: [1, 0]}


def test_padding_is_not_shown_so_that_it_gets_no_row() -> None:
    table = SparseEmbedding(2, statistics=True, padding_idx=2)
    rows = LocalRows(torch.zeros(10, 2))
    ServedEmbedding("t", table, rows, statistics=True)
    table(torch.tensor([[1, 2], [2, 3]]), clicks=torch.tensor([0, 1])).sum().backward()
    assert {key: pair.tolist() for key, pair in rows.stats.items()} == {1: [1, 0], 3: [1, 1]}


def test_padding_of_a_bounded_table_reads_as_zeros() -> None:
    """Its row was evicted, and would read as an initial value."""
    module = torch.nn.Embedding(10, 3, padding_idx=4, sparse=True)
    serving = ServedEmbedding("e", module, LocalRows(torch.ones(10, 3)), statistics=False, zeros=4)
    assert module(torch.tensor([4, 1])).tolist() == [[0.0] * 3, [1.0] * 3]
    serving.end(None)
