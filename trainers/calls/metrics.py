"""`fleet.metrics`: metrics of what all trainers have seen together. Knows Paddle's names for them; leaves
formulas to `trainers.metrics` and the adding up to `fleet.util`.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from trainers.errors import NotSupportedError, UsageError
from trainers.metrics import Metric, area_under


class _AllReduce(Protocol):
    def all_reduce(self, input: Any, mode: str = "sum", comm_world: str = "worker") -> Any: ...


class DistributedMetrics:
    """All trainers come to each call, and each gets the same answer: the metric of the union of their
    examples; nan where there are none. What is given may be a number, a list of numbers, an array or a
    tensor; nothing of it is changed.

    `scope` is there for Paddle's scripts and must be None: values are given, not names of variables. `util`:
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
        raise UsageError(f"fleet.metrics.{call} was given {value!r}, which is no numbers: {error}") from error
