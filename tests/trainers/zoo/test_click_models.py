"""The click models: their formulas, and that they learn in one process."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.folded import FoldedEmbedding
from trainers.data.clicks import SLOTS, ClickModel
from trainers.metrics import auc
from trainers.zoo.click_models import WideDeep, linear


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Layers this small gain nothing from threads, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(dim: int = 5) -> WideDeep:
    torch.manual_seed(0)
    return WideDeep(FoldedEmbedding(5000, dim), dim, hidden=(32, 16))


@pytest.mark.slow
def test_learns_without_servers():
    truth = ClickModel(vocabularies=(40,) * SLOTS, signal=0.6)
    train, test = truth.draw(8000, 0), truth.draw(4000, 1)
    model = small()
    dense = [p for n, p in model.named_parameters() if not n.startswith("embedding.")]
    optimizers = [
        torch.optim.Adam(dense, lr=3e-3),
        torch.optim.SparseAdam(list(model.embedding.parameters()), lr=5e-3),
    ]
    for _ in range(3):
        for ids, numbers, labels in zip(*(each.split(200) for each in train.tensors()), strict=True):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, numbers), labels)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    ids, numbers, labels = test.tensors()
    with torch.no_grad():
        reached = auc(model(ids, numbers), labels)
    assert test.best().auc - 0.05 < reached <= test.best().auc + 0.005


def test_wide_deep_is_the_sum_of_its_parts():
    model = small()
    ids, dense, _ = ClickModel(vocabularies=(9,) * SLOTS).draw(3, 0).tensors()
    rows = torch.stack([model.embedding(ids[:, slot]) for slot in range(SLOTS)], dim=1)
    expected = model.wide(dense) + model.deep(torch.cat([rows.reshape(3, -1), dense], dim=1))
    assert torch.allclose(model(ids, dense), expected[:, 0])
    assert model(ids, dense).shape == (3,)


def test_a_folded_embedding_takes_any_id_and_reads_zero_for_none():
    table = FoldedEmbedding(10, 4)
    ids = torch.tensor([[0, 1, 9], [2**63 - 1, -5, 18]])
    rows = table(ids)
    assert rows.shape == (2, 3, 4)
    assert torch.equal(rows[0, 0], torch.zeros(4))
    assert torch.equal(rows[0, 2], rows[1, 2]), "9 and 18 share a row"
    assert bool((rows.reshape(6, 4)[1:] != 0).all()), "no id but 0 reads as zeros"
    rows.sum().backward()
    assert table.table.weight.grad.is_sparse
    assert not table.table.weight.grad.to_dense()[0].any(), "nor is it trained"


def test_initial_weights_have_the_documented_spread():
    torch.manual_seed(0)
    layer = linear(400, 1000)
    assert float(layer.weight.detach().std()) == pytest.approx(1 / 20, rel=0.02)
    assert not layer.bias.any()
