"""The job of ps_stream.py: one server and one trainer learn a stream of clicks whose ids are always new ones.

Argument: JSON of folder, examples, configs (ps_configs) and table (of sparse_table_configs). The server
writes its process id into the folder, the trainer its position and in the end its result.

The truth: an example has SLOTS ids; w(id) is a normal number, a pure function of the id; a click has the
probability sigmoid(sum of w - 1). The r-th newest id is drawn with a probability of about 1 / r.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import xxhash

from trainers import fleet
from trainers.metrics import Auc
from trainers.ps import SparseEmbedding, Uniform, read_values

BATCH, SLOTS, DIM, LR = 1024, 8, 16, 0.1
IDS, NEW = 400_000, 1.5
"""How many of the newest ids are drawn, and how many new ones come with an example."""
COUNTED_FROM = 0.3
"""Predictions count from this share of the stream on."""

Batch = tuple[torch.Tensor, torch.Tensor]


class Clicks(torch.nn.Module):
    """Logistic regression on the sum of an example's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = SparseEmbedding(DIM, init=Uniform(-0.05, 0.05, seed=1))
        self.out = torch.nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.ids(ids).sum(1))[:, 0]
        return result


def weights_of(ids: np.ndarray) -> np.ndarray:
    """Normal numbers, by the sum of four uniform ones."""
    words = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    words ^= words >> np.uint64(32)
    parts = (words[..., None] >> np.array([0, 16, 32, 48], np.uint64)) & np.uint64(0xFFFF)
    return np.asarray((parts.sum(-1) / 65536 - 2) * math.sqrt(3))


def stream(first: int, steps: int) -> Iterator[Batch]:
    for step in range(first, steps):
        random = np.random.default_rng(step)
        newest = IDS + NEW * (step * BATCH + np.arange(BATCH))
        ranks = np.exp(random.random((BATCH, SLOTS)) * math.log(IDS))
        ids = (newest[:, None] - ranks).astype(np.int64)
        chance = 1 / (1 + np.exp(1 - weights_of(ids).sum(1)))
        clicks = (random.random(BATCH) < chance).astype(np.float32)
        yield torch.from_numpy(ids), torch.from_numpy(clicks)


def train(folder: Path, steps: int, model: torch.nn.Module, optimizer: fleet.DistributedOptimizer) -> None:
    metric, best = Auc(1 << 16), fleet.resume_step()
    for step, (ids, clicks) in enumerate(fleet.prefetch(stream(best, steps), lambda batch: batch[0]), best):
        logits = model(ids)
        if step >= COUNTED_FROM * steps:
            metric.update(torch.sigmoid(logits.detach()), clicks)
        optimizer.minimize(torch.nn.functional.binary_cross_entropy_with_logits(logits, clicks))
        if step % 10 == 0:
            (folder / "position").write_text(str(step / steps))
    (folder / "position").write_text("1")
    fleet.save_persistables(str(folder / "saved"), mode=2)
    rows = read_values(folder / "saved").sparse["ids.weight"]
    digest = xxhash.xxh3_64_hexdigest(rows.keys.numpy().tobytes() + rows.values.numpy().tobytes())
    result = {"auc": metric.value(), "rows": len(rows.keys), "digest": digest}
    (folder / "result").write_text(json.dumps(result))


def main() -> None:
    options = json.loads(sys.argv[1])
    folder, steps = Path(options["folder"]), options["examples"] // BATCH
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    strategy.ps_configs = options["configs"]
    strategy.sparse_table_configs = {"ids.weight": options["table"]}
    model = fleet.distributed_model(Clicks())
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=LR), strategy)
    if fleet.is_server():
        (folder / "server").write_text(str(os.getpid()))
        fleet.init_server()
        return fleet.run_server()
    fleet.init_worker()
    train(folder, steps, model, optimizer)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
