"""Training that goes on after kills: `ps_recovery FOLDER MODE DURABILITY STEPS PAUSE_MS [MORE]`. Each step of
each trainer is a function of its number, so a run with kills can be compared with one without, bit for bit.
No step is made before the step_limit in the folder is long enough. MORE: other ps_configs, as JSON; with
"every" among them, trainer 0 saves the values before each step.
"""

import json
import sys
import time
from pathlib import Path

import torch

from tests.support.scripts import step_limit
from trainers import fleet
from trainers.ps import RowWiseAdam, SparseEmbedding, Uniform

WIDTHS, SLOTS, WORDS = (4, 8, 12), 26, 50


class Model(torch.nn.Module):
    """26 tables of three widths, and dense layers on two servers. The even ones take any id, the first has
    more than there is room for; the others have rows of their own, and the first of these is lean.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTHS[slot % len(WIDTHS)] for slot in range(SLOTS)]
        self.slots = torch.nn.ModuleList(
            torch.nn.Embedding(WORDS, width, sparse=True)
            if slot % 2
            else SparseEmbedding(width, init=Uniform(-0.5, 0.5, seed=slot))
            for slot, width in enumerate(widths)
        )
        self.wide = torch.nn.Linear(sum(WIDTHS), 900)
        self.out = torch.nn.Linear(900, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (batch, slots, 3)."""
        rows = [table(ids[:, slot]).mean(1) for slot, table in enumerate(self.slots)]
        joined = [torch.stack(rows[first :: len(WIDTHS)]).sum(0) for first in range(len(WIDTHS))]
        result: torch.Tensor = self.out(torch.tanh(self.wide(torch.cat(joined, dim=1))))[:, 0] / 30
        return result


def ids_of(generator: torch.Generator) -> torch.Tensor:
    ids = torch.randint(-500, 500, (8, SLOTS, 3), generator=generator)
    ids[:, 1::2] %= WORDS
    return ids


def main() -> None:
    folder, mode, durability, steps, pause_ms, *rest = sys.argv[1:]
    more = json.loads(rest[0]) if rest else {}
    every = more.pop("every", False)
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
        **more,
    }
    torch.manual_seed(0)
    model = fleet.distributed_model(Model())
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    strategy.sparse_table_configs = {
        "slots.0.weight": {"max_rows": 300},
        "slots.1.weight": {"rule": RowWiseAdam(), "lr": 0.01, "dtype": "bfloat16"},
    }
    optimizer = fleet.distributed_optimizer(adamw, strategy)
    if fleet.is_server():
        fleet.init_server()
        return fleet.run_server()
    fleet.init_worker()
    print("resumed at", fleet.resume_step(), flush=True)
    rank = fleet.worker_index()
    for step in range(fleet.resume_step(), int(steps)):
        step_limit.wait(Path(folder, "step_limit"), step)
        if every and not rank:
            fleet.save_persistables(f"{folder}/at/{step}", mode=2)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        predicted = model(ids_of(generator))
        target = torch.randn(8, generator=generator)
        optimizer.minimize(torch.nn.functional.mse_loss(predicted, target))
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
