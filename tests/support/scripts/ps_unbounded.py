"""Tables without an end, on any number of servers: `ps_unbounded FOLDER WIRE_DTYPE`."""

import sys

import torch

from trainers import fleet
from trainers.ps import FTRL, CountFilterEntry, Normal, SparseEmbedding

STEPS = 30


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = SparseEmbedding(3, init=Normal(0, 0.3, seed=11), padding_idx=0)
        self.rare = SparseEmbedding(2, entry=CountFilterEntry(3), padding_idx=0)
        self.far = torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True, device="meta")
        self.out = torch.nn.Linear(9, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = [self.ids(ids).sum(1), self.rare(ids).sum(1), self.far(ids * 2**40)]
        result: torch.Tensor = self.out(torch.cat(parts, dim=1))[:, 0]
        return result


def main() -> None:
    folder, wire_dtype = sys.argv[1:]
    torch.set_num_threads(1)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.ps_configs = {"wire_dtype": wire_dtype}
    strategy.sparse_table_configs = {"rare.weight": {"rule": FTRL(l1=0.001), "lr": 0.1}}
    torch.manual_seed(0)
    model = fleet.distributed_model(Model())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    if fleet.is_server():
        fleet.init_server()
        return fleet.run_server()
    fleet.init_worker()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + fleet.worker_index())
        ids = torch.randint(-6, 7, (5, 4), generator=generator) * (step // 10 + 1)
        optimizer.minimize((model(ids) - ids.sum(1).sign()).square().mean())
    fleet.barrier_worker()
    model.eval()
    with torch.no_grad():  # reads, and makes no rows
        unseen = model.ids(torch.tensor([[10**12, 0, -(2**63)]]))
        same = model.ids(torch.tensor([[10**12, 0, -(2**63)]]))
    assert torch.equal(unseen, same)
    assert unseen[0, 1].tolist() == [0, 0, 0]
    assert unseen[0, 0].abs().sum() > 0
    fleet.barrier_worker()
    if fleet.is_first_worker():
        fleet.save_persistables(folder)
    fleet.stop_worker()
    print("unseen", unseen.flatten().tolist(), flush=True)


if __name__ == "__main__":
    main()
