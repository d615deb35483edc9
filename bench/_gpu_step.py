"""What `gpu.py` runs: the same steps on one device with fleet and without it.

    _gpu_step.py ddp|tables ours|torch DEVICE OUT [STEPS]
    _gpu_step.py assert|work ours DEVICE OUT

Writes seconds per step into OUT, one figure for each window of steps. `assert` ends with an index that is out
of range on the device. `work` keeps 1 GiB and multiplies until it is stopped.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

WINDOWS, STEPS = 6, 100
TABLES, ROWS, DIM, BATCH = 26, 100_000, 16, 1024
Step = Callable[[], None]


def main() -> None:
    what, way, device, out, *steps = sys.argv[1:]
    torch.manual_seed(0)
    ending(what, torch.device(device)) if what in ("assert", "work") else None
    made = {"ddp": ddp, "tables": tables}[what](way == "ours", torch.device(device))
    if made is None:
        return
    step, end = made
    figures = [window(step, torch.device(device), int(*steps or [STEPS])) for _ in range(WINDOWS + 1)]
    Path(out).write_text(json.dumps(figures[1:]))
    end()


def window(step: Step, device: torch.device, steps: int) -> float:
    """Return seconds per step."""
    wait_for(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait_for(device)
    return (time.perf_counter() - began) / steps


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def perceptron(*sizes: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def ddp(ours: bool, device: torch.device) -> tuple[Step, Step]:
    """Return a data parallel step of one rank."""
    model = perceptron(512, 2048, 2048).to(device)
    if ours:
        from trainers import fleet

        fleet.init(is_collective=True)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        wrapped, end = fleet.distributed_model(model), lambda: None
    else:
        import torch.distributed as dist

        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
        end = dist.destroy_process_group
    values, labels = torch.randn(256, 512, device=device), torch.randint(0, 10, (256,), device=device)

    def step() -> None:
        cross_entropy(wrapped(values), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, end


class Clicks(nn.Module):
    """Tables for ids, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM, sparse=True) for _ in range(TABLES))
        self.dense = perceptron(TABLES * DIM, 256, 128)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)]
        return self.dense(torch.cat(rows, 1))[:, 0]


def batches() -> Iterator[Tensor]:
    """Yield ids (BATCH, TABLES) without an end. A few of them are in most batches, as in click logs."""
    while True:
        yield (torch.rand(BATCH, TABLES).pow_(4) * ROWS).long()


def tables(ours: bool, device: torch.device) -> tuple[Step, Step] | None:
    """Return a step with the tables on a server, or in the memory of the device."""
    model: nn.Module = Clicks()
    sparse = [each for name, each in model.named_parameters() if name.startswith("tables")]
    dense = [each for name, each in model.named_parameters() if not name.startswith("tables")]
    feed, target = batches(), torch.rand(BATCH, device=device).round()
    if ours:
        from trainers import fleet

        fleet.init()
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = True
        optimizers = [torch.optim.SGD(sparse, lr=0.1), torch.optim.Adam(dense, lr=0.001)]
        model = fleet.distributed_model(model if fleet.is_server() else model.to(device))
        optimizers = [fleet.distributed_optimizer(each, strategy) for each in optimizers]
        if fleet.is_server():
            fleet.init_server()
            fleet.run_server()
            return None
        fleet.init_worker()
        modules = list(model.tables)
        feed = iter(fleet.prefetch(feed, lambda ids: dict(zip(modules, ids.unbind(1), strict=True))))
        end = fleet.stop_worker
    else:
        model = model.to(device)
        optimizers, end = [torch.optim.SGD(sparse, lr=0.1), torch.optim.Adam(dense, lr=0.001)], lambda: None

    def step() -> None:
        ids = next(feed)
        binary_cross_entropy_with_logits(model(ids if ours else ids.to(device)), target).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    return step, end


def ending(what: str, device: torch.device) -> None:
    if what == "assert":
        nn.Embedding(10, 4).to(device)(torch.tensor([3, 11]).to(device))
        wait_for(device)
    held = torch.ones(1 << 28, device=device)
    while what == "work":
        held.view(1 << 14, -1).mm(held.view(-1, 1 << 14)[:, :1024]).sum().item()
        print("step", flush=True)


if __name__ == "__main__":
    main()
