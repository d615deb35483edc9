"""Metrics of predictions: sums that any number of processes can add up, and `fleet.metrics`, which does.

Every metric keeps one float64 tensor, `state`, and the metric of two sets of examples is the metric of the
sum of their states: add it up over trainers (`merge`, or an all-reduce of `state`) and ask for `value`.
`DistributedMetrics` has Paddle's names for the same formulas over all trainers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from trainers.errors import NotSupportedError, UsageError

_LEAST_PROBABILITY = 1e-7  # below the step of float32 near 1: a certain and wrong prediction costs 16.1


class Metric(ABC):
    """`state` is float64 on the CPU. `value` of no examples is nan."""

    def __init__(self, size: int) -> None:
        self.state = torch.zeros(size, dtype=torch.float64)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Take in examples: two tensors of the same number of elements, on any device.

        Raises UsageError when they differ in length, or when a prediction is not finite.
        """
        predictions, labels = _checked(type(self).__name__, predictions, labels)
        if len(labels):
            self._add(predictions, labels)

    def merge(self, other: Self) -> None:
        """Take in what another metric of the same kind has seen."""
        if type(other) is not type(self) or other.state.shape != self.state.shape:
            raise UsageError(f"{self!r} cannot merge {other!r}; they must be of the same kind and size")
        self.state += other.state

    def reset(self) -> None:
        self.state.zero_()

    @abstractmethod
    def value(self) -> float: ...

    @abstractmethod
    def _add(self, predictions: Tensor, labels: Tensor) -> None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}(state of {len(self.state)})"


class Auc(Metric):
    """Area under the ROC curve of probabilities in [0, 1] for labels 0 and 1, from histograms.

    Probabilities of one bucket count as equal, which changes the area by at most half the share of pairs
    (one click, one other) that fall into one bucket: under 0.0003 for 4,096 buckets of a spread-out
    prediction. `auc` is exact.
    """

    def __init__(self, buckets: int = 4096) -> None:
        if buckets < 2:
            raise UsageError(f"Auc has {buckets} buckets; it needs at least 2")
        super().__init__(2 * buckets)
        self.buckets = buckets

    def _add(self, predictions: Tensor, labels: Tensor) -> None:
        low, high = float(predictions.min()), float(predictions.max())
        if low < 0 or high > 1:
            raise UsageError(f"Auc was given predictions from {low:g} to {high:g}; give probabilities")
        _expect_clicks("Auc", labels)
        bucket = (predictions * self.buckets).long().clamp_(max=self.buckets - 1)
        self.state += torch.bincount(bucket + self.buckets * labels.long(), minlength=2 * self.buckets)

    def value(self) -> float:
        """nan unless there are examples of both labels."""
        others, clicks = self.state.view(2, self.buckets)
        return area_under(others, clicks)


class _Mean(Metric):
    """A sum and the number of examples in it."""

    def __init__(self) -> None:
        super().__init__(2)

    def _add(self, predictions: Tensor, labels: Tensor) -> None:
        self.state += torch.stack([self._each(predictions, labels).sum(), torch.tensor(float(len(labels)))])

    @abstractmethod
    def _each(self, predictions: Tensor, labels: Tensor) -> Tensor: ...

    def value(self) -> float:
        total, examples = self.state.tolist()
        return total / examples if examples else math.nan


class Accuracy(_Mean):
    """The share of examples whose label is 1 where the probability is above 0.5, and 0 elsewhere."""

    def _each(self, predictions: Tensor, labels: Tensor) -> Tensor:
        return ((predictions > 0.5) == (labels > 0.5)).double()


class Mae(_Mean):
    """Mean absolute error."""

    def _each(self, predictions: Tensor, labels: Tensor) -> Tensor:
        return (predictions - labels).abs()


class Mse(_Mean):
    """Mean squared error."""

    def _each(self, predictions: Tensor, labels: Tensor) -> Tensor:
        return (predictions - labels).square()


class Rmse(Mse):
    """Root of the mean squared error."""

    def value(self) -> float:
        return math.sqrt(super().value())


class LogLoss(_Mean):
    """Mean negative log likelihood, in nats, of labels 0 and 1 under predicted probabilities; these are taken
    as at least 1e-7 and at most 1 - 1e-7.
    """

    def _each(self, predictions: Tensor, labels: Tensor) -> Tensor:
        likelihood = torch.where(labels > 0.5, predictions, 1 - predictions)
        return -likelihood.clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY).log()


def auc(scores: Tensor, labels: Tensor) -> float:
    """The exact area under the ROC curve: the share of pairs (one with label 1, one with 0) that the scores
    put in the right order, ties counting half. Any finite scores; nan without both labels.
    """
    scores, labels = _checked("auc", scores, labels)
    if not len(labels):
        return math.nan
    _expect_clicks("auc", labels)
    ordered, order = scores.sort()
    clicks = labels[order].double()
    _, tied, sizes = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
    clicks_of = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, tied, clicks)
    return area_under(sizes - clicks_of, clicks_of)


def log_loss(probabilities: Tensor, labels: Tensor) -> float:
    """As `LogLoss`, of all examples at once."""
    metric = LogLoss()
    metric.update(probabilities, labels)
    return metric.value()


def topk_accuracy(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """(batch, classes) and (batch,) or (batch, 1) integers -> the share of examples whose label is among the
    `k` highest logits: a float32 scalar on their device, so that nothing waits for a GPU.

    Raises UsageError for other shapes, and when `k` is not from 1 to the number of classes.
    """
    if logits.ndim != 2 or labels.numel() != len(logits):
        shapes = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise UsageError(f"topk_accuracy was given shapes {shapes}; give (batch, classes) and (batch,)")
    if not 1 <= k <= logits.shape[1]:
        raise UsageError(f"topk_accuracy was given k {k}; it must be from 1 to {logits.shape[1]} classes")
    highest = logits.detach().topk(k, dim=1).indices
    return (highest == labels.reshape(-1, 1)).any(dim=1).float().mean()


def area_under(others: Tensor, clicks: Tensor) -> float:
    """Area under the ROC curve of two histograms over the same ascending scores."""
    pairs = float(others.sum() * clicks.sum())
    below = others.cumsum(0) - others / 2  # half of those that tie
    return float((clicks * below).sum()) / pairs if pairs else math.nan


def _expect_clicks(name: str, labels: Tensor) -> None:
    wrong = labels[(labels != 0) & (labels != 1)]
    if len(wrong):
        raise UsageError(f"{name} was given a label {wrong[0]:g}; labels are 0 and 1")


def _checked(name: str, predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float64 vectors on the CPU."""
    if predictions.numel() != labels.numel():
        raise UsageError(f"{name} was given {predictions.numel()} predictions and {labels.numel()} labels")
    predictions = predictions.detach().reshape(-1).to("cpu", torch.float64)
    if not bool(torch.isfinite(predictions).all()):
        wrong = int((~torch.isfinite(predictions)).sum())
        raise UsageError(f"{name} was given {wrong} of {len(predictions)} predictions that are not finite")
    return predictions, labels.detach().reshape(-1).to("cpu", torch.float64)


# ---- `fleet.metrics`: metrics over all trainers


class _AllReduce(Protocol):
    def all_reduce(self, input: Any, mode: str = "sum", comm_world: str = "worker") -> Any: ...


class DistributedMetrics:
    """All trainers must make each call, and each gets the same answer: the metric of the union of their
    examples; nan where there are none. What is given may be a number, a list of numbers, an array or a
    tensor; nothing of it is changed.

    `scope` exists for Paddle's scripts and must be None: values are given, not names of variables. `util`:
    by whom to add up, `fleet.util` when None.
    """

    def __init__(self, util: _AllReduce) -> None:
        self._util = util

    def value(self, metric: Metric) -> float:
        """The value of one of `trainers.metrics` over the examples of all trainers, which keep theirs."""
        whole = type(metric).__new__(type(metric))
        whole.__dict__.update(metric.__dict__)
        whole.state = self._util.all_reduce(metric.state)
        return whole.value()

    def sum(self, input: Any, scope: object = None, util: _AllReduce | None = None) -> Any:
        """Over all trainers, element by element; the same kind of thing again."""
        return self._by(util, scope).all_reduce(_given("sum", input), "sum")

    def max(self, input: Any, scope: object = None, util: _AllReduce | None = None) -> Any:
        """As `sum`: the largest."""
        return self._by(util, scope).all_reduce(_given("max", input), "max")

    def min(self, input: Any, scope: object = None, util: _AllReduce | None = None) -> Any:
        """As `sum`: the smallest."""
        return self._by(util, scope).all_reduce(_given("min", input), "min")

    def auc(
        self, stat_pos: Any, stat_neg: Any, scope: object = None, util: _AllReduce | None = None
    ) -> float:
        """Area under the ROC curve from counts of examples by predicted probability: buckets in ascending
        order, clicked ones in `stat_pos` and others in `stat_neg`, of one size. nan without both kinds
        (Paddle: 0.5).
        """
        clicks, others = _total("auc", stat_pos), _total("auc", stat_neg)
        if clicks.shape != others.shape:
            raise UsageError(
                f"fleet.metrics.auc was given {len(clicks)} buckets of stat_pos and {len(others)} of stat_neg"
            )
        clicks, others = self._by(util, scope).all_reduce(torch.stack([clicks, others]))
        return area_under(others, clicks)

    def acc(self, correct: Any, total: Any, scope: object = None, util: _AllReduce | None = None) -> float:
        """The share of correct ones."""
        return self._ratio("acc", correct, total, scope, util)

    def mae(
        self, abserr: Any, total_ins_num: Any, scope: object = None, util: _AllReduce | None = None
    ) -> float:
        """Mean absolute error, from the sum of absolute errors and the number of examples."""
        return self._ratio("mae", abserr, total_ins_num, scope, util)

    def mse(
        self, sqrerr: Any, total_ins_num: Any, scope: object = None, util: _AllReduce | None = None
    ) -> float:
        """Mean squared error, from the sum of squared errors and the number of examples."""
        return self._ratio("mse", sqrerr, total_ins_num, scope, util)

    def rmse(
        self, sqrerr: Any, total_ins_num: Any, scope: object = None, util: _AllReduce | None = None
    ) -> float:
        """Root of the mean squared error."""
        return math.sqrt(self._ratio("rmse", sqrerr, total_ins_num, scope, util))

    def _ratio(self, call: str, above: Any, below: Any, scope: object, util: _AllReduce | None) -> float:
        pair = torch.stack([_total(call, above).sum(), _total(call, below).sum()])
        over, under = self._by(util, scope).all_reduce(pair).tolist()
        return over / under if under else math.nan

    def _by(self, util: _AllReduce | None, scope: object) -> _AllReduce:
        if scope is not None:
            raise NotSupportedError(
                f"scope is {scope!r}; there are no scopes here: give the values themselves"
            )
        return self._util if util is None else util


def _given(call: str, value: Any) -> Any:
    if isinstance(value, str):
        raise UsageError(
            f"fleet.metrics.{call} was given {value!r}; there are no variables by name here: give the values"
        )
    return value


def _total(call: str, value: Any) -> torch.Tensor:
    """As a vector of float64 on the CPU."""
    try:
        return torch.as_tensor(_given(call, value)).detach().to("cpu", torch.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"fleet.metrics.{call} was given {value!r}, which is not numeric: {error}"
        ) from error
