"""What `ddp.py` runs in each process: the same steps with fleet's wrappers or with DDP alone.

    _ddp_script.py ours|torch|both mlp|resnet18 OUT

Rank 0 writes seconds per step, one figure for each window of steps, into OUT. `both`: two models in the same
processes, window by window in turns, and what torch's took over what ours did.
"""

from __future__ import annotations

import json
import os
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
PAIRS = 20


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


Trained = tuple[nn.Module, torch.optim.Optimizer]


def made(name: str) -> nn.Module:
    if name == "resnet18":
        return ResNet(layers=18, class_dim=CASES[name].classes)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def by_fleet(model: nn.Module) -> Trained:
    fleet.init(is_collective=True)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    return fleet.distributed_model(model), optimizer


def by_torch(model: nn.Module) -> Trained:
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)


def window(trained: Trained, case: Case, steps: int) -> float:
    """Seconds per step."""
    model, optimizer = trained
    values = torch.randn(case.batch, *case.shape)
    labels = torch.randint(0, case.classes, (case.batch,))
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(values), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / steps


def timed(trained: Trained, case: Case) -> list[float]:
    """One figure for each window, after one that does not count."""
    return [window(trained, case, case.steps) for _ in range(WINDOWS + 1)][1:]


def in_turns(ours: Trained, theirs: Trained, case: Case) -> list[float]:
    """Their time divided by ours, for adjacent windows."""
    steps = max(1, case.steps // 6)
    pairs = [(window(theirs, case, steps), window(ours, case, steps)) for _ in range(PAIRS + 1)]
    return [torchs / fleets for torchs, fleets in pairs[1:]]


def main() -> None:
    way, name, out = sys.argv[1:]
    torch.manual_seed(0)
    case = CASES[name]
    if way == "both":
        ours = by_fleet(made(name))
        other = DistributedDataParallel(made(name))
        theirs = other, torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
        figures = in_turns(ours, theirs, case)
    else:
        figures = timed((by_fleet if way == "ours" else by_torch)(made(name)), case)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(figures))
    dist.barrier()
    if way == "torch":
        dist.destroy_process_group()
        # The measuring is over. Gloo's threads sometimes abort a process that ends in the usual way now,
        # which torchrun would take for a failure; fleet waits for them.
        os._exit(0)


if __name__ == "__main__":
    main()
