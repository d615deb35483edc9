"""Train every case, one job after the other in the same processes: `ps_cases OUT sync|async CASE...`."""

import sys
from pathlib import Path

import torch

from tests.support.training import CASES, STEPS, TwoTables, loss_of
from trainers.fleet import Fleet
from trainers.optimizer import DistributedOptimizer
from trainers.strategy import DistributedStrategy


def train(fleet: Fleet, name: str, out: Path, mode: str) -> None:
    case = CASES[name]
    fleet.init(is_collective=False)
    strategy = DistributedStrategy()
    strategy.a_sync = mode == "async"
    torch.manual_seed(fleet.worker_index())  # trainers start from different values: trainer 0's must win
    model = TwoTables()
    optimizer = fleet.distributed_optimizer(case.served(model), strategy)
    fleet.distributed_model(model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    train_here(fleet, model, optimizer, case.decay, out / f"{name}.{fleet.worker_index()}.pt")


def train_here(
    fleet: Fleet,
    model: TwoTables,
    optimizer: DistributedOptimizer,
    decay: float,
    out: Path,
) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    fleet.init_worker()
    rank, trainers = fleet.worker_index(), fleet.worker_num()
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, trainers, rank)
        if step % 2:
            optimizer.minimize(loss)
        else:
            loss.backward()
            optimizer.step()
            model.clear_gradients()
        schedule.step()
        losses.append(loss.item())
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
            "losses": losses,
            "evaluated": (served_loss.item(), own_loss.item()),
        },
        out,
    )


def main() -> None:
    out, mode, *names = sys.argv[1:]
    for name in names:
        train(Fleet(), name, Path(out), mode)
    print("done", flush=True)


if __name__ == "__main__":
    main()
