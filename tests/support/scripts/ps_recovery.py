"""Training that goes on after kills: `ps_recovery FOLDER MODE DURABILITY STEPS PAUSE_MS`. Each step of each
trainer is a function of its number, so a run with kills can be compared with one without, bit for bit. No
step is made before the step_limit in the folder is long enough.
"""

import sys
import time
from pathlib import Path

import torch

from tests.support.scripts import step_limit
from trainers import fleet
from trainers.ps import RowWiseAdam, SparseEmbedding, Uniform


class Model(torch.nn.Module):
    """More ids than there is room for, an embedding with rows of its own, and dense layers on two servers."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = SparseEmbedding(4, init=Uniform(-0.5, 0.5, seed=3), max_rows=300)
        self.words = torch.nn.Embedding(50, 4, sparse=True)
        self.wide = torch.nn.Linear(8, 2100)
        self.out = torch.nn.Linear(2100, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.ids(ids).mean(1), self.words(ids % 50).mean(1)], dim=1)
        result: torch.Tensor = self.out(torch.tanh(self.wide(joined)))[:, 0] / 45
        return result


def main() -> None:
    folder, mode, durability, steps, pause_ms = sys.argv[1:]
    torch.set_num_threads(1)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = mode == "async"
    strategy.ps_configs = {
        "durability": durability,
        "durability_dir": f"{folder}/kept",
        "snapshot_interval_s": 0.7,
        "trainer_timeout_s": 60.0,
        "log_fsync": "no",
    }
    torch.manual_seed(0)
    model = fleet.distributed_model(Model())
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    lean = {"rule": RowWiseAdam(), "lr": 0.01, "dtype": "bfloat16"}
    strategy.sparse_table_configs = {"words.weight": lean}
    optimizer = fleet.distributed_optimizer(adamw, strategy)
    if fleet.is_server():
        fleet.init_server()
        return fleet.run_server()
    fleet.init_worker()
    print("resumed at", fleet.resume_step(), flush=True)
    rank = fleet.worker_index()
    for step in range(fleet.resume_step(), int(steps)):
        step_limit.wait(Path(folder, "step_limit"), step)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        ids = torch.randint(-500, 500, (8, 3), generator=generator)
        target = torch.randn(8, generator=generator)
        optimizer.minimize(torch.nn.functional.mse_loss(model(ids), target))
        print("step", step, flush=True)
        time.sleep(int(pause_ms) / 1000)
    fleet.barrier_worker()
    if fleet.is_first_worker():
        fleet.save_persistables(f"{folder}/saved")
    fleet.stop_worker()
    print("done", flush=True)
    torch.save(model.state_dict(), Path(folder) / f"model.{rank}.pt")


if __name__ == "__main__":
    main()
