"""Metrics against their definitions, and summed over parts."""

import math

import pytest
import torch

from trainers.errors import UsageError
from trainers.metrics import Accuracy, Auc, LogLoss, Mae, Metric, Mse, Rmse, auc, log_loss, topk_accuracy

P = torch.tensor([0.9, 0.8, 0.3, 0.3, 0.6])
Y = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])

EXPECTED = {
    # pairs in order: 0.9 before all three; 0.3 ties with one and loses to two: 3.5 of 6
    "Auc": (Auc, 3.5 / 6),
    "Accuracy": (Accuracy, 2 / 5),
    "Mae": (Mae, (0.1 + 0.8 + 0.3 + 0.7 + 0.6) / 5),
    "Mse": (Mse, (0.01 + 0.64 + 0.09 + 0.49 + 0.36) / 5),
    "Rmse": (Rmse, math.sqrt((0.01 + 0.64 + 0.09 + 0.49 + 0.36) / 5)),
    "LogLoss": (LogLoss, -math.log(0.9 * 0.2 * 0.7 * 0.3 * 0.4) / 5),
}
KINDS = [kind for kind, _ in EXPECTED.values()]


def examples(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.rand(rows, generator=generator)
    return truth, (torch.rand(rows, generator=generator) < truth).float()


@pytest.mark.parametrize("name", EXPECTED)
def test_by_hand(name: str):
    kind, expected = EXPECTED[name]
    metric = kind()
    metric.update(P, Y)
    assert metric.value() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_merge_into_the_whole(kind: type[Metric]):
    p, y = examples(1000)
    whole, left, right, summed = kind(), kind(), kind(), kind()
    whole.update(p, y)
    left.update(p[:300].reshape(30, 10), y[:300].reshape(30, 10))  # any shape
    left.update(p[300:301], y[300:301])
    right.update(p[301:].double(), y[301:].long())  # any type
    summed.state = left.state + right.state  # what an all-reduce gives
    left.merge(right)
    assert left.value() == pytest.approx(whole.value(), rel=1e-9)
    assert summed.value() == left.value()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_gives_nan(kind: type[Metric]):
    metric = kind()
    assert math.isnan(metric.value())
    metric.update(torch.empty(0), torch.empty(0))
    assert math.isnan(metric.value())
    metric.update(P, Y)
    metric.reset()
    assert math.isnan(metric.value())


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_used_is_refused(kind: type[Metric]):
    metric = kind()
    with pytest.raises(UsageError, match="5 predictions and 4 labels"):
        metric.update(P, Y[:4])
    with pytest.raises(UsageError, match="1 of 5 predictions that are not finite"):
        metric.update(torch.cat([P[:4], torch.tensor([math.nan])]), Y)
    other = Mae() if kind is not Mae else Rmse()
    with pytest.raises(UsageError, match="cannot merge"):
        metric.merge(other)
    assert math.isnan(metric.value())


def pairs_in_order(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The definition: every pair of a click and another example."""
    clicks, others = scores[labels == 1][:, None], scores[labels == 0][None, :]
    return float(((clicks > others).double() + (clicks == others).double() / 2).mean())


@pytest.mark.parametrize("digits", [1, 2, 7])
def test_exact_auc_is_its_definition(digits: int):
    p, y = examples(500, seed=digits)
    scores = (p * 10**digits).floor() - 3  # many ties with few digits; any scale
    assert auc(scores, y) == pytest.approx(pairs_in_order(scores, y), abs=1e-12)
    assert auc(-scores, y) == pytest.approx(1 - pairs_in_order(scores, y), abs=1e-12)


def test_auc_needs_both_labels():
    assert math.isnan(auc(P, torch.ones(5)))
    assert math.isnan(auc(P, torch.zeros(5)))
    assert math.isnan(auc(P[:0], Y[:0]))
    assert auc(P, Y.new_tensor([1, 1, 0, 0, 0])) == 1.0


def test_bucketed_auc_is_close_to_the_exact_one_and_closer_with_more_buckets():
    p, y = examples(20_000)
    errors = []
    for buckets in (4, 64, 4096):
        metric = Auc(buckets)
        metric.update(p, y)
        errors.append(abs(metric.value() - auc(p, y)))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-4


def test_auc_takes_the_ends_and_nothing_beyond():
    metric = Auc(4)
    metric.update(torch.tensor([0.0, 0.25, 0.5, 1.0]), torch.tensor([0.0, 0.0, 0.0, 1.0]))
    assert metric.state.tolist() == [1, 1, 1, 0, 0, 0, 0, 1]
    assert metric.value() == 1.0
    for wrong in (-0.1, 1.5):
        with pytest.raises(UsageError, match="give probabilities"):
            metric.update(torch.tensor([wrong]), torch.tensor([1.0]))


def test_log_loss_of_a_certain_mistake_is_bounded():
    assert log_loss(torch.tensor([0.0]), torch.tensor([1.0])) == pytest.approx(-math.log(1e-7))
    assert log_loss(torch.tensor([1.0]), torch.tensor([1.0])) == pytest.approx(1e-7)


def test_accuracy_changes_its_mind_just_above_a_half():
    metric = Accuracy()
    metric.update(torch.tensor([0.5, 0.5001]), torch.tensor([0.0, 1.0]))
    assert metric.value() == 1.0


def test_topk_accuracy_counts_labels_among_the_highest():
    logits = torch.tensor([[0.1, 0.5, 0.3, 0.2], [0.9, 0.1, 0.2, 0.3], [0.0, 0.1, 0.2, 0.3]])
    labels = torch.tensor([2, 1, 3])
    assert [float(topk_accuracy(logits, labels, k)) for k in (1, 2, 3, 4)] == pytest.approx(
        [1 / 3, 2 / 3, 2 / 3, 1]
    )
    assert topk_accuracy(logits.requires_grad_(), labels.unsqueeze(1)).requires_grad is False
    with pytest.raises(UsageError, match=r"shapes \(3, 4\) and \(2,\); give \(batch, classes\)"):
        topk_accuracy(logits, labels[:2])
    for k in (0, 5):
        with pytest.raises(UsageError, match=f"was given k {k}; it must be from 1 to 4 classes"):
            topk_accuracy(logits, labels, k)


@pytest.mark.parametrize("label", [-1.0, 2.0, math.nan])
def test_labels_of_an_area_are_0_and_1(label: float):
    labels = Y.clone()
    labels[1] = label
    with pytest.raises(UsageError, match=f"Auc was given a label {label:g}"):
        Auc().update(P, labels)
    with pytest.raises(UsageError, match=f"auc was given a label {label:g}"):
        auc(P, labels)
