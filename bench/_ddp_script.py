"""What `ddp.py` runs in each process: the same steps with fleet's wrappers or with DDP alone.

    _ddp_script.py ours|torch mlp|resnet18 OUT

Rank 0 writes seconds per step, one figure for each window of steps, into OUT.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainers import fleet
from trainers.zoo.resnet import ResNet

WINDOWS = 5


@dataclass(frozen=True, slots=True)
class Case:
    shape: tuple[int, ...]
    classes: int
    batch: int
    steps: int  # to a window


CASES = {
    "mlp": Case(shape=(64,), classes=10, batch=64, steps=300),
    "resnet18": Case(shape=(3, 32, 32), classes=10, batch=16, steps=6),
}


def made(name: str) -> nn.Module:
    if name == "resnet18":
        return ResNet(layers=18, class_dim=CASES[name].classes)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def by_fleet(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    fleet.init(is_collective=True)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    return fleet.distributed_model(model), optimizer


def by_torch(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)


def timed(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case) -> list[float]:
    """Seconds per step of each window, after one that does not count."""
    values = torch.randn(case.batch, *case.shape)
    labels = torch.randint(0, case.classes, (case.batch,))
    found = []
    for _ in range(WINDOWS + 1):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(case.steps):
            loss = nn.functional.cross_entropy(model(values), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((time.perf_counter() - began) / case.steps)
    return found[1:]


def main() -> None:
    way, name, out = sys.argv[1:]
    torch.manual_seed(0)
    model, optimizer = (by_fleet if way == "ours" else by_torch)(made(name))
    seconds = timed(model.train(), optimizer, CASES[name])
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(seconds))
    dist.barrier()
    if way == "torch":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
