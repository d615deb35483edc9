"""Trainers with unequal numbers of batches: `unequal_cases OUT`, or `unequal_cases sharded`, by two
processes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainers import fleet, static
from trainers.data.slots import Batch, Layout, Slot
from trainers.errors import FleetError

strategy = fleet.DistributedStrategy()
if sys.argv[1] == "sharded":
    strategy.sharding, strategy.sharding_configs = True, {"stage": 3}
fleet.init(is_collective=True, strategy=strategy)
RANK = fleet.worker_index()
model = fleet.distributed_model(torch.nn.Linear(2, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def batches(count: int) -> list[Batch]:
    layout, ids = Layout.of([Slot("x", "float32", 2)]), torch.empty(3, 0, dtype=torch.int64)
    return [Batch(layout, torch.full((3, 2), float(RANK + step)), ids) for step in range(count)]


def step(batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(batch["x"]).square().mean()
    optimizer.minimize(loss)
    return loss


def network(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": model(x).square().mean()}


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except FleetError as error:
        return str(error)
    return "nothing"


def main(out: str) -> None:
    program = static.Program(model, [static.data("x", [None, 2], "float32")], network, optimizer=optimizer)
    exe = static.Executor()
    found: dict[str, Any] = {
        "fleet": fleet.train_from_dataset(step, batches(3 + 2 * RANK)).batches,
        "turned": fleet.train_from_dataset(step, batches(5 - 2 * RANK)).batches,
        "equal": fleet.train_from_dataset(step, batches(4)).batches,
        "empty": fleet.train_from_dataset(step, batches(0)).batches,
        "executor": exe.train_from_dataset(program, batches(2 + 3 * RANK)).batches,
        "tested": exe.infer_from_dataset(program, batches(2 + 3 * RANK)).batches,
        "none": refused(lambda: fleet.train_from_dataset(step, batches(RANK))),
    }
    model.eval()
    found["inferred"] = fleet.infer_from_dataset(
        lambda batch: model(batch["x"]).sum(), batches(1 + RANK)
    ).batches
    if RANK == 1:
        alone = static.Program(
            torch.nn.Linear(2, 1), [static.data("x", [None, 2], "float32")], network,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        )  # fmt: skip
        found["alone"] = exe.train_from_dataset(alone, batches(2)).batches
    found["weight"] = next(model.parameters()).detach().clone()
    torch.save(found, Path(out) / f"{dist.get_rank()}.pt")


def sharded() -> None:
    """A forward pass gathers the parameters, so that no rank can make one alone."""
    model.eval()
    result = fleet.infer_from_dataset(lambda batch: model(batch["x"]).sum(), batches(2 + 3 * RANK))
    print("batches", result.batches)


if __name__ == "__main__":
    if sys.argv[1] == "sharded":
        sharded()
    else:
        main(sys.argv[1])
