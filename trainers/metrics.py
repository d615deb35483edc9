"""Compute metrics of predictions that can be added over processes. `fleet.metrics` adds them.

Every metric keeps one tensor, `state`. The state of two sets of examples is the sum of their states. Add it
over trainers (`merge`, or `fleet.metrics.merged`), and call `value`. Only `Gauc` keeps all examples, because
it cannot be computed from sums. `DistributedMetrics` has Paddle's names for the same formulas over all
trainers.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainers.errors import NotSupportedError, UsageError

# below the step of float32 near 1, so that a certain and wrong prediction costs 16.1
_LEAST_PROBABILITY = 1e-7


class _AllReduce(Protocol):
    def all_reduce(self, input: object, mode: str = "sum", comm_world: str = "worker") -> Any: ...

    def all_gather(self, input: object, comm_world: str = "worker") -> list[Any]: ...


class Metric(ABC):
    """A metric. `state` is float64 on the CPU, and `value` without examples is nan.

    Methods raise UsageError for invalid input (see `_checked`).
    """

    _of: ClassVar[str] = "values"
    """The kind of predictions and labels, as in `_checked`."""

    def __init__(self, *size: int) -> None:
        self.state = torch.zeros(size, dtype=torch.float64)

    def merge(self, other: Self) -> None:
        """Add the examples of another metric of the same kind and settings. Raises UsageError for another
        metric.
        """
        if repr(other) != repr(self):
            raise UsageError(f"{self!r} cannot merge {other!r}; both must have the same kind and size")
        self.state += other.state

    def merged(self, util: _AllReduce) -> Self:
        """Return the metric of all trainers' examples. This metric does not change."""
        whole = copy.copy(self)
        whole.state = util.all_reduce(self.state)
        return whole

    def reset(self) -> None:
        """Remove all examples."""
        self.state = torch.zeros_like(self.state)

    @abstractmethod
    def value(self) -> float:
        """Return the value over the examples since the last `reset`, or nan without examples."""

    def _checked(self, predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return _checked(type(self).__name__, predictions, labels, self._of)

    def __repr__(self) -> str:
        public = {name: value for name, value in vars(self).items() if name != "state" and name[0] != "_"}
        settings = "".join(f"{name} {value}, " for name, value in public.items())
        return f"{type(self).__name__}({settings}state of {self.state.numel()})"


class PointwiseMetric(Metric):
    """A metric that is a sum over single examples."""

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add examples, as two tensors with the same number of elements, on any device."""
        predictions, labels = self._checked(predictions, labels)
        if len(labels):
            self._add(predictions, labels)

    @abstractmethod
    def _add(self, predictions: Tensor, labels: Tensor) -> None: ...


class Auc(PointwiseMetric):
    """Area under the ROC curve of probabilities in [0, 1] for labels 0 and 1, from histograms.

    Probabilities in one bucket count as equal. This changes the area by at most half the share of pairs (one
    click, one other) in one bucket. For a spread-out prediction and 4,096 buckets, the change is less than
    0.0003. `auc` is exact.
    """

    _of = "probabilities"

    def __init__(self, buckets: int = 4096) -> None:
        if buckets < 2:
            raise UsageError(f"Auc has {buckets} buckets; it needs at least 2")
        super().__init__(2 * buckets)
        self.buckets = buckets

    def _add(self, predictions: Tensor, labels: Tensor) -> None:
        self.state += self._histograms(predictions, labels)

    def _histograms(self, predictions: Tensor, labels: Tensor) -> Tensor:
        bucket = (predictions * self.buckets).long().clamp_(max=self.buckets - 1)
        return torch.bincount(bucket + self.buckets * labels.long(), minlength=2 * self.buckets)

    def value(self) -> float:
        """Return the area, or nan unless there are examples of both labels."""
        others, clicks = self.state.view(-1, 2, self.buckets).sum(dim=0)
        return area_under(others, clicks)


class WindowedAuc(Auc):
    """`Auc` over the last `examples` of each trainer, in `parts`.

    The oldest part is dropped when the newer ones have enough examples, or when there are `parts`. The metric
    therefore covers at least (parts - 1) / parts of `examples`, and at most one update more.
    """

    def __init__(self, examples: int, buckets: int = 4096, parts: int = 10) -> None:
        super().__init__(buckets)
        if not 2 <= parts <= examples:
            raise UsageError(
                f"WindowedAuc has {parts} parts of {examples} examples; it needs 2 parts of 1 example or more"
            )
        self.examples, self.parts = examples, parts
        self.state = torch.zeros(parts, 2 * buckets, dtype=torch.float64)  # the newest first

    def _add(self, predictions: Tensor, labels: Tensor) -> None:
        if float(self.state[0].sum()) >= self.examples / self.parts:
            self.state = torch.cat([torch.zeros_like(self.state[:1]), self.state[:-1]])
        self.state[0] += self._histograms(predictions, labels)
        sizes = self.state.sum(dim=1)
        self.state[sizes.cumsum(0) - sizes >= self.examples] = 0.0


class _Mean(PointwiseMetric):
    """A sum and its number of examples."""

    def __init__(self) -> None:
        super().__init__(2)

    def _add(self, predictions: Tensor, labels: Tensor) -> None:
        self.state += torch.stack([self._each(predictions, labels).sum(), torch.tensor(float(len(labels)))])

    @abstractmethod
    def _each(self, predictions: Tensor, labels: Tensor) -> Tensor: ...

    def value(self) -> float:
        """Return the mean over the examples, or nan without examples."""
        return _quotient(self.state)


class Accuracy(_Mean):
    """The share of examples with a correct prediction, where a probability above 0.5 predicts label 1."""

    _of = "probabilities"

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
        """Return the root of the mean over the examples, or nan without examples."""
        return math.sqrt(super().value())


class LogLoss(_Mean):
    """Mean negative log likelihood, in nats, of labels 0 and 1 under predicted probabilities.

    Probabilities are limited to between 1e-7 and 1 - 1e-7.
    """

    _of = "probabilities"

    def _each(self, predictions: Tensor, labels: Tensor) -> Tensor:
        likelihood = torch.where(labels > 0.5, predictions, 1 - predictions)
        return -likelihood.clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY).log()


class NormalizedEntropy(PointwiseMetric):
    """Mean log loss divided by the log loss of a model that always predicts the share of clicks.

    Below 1, the model is better than this constant (He et al. 2014, "Practical lessons from predicting clicks
    on ads at Facebook"). The value is nan unless there are examples of both labels.
    """

    _of = "probabilities"

    def __init__(self) -> None:
        super().__init__(3)
        self._loss = LogLoss()

    def _add(self, predictions: Tensor, labels: Tensor) -> None:
        loss = self._loss._each(predictions, labels).sum()
        self.state += torch.stack([loss, labels.sum(), torch.tensor(float(len(labels)))])

    def value(self) -> float:
        """Return the ratio, or nan unless there are examples of both labels."""
        loss, clicks, examples = self.state.tolist()
        if not 0 < clicks < examples:
            return math.nan
        share = clicks / examples
        entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
        return float(loss / examples / entropy)


class Calibration(Metric):
    """Expected clicks (the sum of the predicted probabilities) divided by actual clicks.

    Above 1, the model predicts too many (He et al. 2014). The value is nan without a click. `values` is the
    number of a slot's values, for a ratio of each.
    """

    _of = "probabilities"

    def __init__(self, values: int = 1) -> None:
        if values < 1:
            raise UsageError(f"Calibration was given a slot with {values} values; it needs at least 1")
        super().__init__(values, 2)

    def update(self, predictions: Tensor, labels: Tensor, values: Tensor | None = None) -> None:
        """Add examples. `values` are the slot's values from 0 on, optional if the slot has only one."""
        predictions, labels = self._checked(predictions, labels)
        if not len(labels):
            return
        most = len(self.state)
        places = _integers(type(self).__name__, "values", values, labels) if values is not None else None
        if places is None:
            if most > 1:
                raise UsageError(f"Calibration for a slot with {most} values was given no values. Pass them.")
            places = torch.zeros(len(labels), dtype=torch.int64)
        low, high = int(places.min()), int(places.max())
        if low < 0 or high >= most:
            raise UsageError(
                f"Calibration was given values from {low} to {high}; they must be from 0 to {most - 1}"
            )
        self.state.index_add_(0, places, torch.stack([predictions, labels], dim=1))

    def value(self) -> float:
        """Return expected clicks / clicks over all values of the slot, or nan without a click."""
        return _quotient(self.state.sum(dim=0))

    def by_value(self) -> Tensor:
        """Return the ratio of each value, (values,) float64, with nan for values without a click."""
        expected, came = self.state.unbind(dim=1)
        return torch.where(came > 0, expected / came, math.nan)


# ---- Metrics of groups of examples, such as the examples of a user, or the items for a request


class _Ranked:
    """Examples sorted by group, and within a group by falling prediction.

    Equal predictions in a group are a tie. Quantities that depend on their order are averaged over all
    orders.
    """

    def __init__(self, predictions: Tensor, labels: Tensor, groups: Tensor) -> None:
        order = torch.from_numpy(np.lexsort((-predictions.numpy(), groups.numpy())))
        groups, predictions, self.labels = groups[order], predictions[order], labels[order]
        new = torch.ones(len(order), dtype=torch.bool)
        new[1:] = groups[1:] != groups[:-1]
        self.group = new.cumsum(0) - 1
        self.sizes = torch.bincount(self.group)
        self.position = torch.arange(len(order)) - new.nonzero()[:, 0][self.group]
        new[1:] |= predictions[1:] != predictions[:-1]
        self.tie = new.cumsum(0) - 1
        self._tied = torch.bincount(self.tie).double()

    def of_ties(self, each: Tensor) -> Tensor:
        """Return the sum of each tie."""
        return torch.zeros(len(self._tied), dtype=torch.float64).index_add_(0, self.tie, each)

    def averaged(self, each: Tensor) -> Tensor:
        """Return the mean of its tie for each example."""
        return (self.of_ties(each) / self._tied)[self.tie]

    def summed(self, each: Tensor) -> Tensor:
        """Return the sum of each group."""
        return torch.zeros(len(self.sizes), dtype=torch.float64).index_add_(0, self.group, each)

    def areas(self) -> tuple[Tensor, Tensor]:
        """Return the correctly ordered pairs (one with label 1, one with 0) and all pairs of each group.

        Ties count half.
        """
        others = 1 - self.labels
        tied, of_group = self.of_ties(others), self.summed(others)
        behind = of_group.cumsum(0)[self.group] - (tied.cumsum(0) - tied / 2)[self.tie]
        return self.summed(self.labels * behind), self.summed(self.labels) * of_group


class _RankingMetric(Metric):
    """The mean over groups that have a relevant item."""

    _of = "relevance"

    def __init__(self, k: int) -> None:
        if k < 1:
            raise UsageError(f"{type(self).__name__} was given k {k}; it must be at least 1")
        super().__init__(2)
        self.k = k

    def update(self, predictions: Tensor, labels: Tensor, groups: Tensor | None = None) -> None:
        """Add (queries, items) scores, with the relevance of each item, from 0 on.

        Alternatively, pass all items in a row, with `groups`, an integer per item that is equal within a
        query. All items of a query must be in one call.
        """
        name, shape = type(self).__name__, _tensor(type(self).__name__, "predictions", predictions).shape
        if groups is None:
            if len(shape) != 2:
                raise UsageError(f"{name} was given shape {tuple(shape)}; give (queries, items), or groups")
            groups = torch.arange(shape[0]).repeat_interleave(shape[1])
        predictions, labels = self._checked(predictions, labels)
        groups = _integers(name, "groups", groups, labels)
        if not len(labels):
            return
        ranked = _Ranked(predictions, labels, groups)
        values = self._of_groups(ranked)[ranked.summed(ranked.labels) > 0]
        self.state += torch.tensor([float(values.sum()), float(len(values))], dtype=torch.float64)

    @abstractmethod
    def _of_groups(self, ranked: _Ranked) -> Tensor: ...

    def value(self) -> float:
        """Return the mean over the queries that have a relevant item, or nan without one."""
        return _quotient(self.state)


class Ndcg(_RankingMetric):
    """Normalised discounted cumulative gain of the first k.

    An item at place p = 1, 2, ... gains relevance / log2(p + 1), divided by the gain of the best order
    (Järvelin and Kekäläinen 2002).
    """

    def _of_groups(self, ranked: _Ranked) -> Tensor:
        best = _Ranked(ranked.labels, ranked.labels, ranked.group)
        return self._gain(ranked) / self._gain(best)

    def _gain(self, ranked: _Ranked) -> Tensor:
        discount = torch.where(ranked.position < self.k, 1 / torch.log2(ranked.position.double() + 2), 0.0)
        return ranked.summed(ranked.averaged(discount) * ranked.labels)


class Recall(_RankingMetric):
    """The share of the relevant items (label above 0) among the first k."""

    def _of_groups(self, ranked: _Ranked) -> Tensor:
        relevant = (ranked.labels > 0).double()
        first = ranked.averaged((ranked.position < self.k).double())
        return ranked.summed(first * relevant) / ranked.summed(relevant)


class Gauc(Metric):
    """The mean area under the ROC curves of groups, such as users, weighted by their numbers of examples.

    Groups with only one label do not count (Zhu et al. 2017, "Optimized cost per click in Taobao display
    advertising"). The value is exact, even if the examples of a group are on several trainers. The metric
    keeps every example, in 16 bytes, until `reset`. `merged` sends them to all trainers.
    """

    _of = "clicks"

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[Tensor] = []

    def reset(self) -> None:
        self._pieces = []

    def update(self, predictions: Tensor, labels: Tensor, groups: Tensor) -> None:
        """Add examples, with an integer group for each. Predictions are compared as float32."""
        predictions, labels = self._checked(predictions, labels)
        groups = _integers(type(self).__name__, "groups", groups, labels)
        if len(labels):
            bits = predictions.float().view(torch.int32).long()
            self._pieces.append(torch.stack([groups, 2 * bits + labels.long()], dim=1))

    def merge(self, other: Self) -> None:
        super().merge(other)
        self._pieces.append(other._examples())

    def merged(self, util: _AllReduce) -> Self:
        whole = type(self)()
        whole._pieces = util.all_gather(self._examples())
        return whole

    def value(self) -> float:
        """Return the mean area, or nan unless a group has both labels."""
        groups, bits = self._examples().unbind(dim=1)
        scores = (bits >> 1).int().view(torch.float32).double()
        ranked = _Ranked(scores, (bits & 1).double(), groups)
        area, pairs = ranked.areas()
        both = pairs > 0
        sizes = ranked.sizes[both].double()
        return float((sizes * area[both] / pairs[both]).sum() / sizes.sum()) if both.any() else math.nan

    def _examples(self) -> Tensor:
        """Return (n, 2) int64: the group, and the bits of the prediction followed by the bit of the label."""
        self._pieces = [torch.cat([torch.empty(0, 2, dtype=torch.int64), *self._pieces])]
        return self._pieces[0]


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the exact area under the ROC curve, for any finite scores, or nan without both labels.

    The area is the share of pairs (one with label 1, one with 0) that the scores order correctly, where ties
    count half.
    """
    scores, labels = _checked("auc", scores, labels, "clicks")
    if not len(labels):
        return math.nan
    area, pairs = _Ranked(scores, labels, torch.zeros(len(labels), dtype=torch.int64)).areas()
    return float(area / pairs) if pairs else math.nan


def log_loss(probabilities: Tensor, labels: Tensor) -> float:
    """Return `LogLoss` over all examples."""
    metric = LogLoss()
    metric.update(probabilities, labels)
    return metric.value()


def topk_accuracy(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """Return the share of examples whose label is among the `k` highest logits.

    `logits` is (batch, classes), and `labels` (batch,) or (batch, 1) integers. The result is a float32 scalar
    on their device, so the call does not wait for a GPU. Raises UsageError for other shapes and types, and
    unless `k` is from 1 to the number of classes.
    """
    logits, labels = _tensor("topk_accuracy", "logits", logits), _tensor("topk_accuracy", "labels", labels)
    if logits.ndim != 2 or labels.numel() != len(logits):
        shapes = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise UsageError(f"topk_accuracy was given shapes {shapes}; give (batch, classes) and (batch,)")
    if not 1 <= k <= logits.shape[1]:
        raise UsageError(f"topk_accuracy was given k {k}; it must be from 1 to {logits.shape[1]} classes")
    if labels.is_floating_point():
        raise UsageError(f"topk_accuracy was given labels of {labels.dtype}; give integers")
    highest = logits.topk(k, dim=1).indices
    return (highest == labels.reshape(-1, 1)).any(dim=1).float().mean()


def area_under(others: Tensor, clicks: Tensor) -> float:
    """Return the area under the ROC curve of two histograms over the same ascending scores."""
    pairs = float(others.sum() * clicks.sum())
    below = others.cumsum(0) - others / 2  # half of the tied ones
    return float((clicks * below).sum()) / pairs if pairs else math.nan


def _quotient(pair: Tensor) -> float:
    """Return the first number divided by the second, or nan if that is 0."""
    over, under = pair.tolist()
    return over / under if under else math.nan


def _tensor(name: str, what: str, given: Tensor) -> Tensor:
    if not isinstance(given, Tensor) or given.is_complex():
        raise UsageError(f"{name} was given {what} {given!r:.60}; give a tensor of real numbers")
    return given.detach()


def _integers(name: str, what: str, given: Tensor, labels: Tensor) -> Tensor:
    """Return an int64 vector on the CPU, as long as the labels."""
    given = _tensor(name, what, given)
    if given.numel() != len(labels):
        raise UsageError(f"{name} was given {len(labels)} labels and {given.numel()} {what}")
    if given.is_floating_point():
        raise UsageError(f"{name} was given {what} of {given.dtype}; give integers")
    return given.reshape(-1).to("cpu", torch.int64)


_LABELS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "values": ("must be finite", torch.isfinite),
    "relevance": ("must be finite and at least 0", lambda labels: torch.isfinite(labels) & (labels >= 0)),
    "clicks": (
        "must be 0 or 1 (for more classes, use topk_accuracy)",
        lambda labels: (labels == 0) | (labels == 1),
    ),
}
"""For each kind of labels, its description and a function that marks the valid ones."""


def _checked(name: str, predictions: Tensor, labels: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return both as float64 vectors on the CPU: finite predictions, and labels of a kind in `_LABELS`.

    For "probabilities", predictions must be from 0 to 1, and labels as for "clicks". Raises UsageError for
    other values.
    """
    pair = _tensor(name, "predictions", predictions), _tensor(name, "labels", labels)
    counts, shapes = [each.numel() for each in pair], [tuple(each.squeeze().shape) for each in pair]
    if counts[0] != counts[1]:
        raise UsageError(f"{name} was given {counts[0]} predictions but {counts[1]} labels")
    if shapes[0] != shapes[1] and all(len(shape) > 1 for shape in shapes):
        raise UsageError(f"{name} was given predictions of shape {shapes[0]} but labels of shape {shapes[1]}")
    predictions, labels = (each.reshape(-1).to("cpu", torch.float64) for each in pair)
    if wrong := int((~torch.isfinite(predictions)).sum()):
        raise UsageError(f"{name} was given {wrong} of {len(predictions)} predictions that are not finite")
    if kind == "probabilities":
        if ((predictions < 0) | (predictions > 1)).any():
            low, high = predictions.min(), predictions.max()
            raise UsageError(
                f"{name} was given predictions from {low:g} to {high:g}; give probabilities from 0 to 1"
            )
        kind = "clicks"
    words, right = _LABELS[kind]
    if len(bad := labels[~right(labels)]):
        raise UsageError(f"{name} was given a label {bad[0]:g}; labels {words}")
    return predictions, labels


# ---- `fleet.metrics`: metrics over all trainers

AnyMetric = TypeVar("AnyMetric", bound=Metric)


class DistributedMetrics:
    """Metrics over all trainers. All trainers must make each call, and get the same result.

    The result is the metric of the union of their examples, or nan without examples. Arguments may be a
    number, a list of numbers, an array or a tensor, and do not change. `scope` exists for Paddle's scripts
    and must be None, because these calls take values instead of variable names. `util` adds the values, by
    default `fleet.util`.
    """

    def __init__(self, util: _AllReduce) -> None:
        self._util = util

    def value(self, metric: Metric) -> float:
        """Return the value of a metric of `trainers.metrics` over the examples of all trainers, which keep
        theirs.
        """
        return self.merged(metric).value()

    def merged(self, metric: AnyMetric) -> AnyMetric:
        """Return the metric over the examples of all trainers, to read more than its value."""
        return metric.merged(self._util)

    def sum(self, input: object, scope: object = None, util: _AllReduce | None = None) -> Any:
        """Return the sum over all trainers, element by element, in the type of the argument."""
        return self._reduced("sum", input, scope, util)

    def max(self, input: object, scope: object = None, util: _AllReduce | None = None) -> Any:
        """Return the maximum, as `sum` does."""
        return self._reduced("max", input, scope, util)

    def min(self, input: object, scope: object = None, util: _AllReduce | None = None) -> Any:
        """Return the minimum, as `sum` does."""
        return self._reduced("min", input, scope, util)

    def auc(
        self, stat_pos: object, stat_neg: object, scope: object = None, util: _AllReduce | None = None
    ) -> float:
        """Return the area under the ROC curve from counts of examples by predicted probability.

        `stat_pos` has the clicked examples and `stat_neg` the others, in equally many buckets in ascending
        order. The result is nan without both kinds (Paddle returns 0.5).
        """
        clicks, others = _total("auc", stat_pos), _total("auc", stat_neg)
        if clicks.shape != others.shape:
            raise UsageError(
                f"fleet.metrics.auc was given {len(clicks)} buckets of stat_pos and {len(others)} of stat_neg"
            )
        clicks, others = self._by(util, scope).all_reduce(torch.stack([clicks, others]))
        return area_under(others, clicks)

    def acc(
        self, correct: object, total: object, scope: object = None, util: _AllReduce | None = None
    ) -> float:
        """Return the share of correct examples."""
        return self._ratio("acc", correct, total, scope, util)

    def mae(
        self, abserr: object, total_ins_num: object, scope: object = None, util: _AllReduce | None = None
    ) -> float:
        """Return the mean absolute error, from the sum of absolute errors and the number of examples."""
        return self._ratio("mae", abserr, total_ins_num, scope, util)

    def mse(
        self, sqrerr: object, total_ins_num: object, scope: object = None, util: _AllReduce | None = None
    ) -> float:
        """Return the mean squared error, from the sum of squared errors and the number of examples."""
        return self._ratio("mse", sqrerr, total_ins_num, scope, util)

    def rmse(
        self, sqrerr: object, total_ins_num: object, scope: object = None, util: _AllReduce | None = None
    ) -> float:
        """Return the root of the mean squared error."""
        return math.sqrt(self._ratio("rmse", sqrerr, total_ins_num, scope, util))

    def _reduced(self, mode: str, input: object, scope: object, util: _AllReduce | None) -> object:
        return self._by(util, scope).all_reduce(_given(mode, input), mode)

    def _ratio(
        self, call: str, above: object, below: object, scope: object, util: _AllReduce | None
    ) -> float:
        pair = torch.stack([_total(call, above).sum(), _total(call, below).sum()])
        return _quotient(self._by(util, scope).all_reduce(pair))

    def _by(self, util: _AllReduce | None, scope: object) -> _AllReduce:
        if scope is not None:
            raise NotSupportedError(
                f"scope is {scope!r}, but fleet has no scopes. Pass the values themselves."
            )
        return self._util if util is None else util


def _given(call: str, value: object) -> object:
    if isinstance(value, str):
        raise UsageError(
            f"fleet.metrics.{call} was given {value!r}, but fleet has no variables by name. Pass the values."
        )
    return value


def _total(call: str, value: object) -> Tensor:
    """Return the value as a float64 vector on the CPU."""
    try:
        total = torch.as_tensor(_given(call, value)).detach().to("cpu", torch.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"fleet.metrics.{call} was given {value!r}, which is not numeric: {error}"
        ) from error
    if not bool((torch.isfinite(total) & (total >= 0)).all()):
        raise UsageError(
            f"fleet.metrics.{call} was given {value!r}; counts and sums must be finite and at least 0"
        )
    return total
