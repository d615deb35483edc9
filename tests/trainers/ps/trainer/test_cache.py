from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainers.ps.tables.rules import SGD, Adagrad
from trainers.ps.tables.run import NOT_IN
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.trainer.local import Cache


def table(number: int) -> SparseParameter:
    module: Any = None
    spec = TableSpec(kind=TableKind.SPARSE, name=f"t{number}", size=2, rule=SGD())
    return SparseParameter(
        name=spec.name, module=module, group=None, own_lr=1.0, table=number, spec=spec, rule=Adagrad()
    )


def of(*spans: int) -> Any:
    return np.array(spans)


def cache() -> Cache:
    """Keys 4 and 9 of the first table, and 4 of the second."""
    kept = Cache([table(0), table(1)])
    kept.assign(of(2, 1), torch.tensor([4, 9, 4]), torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))
    return kept


def test_rows_that_are_not_here_are_named() -> None:
    rows, counts, missing = cache().known(of(3, 2), torch.tensor([9, 5, 4, -1, 4]))
    assert counts.tolist() == [1, 1]
    assert missing.tolist() == [1, 3]
    assert rows[[0, 2, 4]].tolist() == [[2, 2], [1, 1], [3, 3]]


def test_changes_are_those_since_the_last_exchange() -> None:
    kept = cache()
    for _ in range(2):
        kept.train(of(NOT_IN, 1), torch.tensor([4]), torch.ones(1, 2), 0.5)
    spans, changed, by = kept.changes()
    assert (spans.tolist(), changed.tolist()) == ([0, 1], [4])
    after = kept.known(of(0, 1), changed)[0]
    assert torch.allclose(by, after - 3.0)
    assert bool((by < -0.5).all())
    assert kept.changes()[1].tolist() == []


def test_new_values_leave_the_optimizer_state_alone() -> None:
    """A second step of Adagrad is smaller than the first, wherever the values come from."""
    kept, keys = cache(), torch.tensor([9])
    kept.train(of(1, NOT_IN), keys, torch.ones(1, 2), 1.0)
    kept.changes()
    kept.assign(of(1, 0), keys, torch.zeros(1, 2))
    kept.train(of(1, NOT_IN), keys, torch.ones(1, 2), 1.0)
    assert torch.allclose(kept.changes()[2], torch.full((1, 2), -(0.5**0.5)), atol=1e-6)
