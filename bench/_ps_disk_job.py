"""The job of ps_disk.py: one server, one trainer, a table whose rows are used by a power law.

Argument: JSON of folder, rows, dim, slots, batch, power, steps, configs (ps_configs) and table (of
sparse_table_configs). First every row is trained once, in the order in which ids of such a stream appear.
The trainer writes `begun` into the folder before that and `filled` after it, waits for `go`, and takes the
time of the steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainers import fleet
from trainers.ps import Constant, SparseEmbedding

_FILLED_AT_ONCE = 100_000
_UNTIMED = 500


class Clicks(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ids = SparseEmbedding(dim, init=Constant(0.01))
        self.out = torch.nn.Linear(dim, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.ids(ids).sum(1))[:, 0]
        return result


def ids_of(ranks: np.ndarray) -> torch.Tensor:
    """Any order would do but that of the ranks."""
    return torch.from_numpy((ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))


def first_appearances(rows: int, power: float) -> np.ndarray:
    """Ranks in the order in which they would first be drawn: by exponential times of waiting."""
    random = np.random.default_rng(0)
    return np.argsort(random.exponential(size=rows) * np.arange(1.0, rows + 1) ** power) + 1


def batches(options: dict[str, Any], steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rows, exponent = options["rows"], 1 - options["power"]
    shape = options["batch"], options["slots"]
    for step in range(steps):
        random = np.random.default_rng([1, step])
        drawn = (random.random(shape) * ((rows + 1) ** exponent - 1) + 1) ** (1 / exponent)
        ranks = np.minimum(drawn.astype(np.int64), rows)
        yield ids_of(ranks), torch.from_numpy((random.random(shape[0]) < 0.3).astype(np.float32))


def train(options: dict[str, Any], model: torch.nn.Module, optimizer: fleet.DistributedOptimizer) -> None:
    folder, slots = Path(options["folder"]), options["slots"]

    def step(ids: torch.Tensor, clicks: torch.Tensor) -> None:
        optimizer.minimize(torch.nn.functional.binary_cross_entropy_with_logits(model(ids), clicks))

    (folder / "begun").touch()
    order = first_appearances(options["rows"], options["power"])
    for start in range(0, len(order), _FILLED_AT_ONCE):
        some = ids_of(order[start : start + _FILLED_AT_ONCE])
        some = some[: len(some) // slots * slots].view(-1, slots)
        step(some, torch.zeros(len(some)))
    (folder / "filled").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    prepared = list(batches(options, options["steps"] + _UNTIMED))
    started = 0.0
    for number, (ids, clicks) in enumerate(fleet.prefetch(prepared, lambda batch: batch[0])):
        if number == _UNTIMED:
            started = time.monotonic()
        step(ids, clicks)
    seconds = time.monotonic() - started
    (folder / "result").write_text(str(options["steps"] * options["batch"] / seconds))


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.ps_configs = options["configs"]
    strategy.sparse_table_configs = {"ids.weight": options["table"]}
    model = fleet.distributed_model(Clicks(options["dim"]))
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.01), strategy)
    if fleet.is_server():
        Path(options["folder"], "server").write_text(str(os.getpid()))
        fleet.init_server()
        return fleet.run_server()
    fleet.init_worker()
    train(options, model, optimizer)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
