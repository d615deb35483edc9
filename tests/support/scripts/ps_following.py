"""A job whose versions are served: `ps_following FOLDER STEPS MORE`. Its steps are those of their numbers, so
that what is served can be compared with what another run had at the same step. No step is made before the
step_limit in the folder is long enough. MORE: ps_configs, as JSON; with "every", trainer 0 saves the values
before each step; without it, it writes the bundle that is served, and the job publishes.
"""

import json
import sys
from pathlib import Path

import torch

from tests.support.scripts import step_limit
from trainers import fleet
from trainers.ps import Normal, SparseEmbedding

WORDS, IDS = 40, 900


class Model(torch.nn.Module):
    """Gives the rows that it reads: of any id, of a table that is full, of tables of fixed size, of bags."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = SparseEmbedding(4, init=Normal(0.0, 0.1, seed=3), padding_idx=7)
        self.full = SparseEmbedding(3, init=Normal(0.0, 0.1, seed=4), dtype=torch.bfloat16)
        self.words = torch.nn.Embedding(WORDS, 4, sparse=True, padding_idx=0)
        self.few = torch.nn.Embedding(WORDS, 4, sparse=True, padding_idx=0)
        self.bags = torch.nn.EmbeddingBag(WORDS, 4, mode="mean", sparse=True, padding_idx=2)
        self.wide = torch.nn.Linear(4, 900)
        self.out = torch.nn.Linear(900, 1)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """ids: (batch, 3)."""
        few = ids % WORDS
        rows = {"ids": self.ids(ids), "full": self.full(ids), "words": self.words(few)}
        rows["few"] = self.few(few)
        bags = self.bags(few)
        joined = rows["ids"].mean(1) + rows["words"].sum(1) + rows["few"].sum(1) + bags
        joined = joined + rows["full"].float().sum((1, 2))[:, None]
        return {**rows, "bags": bags, "out": self.out(torch.tanh(self.wide(joined)))[:, 0] / 30}


def main() -> None:
    folder, steps, rest = sys.argv[1:]
    more = json.loads(rest)
    every = more.pop("every", False)
    torch.set_num_threads(1)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.ps_configs = {"durability_dir": f"{folder}/kept", "trainer_timeout_s": 60.0, **more}
    strategy.sparse_table_configs = {"full.weight": {"max_rows": 200}, "few.weight": {"max_rows": 20}}
    torch.manual_seed(0)
    model = fleet.distributed_model(Model())
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.05), strategy)
    if fleet.is_server():
        fleet.init_server()
        return fleet.run_server()
    fleet.init_worker()
    rank = fleet.worker_index()
    if not rank and not every and not fleet.resume_step():
        fleet.save_inference_model(f"{folder}/bundle", model, torch.zeros(2, 3, dtype=torch.long), rows=False)
    for step in range(fleet.resume_step(), int(steps)):
        step_limit.wait(Path(folder, "step_limit"), step)
        if every and not rank:
            fleet.save_persistables(f"{folder}/at/{step}", mode=2)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        out = model(torch.randint(0, IDS, (8, 3), generator=generator))["out"]
        target = torch.randn(8, generator=generator)
        optimizer.minimize(torch.nn.functional.mse_loss(out, target))
        print("step", step, flush=True)
    fleet.stop_worker()
    assert not model.few.weight[0].any(), "its row has left the table"


if __name__ == "__main__":
    main()
