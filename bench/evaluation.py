"""What it costs that all ranks evaluate with the buffers of rank 0: `python bench/evaluation.py [PAIRS]`.

Two processes make blocks of training steps, each block followed by a switch to evaluation: with the exchange
of buffers and without, in turns. Prints medians in ms a step, and the median of the differences of the pairs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from _ddp_script import CASES
from torch import nn

from trainers.collective.data_parallel import DataParallel
from trainers.zoo.resnet import ResNet

STEPS = {"mlp": 30, "resnet18": 3}


class WithoutExchange(DataParallel):
    def _send(self) -> None:
        pass


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))


def block(model: nn.Module, batch: torch.Tensor, steps: int) -> tuple[float, float]:
    """CPU and wall time of a step, in ms."""
    cpu, wall = time.process_time(), time.perf_counter()
    model.train()
    for _ in range(steps):
        model.zero_grad()
        model(batch).square().mean().backward()
    model.eval()
    return 1e3 * (time.process_time() - cpu) / steps, 1e3 * (time.perf_counter() - wall) / steps


def run(rank: int, pairs: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for name, plain in (("mlp", mlp()), ("resnet18", ResNet(18, 10))):
        batch = torch.randn(CASES[name].batch, *CASES[name].shape)
        models = [DataParallel(plain), WithoutExchange(plain)]
        for model in models:
            block(model, batch, STEPS[name])
        found = []
        for number in range(pairs):
            order = models if number % 2 else models[::-1]
            times = {model: block(model, batch, STEPS[name]) for model in order}
            found.append([times[model] for model in models])
        for place, kind in enumerate(("CPU", "wall")) if rank == 0 else ():
            ours, without = ([pair[side][place] for pair in found] for side in (0, 1))
            more = statistics.median(one - other for one, other in zip(ours, without, strict=True))
            middle = statistics.median(without)
            print(f"{name}: {kind} {middle:.2f} ms a step without the exchange, {more:+.2f} ms with it")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (int(sys.argv[1]) if sys.argv[1:] else 40, folder), 2)
