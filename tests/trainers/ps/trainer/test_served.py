"""The optimizer that a script gets for the one it gave."""

import pytest
import torch

from trainers.errors import UsageError
from trainers.ps.optimizer import ServedOptimizer, ServedScaler


class Stepper:
    def __init__(self) -> None:
        self.serving = True
        self.scaler: ServedScaler | None = None
        self.kept = False
        self.worker = None
        self.steps = 0

    def step(self, optimizer: ServedOptimizer, *, overflow: bool = False) -> None:
        self.steps += 1

    def drop_rows(self, optimizer: ServedOptimizer) -> None:
        return

    def agree(self, overflow: bool) -> bool:
        return overflow


def test_a_step_of_the_wrapped_optimizer_is_refused_while_servers_train() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    stepper = Stepper()
    served = ServedOptimizer(torch.optim.SGD([weight], lr=0.5), stepper)
    served.freeze_options()
    with pytest.raises(UsageError, match=r"SGD\.step\(\)"):
        served.inner.step()
    served.step()
    assert stepper.steps == 1
    assert weight.item() == 1.0
    served.local_step()  # what geo training does
    assert weight.item() == 0.5
    stepper.serving = False  # after stop_worker it is an ordinary optimizer again
    served.inner.step()
    assert weight.item() == 0.0
