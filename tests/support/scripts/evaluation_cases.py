"""With what ranks evaluate: `evaluation_cases OUT`, by two processes. Each case is a training of its own;
what it finds goes to `OUT/RANK.pt` under its name.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.scripts.strategy_cases import begin, values
from tests.support.strategies import Net, batch, loss_of, merged, momentum, sharded
from trainers.fleet import Fleet

TESTED = torch.linspace(-1, 1, 20).view(4, 5)
LOCAL = {"localsgd": True, "localsgd_configs": {"k_steps": 2, "begin_step": 3}}


def evaluate(model: torch.nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        out: torch.Tensor = model(TESTED)
    model.train()
    return out


def trained(fields: dict[str, Any], steps: int = 5) -> tuple[Any, list[torch.Tensor]]:
    """An evaluation after each step; none after the first, as before a second forward pass."""
    job, found = begin(fields, norm=True), []
    for step, loss in zip(range(steps), job.losses(), strict=False):
        job.optimizer.minimize(loss)
        if step:
            found.append(evaluate(job.model))
    return job, found


def alike() -> dict[str, Any]:
    cases = {
        "plain": {},
        "merged": merged(2),
        "stage 1": sharded(1),
        "stage 2": sharded(2),
        "stage 3": sharded(3),
    }
    return {name: torch.stack(trained(fields)[1]) for name, fields in cases.items()}


def as_torch() -> dict[str, Any]:
    """Evaluations, and a training with them and without."""
    job, found = trained({})
    quiet = begin({}, norm=True)
    for _, loss in zip(range(5), quiet.losses(), strict=False):
        quiet.optimizer.minimize(loss)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(norm=True))
    optimizer, expected = momentum(model.parameters()), []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, *batch(step, dist.get_rank())).backward()
        optimizer.step()
        if step:
            expected.append(evaluate(model))
    ends = {"fleet": values(job.plain), "torch": values(model.module), "quiet": values(quiet.plain)}
    return {"found": torch.stack(found), "expected": torch.stack(expected)} | ends


def one_alone() -> dict[str, Any]:
    """Each rank evaluates on its own, while the other goes on to wait at the next step."""
    job, _ = trained({})
    found = []
    for alone in (1, 0):
        if dist.get_rank() == alone:
            found = [evaluate(job.model)]
        job.optimizer.minimize(loss_of(job.model, *batch(0, dist.get_rank())))
    return {"found": found, "end": values(job.plain)}


def other_ways() -> dict[str, Any]:
    """An evaluation of the module inside, of a copy, between forward and backward, and of values that the
    script has set on its own.
    """
    job, _ = trained({})
    job.optimizer.minimize(loss_of(job.model, *batch(0, dist.get_rank())))
    twin = copy.deepcopy(job.model)
    loss = loss_of(job.model, *batch(1, dist.get_rank()))
    job.model.eval()
    inside = job.plain(TESTED).detach()
    job.model.train()
    job.optimizer.minimize(loss)
    job.optimizer.minimize(loss_of(job.model, *batch(2, dist.get_rank())))
    kept = job.plain.norm.running_mean.clone()  # type: ignore[operator,union-attr]
    job.plain.norm.running_var.data.fill_(2.0)  # type: ignore[operator,union-attr]
    job.model.eval()
    mean, var = job.plain.norm.running_mean, job.plain.norm.running_var
    return {"twin": evaluate(twin), "inside": inside, "var": var, "taken": not torch.equal(mean, kept)}  # type: ignore[arg-type]


def local() -> dict[str, Any]:
    """While each process trains its own model, it evaluates that."""
    job, _ = trained(LOCAL, steps=3)
    mean = job.plain.norm.running_mean.clone()  # type: ignore[operator,union-attr]
    evaluate(job.model)
    return {"kept": torch.equal(mean, job.plain.norm.running_mean), "mean": mean}  # type: ignore[arg-type]


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.layer(features)
        return out


def whole_numbers() -> dict[str, Any]:
    """A model whose buffers are none of floats."""
    fleet = Fleet()
    fleet.init(is_collective=True)
    model = fleet.distributed_model(Counting())
    loss_of(model, *batch(0, dist.get_rank())).backward()
    return {"calls": int(model.eval().module.calls)}


def main(out: str) -> None:
    cases: tuple[Callable[[], dict[str, Any]], ...] = (
        alike,
        as_torch,
        one_alone,
        other_ways,
        local,
        whole_numbers,
    )
    torch.save({case.__name__: case() for case in cases}, Path(out) / f"{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
