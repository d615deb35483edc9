"""Metrics against their definitions, and summed over parts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.metrics import ndcg_score, roc_auc_score

from trainers.errors import UsageError
from trainers.metrics import (
    Accuracy,
    Auc,
    Calibration,
    DistributedMetrics,
    Gauc,
    LogLoss,
    Mae,
    Metric,
    Mse,
    Ndcg,
    NormalizedEntropy,
    PointwiseMetric,
    Recall,
    Rmse,
    WindowedAuc,
    auc,
    log_loss,
    topk_accuracy,
)

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
    "NormalizedEntropy": (
        NormalizedEntropy,
        math.log(0.9 * 0.2 * 0.7 * 0.3 * 0.4) / (2 * math.log(2 / 5) + 3 * math.log(3 / 5)),
    ),
    "Calibration": (Calibration, (0.9 + 0.8 + 0.3 + 0.3 + 0.6) / 2),
    "WindowedAuc": (lambda: WindowedAuc(10_000), 3.5 / 6),
}
KINDS: list[Callable[[], PointwiseMetric]] = [kind for kind, _ in EXPECTED.values()]


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
def test_parts_merge_into_the_whole(kind: Callable[[], PointwiseMetric]):
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
def test_nothing_gives_nan(kind: Callable[[], PointwiseMetric]):
    metric = kind()
    assert math.isnan(metric.value())
    metric.update(torch.empty(0), torch.empty(0))
    assert math.isnan(metric.value())
    metric.update(P, Y)
    metric.reset()
    assert math.isnan(metric.value())


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_used_is_refused(kind: Callable[[], PointwiseMetric]):
    metric = kind()
    with pytest.raises(UsageError, match="5 predictions but 4 labels"):
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


# ---- What metrics are given, all of them alike

GROUPS = torch.zeros(5, dtype=torch.int64)
PROBABILITIES: list[Callable[[], Any]] = [
    Accuracy, LogLoss, NormalizedEntropy, Auc, Calibration, lambda: WindowedAuc(100)
]  # fmt: skip
ALL: list[Callable[[], Any]] = [*PROBABILITIES, Mae, Mse, Rmse, Gauc, lambda: Ndcg(2), lambda: Recall(2)]


def updated(metric: Any, predictions: Any, labels: Any) -> float:
    grouped = isinstance(metric, Gauc | Ndcg | Recall)
    metric.update(predictions, labels, *([GROUPS] if grouped else []))
    return float(metric.value())


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("label", [math.nan, math.inf])
def test_a_label_that_is_not_finite_is_refused(kind: Callable[[], Any], label: float):
    labels = Y.clone()
    labels[2] = label
    metric = kind()
    with pytest.raises(UsageError, match=f"{type(metric).__name__} was given a label {label:g}; labels "):
        updated(metric, P, labels)
    assert not metric.state.any()
    updated(metric, P, Y)


@pytest.mark.parametrize("kind", PROBABILITIES)
@pytest.mark.parametrize(
    ("predictions", "labels", "words"),
    [
        (torch.tensor([3.0, 5.0]), torch.tensor([5.0, 5.0]), "predictions from 3 to 5; give probabilities"),
        (torch.tensor([-0.4, 0.2]), torch.tensor([0.0, 1.0]), "predictions from -0.4 to 0.2"),
        (torch.tensor([0.4, 0.2]), torch.tensor([0.3, 1.0]), r"label 0\.3; labels must be 0 or 1"),
        (torch.tensor([0.4, 0.2]), torch.tensor([0, 7]), "label 7; labels must be 0 or 1 .*topk_accuracy"),
    ],
)
def test_classes_scores_and_soft_labels_are_no_probabilities(
    kind: Callable[[], Any], predictions: torch.Tensor, labels: torch.Tensor, words: str
):
    with pytest.raises(UsageError, match=words):
        kind().update(predictions, labels)


@pytest.mark.parametrize("kind", ALL)
def test_what_is_no_tensor_or_has_another_shape_is_refused(kind: Callable[[], Any]):
    with pytest.raises(UsageError, match="was given predictions array"):
        updated(kind(), P.numpy(), Y)
    with pytest.raises(UsageError, match=r"was given labels \[1, 0"):
        updated(kind(), P, [1, 0, 0, 1, 0])
    with pytest.raises(UsageError, match="give a tensor of real numbers"):
        updated(kind(), P.to(torch.complex64), Y)


def test_the_same_number_in_another_shape_is_another_order():
    with pytest.raises(UsageError, match=r"shape \(2, 3\) but labels of shape \(3, 2\)"):
        Mae().update(torch.zeros(2, 3), torch.zeros(3, 2))
    for labels in (torch.zeros(6), torch.zeros(2, 1, 3)):
        Mae().update(torch.zeros(2, 3), labels)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.tensor([0.0, 1.0]), r"labels of torch\.float32; give integers"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels: torch.Tensor, words: str):
    with pytest.raises(UsageError, match=f"topk_accuracy was given .*{words}"):
        topk_accuracy(torch.zeros(2, 3), labels)


@pytest.mark.parametrize("wrong", [math.nan, -1.0])
def test_counts_and_sums_of_a_script_are_no_less_than_0(wrong: float):
    metrics = DistributedMetrics(Trainers())
    for call in (metrics.acc, metrics.mae, metrics.mse, metrics.rmse):
        with pytest.raises(UsageError, match="counts and sums must be finite and at least 0"):
            call(wrong, 2.0)
    with pytest.raises(UsageError, match=r"metrics\.auc was given"):
        metrics.auc([1.0, wrong], [1.0, 1.0])


# ---- Windows, values of a slot, and what collapses


def test_a_window_forgets_what_is_older():
    """The first 5,000 examples are predicted the wrong way round, the following ones as they are."""
    p, y = examples(20_000)
    p[:5000] = 1 - p[:5000]
    metric, parts = WindowedAuc(5000), 10
    for start in range(0, 20_000, 100):
        metric.update(p[start : start + 100], y[start : start + 100])
        seen = start + 100
        if seen > 5000 and seen % 500 == 100:  # the newest part has begun
            kept = slice(seen - 100 - 500 * (parts - 1), seen)
            exact = auc(p[kept], y[kept])
            assert metric.value() == pytest.approx(exact, abs=1e-3)
    with pytest.raises(UsageError, match="11 parts of 10 examples"):
        WindowedAuc(10, parts=11)
    large = WindowedAuc(5000)
    for start in range(0, 20_000, 4000):  # more than a part at once
        large.update(p[start : start + 4000], y[start : start + 4000])
    assert large.state.sum() == 8000
    assert large.value() == pytest.approx(auc(p[-8000:], y[-8000:]), abs=1e-3)


def test_windows_of_several_trainers_merge_by_age():
    p, y = examples(4000)
    left, right, whole = (WindowedAuc(1000, parts=4) for _ in range(3))
    for start in range(0, 4000, 50):
        some = slice(start, start + 50)
        (right if start % 100 else left).update(p[some], y[some])
    left.merge(right)
    whole.update(p[-2000:], y[-2000:])
    assert left.state.sum() == 2000
    assert left.value() == pytest.approx(whole.value())


def test_calibration_by_the_value_of_a_slot():
    metric, other = Calibration(3), Calibration(3)
    metric.update(P, Y, torch.tensor([0, 0, 2, 2, 2]))
    other.update(P[:1], Y[:1], torch.tensor([[0]]))
    metric.merge(other)
    found = metric.by_value().tolist()
    assert found[::2] == pytest.approx([(0.9 + 0.8 + 0.9) / 2, 1.2])
    assert math.isnan(found[1])
    assert metric.value() == pytest.approx(3.8 / 3)
    for values, words in (
        (torch.tensor([0, 1, 2, 3, 0]), "values from 0 to 3; they must be from 0 to 2"),
        (torch.tensor([0, 1]), "5 labels and 2 values"),
        (torch.rand(5), "values of torch.float32; give integers"),
        (None, "3 values was given no values"),
    ):
        with pytest.raises(UsageError, match=words):
            metric.update(P, Y, values)


# ---- Groups


def grouped(seed: int = 0, digits: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """2,000 examples of 60 groups, some large and some of one example, with ties."""
    drawn = torch.Generator().manual_seed(seed)
    groups = (torch.rand(2000, generator=drawn) ** 3 * 60).long() * (2**57) - 2**62
    p, y = examples(2000, seed)
    return p.round(decimals=digits), y, groups


def gauc_by_definition(p: torch.Tensor, y: torch.Tensor, groups: torch.Tensor) -> float:
    total = weight = 0.0
    for group in groups.unique():
        mine = groups == group
        if len(y[mine].unique()) == 2:
            total += int(mine.sum()) * roc_auc_score(y[mine].numpy(), p[mine].numpy())
            weight += int(mine.sum())
    return total / weight


def test_gauc_is_the_weighted_mean_of_the_groups_areas():
    p, y, groups = grouped()
    metric, left, right = Gauc(), Gauc(), Gauc()
    metric.update(p, y, groups)
    expected = gauc_by_definition(p, y, groups)
    assert metric.value() == pytest.approx(expected, abs=1e-12)
    assert abs(expected - auc(p, y)) > 1e-3, "it is another number than the area of all"
    for start in range(0, 2000, 250):  # groups are on both
        some = slice(start, start + 250)
        (left if start % 500 else right).update(p[some], y[some], groups[some])
    left.merge(right)
    assert left.value() == pytest.approx(expected, abs=1e-12)
    negative = Gauc()
    negative.update(p - 5, y, groups)  # any finite scores
    assert negative.value() == pytest.approx(expected, abs=1e-6)
    negative.reset()
    assert math.isnan(negative.value())


def rows_with_a_relevant_item() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(2)
    scores = torch.rand(50, 12, generator=drawn).round(decimals=1)  # ties
    relevance = torch.randint(0, 4, (50, 12), generator=drawn).float() * (
        torch.rand(50, 12, generator=drawn) < 0.3
    )
    relevance[:, 3] = 1.0
    return scores, relevance


@pytest.mark.parametrize("k", [1, 5, 12, 40])
def test_ndcg_is_scikit_learns(k: int):
    scores, relevance = rows_with_a_relevant_item()
    metric = Ndcg(k)
    metric.update(scores[:20], relevance[:20])
    flat = torch.arange(20, 50).repeat_interleave(12)
    mixed = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
    metric.update(scores[20:].reshape(-1)[mixed], relevance[20:].reshape(-1)[mixed], flat[mixed])
    assert metric.value() == pytest.approx(ndcg_score(relevance.numpy(), scores.numpy(), k=k), rel=1e-9)


def test_recall_counts_what_is_among_the_first():
    metric = Recall(2)
    scores = torch.tensor([[0.9, 0.5, 0.4, 0.1], [0.3, 0.3, 0.3, 0.1], [0.4, 0.3, 0.2, 0.1]])
    labels = torch.tensor([[1.0, 0.0, 2.0, 0.0], [1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    metric.update(scores, labels)
    # 1 of 2; one of the two, with a chance of 2 / 3; the last has no relevant item.
    assert metric.value() == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_metrics_with_other_settings_do_not_merge():
    for left, right in ((Ndcg(5), Ndcg(10)), (WindowedAuc(100), WindowedAuc(200)), (Recall(1), Ndcg(1))):
        with pytest.raises(UsageError, match="cannot merge"):
            left.merge(right)


def test_groups_that_cannot_be_used_are_refused():
    scores, relevance = rows_with_a_relevant_item()
    with pytest.raises(UsageError, match=r"shape \(600,\); give \(queries, items\), or groups"):
        Ndcg(5).update(scores.reshape(-1), relevance.reshape(-1))
    with pytest.raises(UsageError, match="600 labels and 50 groups"):
        Recall(5).update(scores, relevance, torch.arange(50))
    with pytest.raises(UsageError, match="a label -1"):
        Ndcg(5).update(scores, relevance - 1)
    with pytest.raises(UsageError, match="k 0"):
        Recall(0)
    with pytest.raises(UsageError, match=r"groups of torch\.float32; give integers"):
        Gauc().update(P, Y, P)
    with pytest.raises(UsageError, match=r"a label 0\.5"):
        Gauc().update(P, Y / 2, torch.arange(5))


class Trainers:
    """What `fleet.util` does, for this trainer and others that have the given states."""

    def __init__(self, *others: Metric) -> None:
        self._others = others

    def all_reduce(self, input: torch.Tensor, mode: str = "sum", comm_world: str = "worker") -> torch.Tensor:
        return input + sum(each.state for each in self._others)

    def all_gather(self, input: torch.Tensor, comm_world: str = "worker") -> list[torch.Tensor]:
        return [input, *(each._examples() for each in self._others if isinstance(each, Gauc))]


def test_metrics_of_all_trainers_leave_each_ones_own():
    p, y, groups = grouped()
    here, there, whole = Gauc(), Gauc(), Gauc()
    here.update(p[:200], y[:200], groups[:200])
    there.update(p[200:], y[200:], groups[200:])
    whole.update(p, y, groups)
    own = here.value()
    metrics = DistributedMetrics(Trainers(there))
    assert metrics.value(here) == whole.value() != own
    assert here.value() == own
    left, right = Calibration(2), Calibration(2)
    left.update(P, Y, torch.tensor([0, 1, 0, 1, 1]))
    right.update(P, Y, torch.tensor([1, 1, 0, 1, 0]))
    merged = DistributedMetrics(Trainers(right)).merged(left)
    left.merge(right)
    assert torch.equal(merged.by_value(), left.by_value())
