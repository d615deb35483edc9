"""The job behind bench/serving.py: `_serving_job.py FOLDER`. One table whose rows change all the time, and
one row that counts the steps. Tells in FOLDER: `filled` when all rows are there, `pushes` with the time
before each step, `server.pid`; it ends when there is a file `stop`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from trainers import fleet
from trainers.ps import Constant, SparseEmbedding

SLOTS, DIM, COUNTER = 26, 16, 0
ROWS = int(os.environ.get("ROWS", "1000000"))
CHANGED_PER_S = int(os.environ.get("CHANGED_PER_S", "10000"))
PERIOD_S = 0.2


class Model(torch.nn.Module):
    """Ids (batch, 26) to a score, and the rows of the first ids."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table
        self.deep = torch.nn.Sequential(
            torch.nn.Linear(SLOTS * DIM, 256), torch.nn.ReLU(),
            torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = self.table(ids)
        return {"score": self.deep(rows.flatten(1))[:, 0], "first": rows[:, 0]}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.ps_configs = {
        "publish": str(folder / "published"),
        "publish_interval_s": float(os.environ["INTERVAL_S"]),
        "durability": "log",
        "durability_dir": str(folder / "kept"),
        "trainer_timeout_s": 60.0,
    }
    model = fleet.distributed_model(Model(SparseEmbedding(DIM, init=Constant(0.0))))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
    if fleet.is_server():
        (folder / "server.pid").write_text(str(os.getpid()))
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    fleet.save_inference_model(folder / "bundle", model, torch.zeros(2, SLOTS, dtype=torch.long), rows=False)
    generator = torch.Generator().manual_seed(1)
    for start in range(1, ROWS, 50_000):
        step(model, optimizer, torch.arange(start, min(start + 50_000, ROWS)))
    fleet.publish()
    (folder / "filled").touch()
    with (folder / "pushes").open("a", buffering=1) as pushes:
        while not (folder / "stop").exists():
            ids = torch.randint(1, ROWS, (int(CHANGED_PER_S * PERIOD_S),), generator=generator)
            began = time.time()
            step(model, optimizer, ids)
            pushes.write(f"{began}\n")
            time.sleep(max(0.0, began + PERIOD_S - time.time()))
    fleet.stop_worker()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    """The counter's row grows by 1, the others by a hundredth of that."""
    rows = model.table(torch.cat([torch.tensor([COUNTER]), ids]))
    optimizer.minimize(-rows[0].sum() - 0.01 * rows[1:].sum())  # type: ignore[attr-defined]  # fleet's


if __name__ == "__main__":
    main(Path(sys.argv[1]))
