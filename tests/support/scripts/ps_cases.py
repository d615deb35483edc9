"""Train every case, one job after the other in the same processes: `ps_cases OUT MODE STEPS CASE...`.
MODES has the modes.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.support.training import CASES, TwoTables, batch, loss_of
from trainers.fleet import Fleet
from trainers.optimizer import DistributedOptimizer
from trainers.strategy import DistributedStrategy

Batch = tuple[torch.Tensor, torch.Tensor]

MODES: dict[str, dict[str, Any]] = {
    "sync": {"a_sync": False},
    "sync_prefetch": {"a_sync": False},
    "sync_allreduce": {"a_sync": False, "dense": "allreduce"},
    "async": {"a_sync": True},
    "async_prefetch": {"a_sync": True},
    "bounded_prefetch": {"a_sync": True, "a_sync_configs": {"max_staleness": 3}},
    "receive_prefetch": {
        "a_sync": True,
        "a_sync_configs": {"independent_recv": True, "max_merge_var_num": 2},
    },
    "sync_by_name": {"a_sync": False, "ps_configs": {"split_method": "HashName", "slice_var_up": False}},
    "in_order_allreduce": {"a_sync": True, "a_sync_configs": {"overlap": False}, "dense": "allreduce"},
    "async_allreduce": {"a_sync": True, "dense": "allreduce"},
    "in_order": {"a_sync": True, "a_sync_configs": {"overlap": False}},
    "in_order_prefetch": {"a_sync": True, "a_sync_configs": {"overlap": False}},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 7}},
    "geo_prefetch": {"a_sync": True, "a_sync_configs": {"k_steps": 7}},
}


def train(fleet: Fleet, name: str, out: Path, mode: str, steps: int) -> None:
    case = CASES[name]
    fleet.init(is_collective=False)
    strategy = DistributedStrategy()
    for field, value in MODES[mode].items():
        setattr(strategy, field, value)
    torch.manual_seed(fleet.worker_index())  # trainers start from different values: trainer 0's must win
    model = TwoTables()
    optimizer = fleet.distributed_optimizer(case.served(model), strategy)
    fleet.distributed_model(model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    file = out / f"{name}.{fleet.worker_index()}.pt"
    train_here(fleet, model, optimizer, case.decay, file, steps, prefetch=mode.endswith("prefetch"))


def train_here(
    fleet: Fleet,
    model: TwoTables,
    optimizer: DistributedOptimizer,
    decay: float,
    out: Path,
    steps: int,
    *,
    prefetch: bool,
) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    fleet.init_worker()
    rank, trainers = fleet.worker_index(), fleet.worker_num()
    batches: Iterable[Batch] = [batch(step, trainers, rank) for step in range(steps)]
    if prefetch:  # of one embedding, which is called twice a step; the other fetches as it goes
        batches = fleet.prefetch(batches, lambda batch: {model.words: [batch[0][:, :3], batch[0][:, 3]]})
    for step, (ids, targets) in enumerate(batches):
        loss = torch.nn.functional.mse_loss(model(ids), targets)
        if step % 2:
            optimizer.minimize(loss)
        else:
            loss.backward()
            optimizer.step()
            model.clear_gradients()
        schedule.step()
    fleet.barrier_worker()
    during = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        served_loss = loss_of(model.eval(), 0, trainers, None)
    fleet.stop_worker()
    with torch.no_grad():
        own_loss = loss_of(model, 0, trainers, None)
    torch.save(
        {
            "during": during,
            "after": model.state_dict(),
            "evaluated": (served_loss.item(), own_loss.item()),
        },
        out,
    )


def main() -> None:
    out, mode, steps, *names = sys.argv[1:]
    for name in names:
        train(Fleet(), name, Path(out), mode, int(steps))
    print("done", flush=True)


if __name__ == "__main__":
    main()
