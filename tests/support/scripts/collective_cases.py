"""Data parallel training: `collective_cases fleet OUT | torchrun OUT | passes OUT | alone`."""

import os
import sys
from pathlib import Path

if sys.argv[1] == "torchrun":  # as torchrun starts a script: its variables, none of fleetrun's
    for name in [each for each in os.environ if each.startswith(("PADDLE_", "FLEETRUN_"))]:
        del os.environ[name]

import torch

from tests.support.training import STEPS, TwoTables, loss_of
from trainers import DataParallel, fleet, get_rank, get_world_size, init_parallel_env


def by_fleet(out: str) -> None:
    fleet.init(is_collective=True)
    rank, world = fleet.worker_index(), fleet.worker_num()
    torch.manual_seed(rank)
    plain = TwoTables(sparse=False)
    inner = torch.optim.Adam([*plain.dense(), *plain.tables()], lr=0.01)
    optimizer = fleet.distributed_optimizer(inner)
    model = fleet.distributed_model(plain)
    for step in range(STEPS):
        loss = loss_of(model, step, world, rank)
        if step % 2:
            optimizer.minimize(loss)
        else:  # Paddle's dynamic graphs: backward, then minimize, then clear
            loss.backward()
            optimizer.minimize(loss)
            model.clear_gradients()
    fleet.barrier_worker()
    if fleet.is_first_worker():  # one rank alone may evaluate
        with torch.no_grad():
            loss_of(model.eval(), 0, world, None)
    torch.save(plain.state_dict(), Path(out) / f"{rank}.pt")


def by_parallel_env(out: str) -> None:
    assert (get_rank(), get_world_size()) == (int(os.environ["RANK"]), 2)
    init_parallel_env()
    init_parallel_env()
    assert (get_rank(), get_world_size()) == (int(os.environ["RANK"]), 2)
    torch.manual_seed(get_rank())
    plain = TwoTables(sparse=False)
    model = DataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        loss_of(model, step, 2, get_rank()).backward()
        optimizer.step()
        model.clear_gradients()
    torch.save(plain.state_dict(), Path(out) / f"{get_rank()}.pt")


def several_passes(out: str) -> None:
    """Two forward passes, then a backward pass for each, and another one over a graph that was retained."""
    fleet.init(is_collective=True)
    rank, world = fleet.worker_index(), fleet.worker_num()
    torch.manual_seed(rank)
    plain = TwoTables(sparse=False)
    model = fleet.distributed_model(plain)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.02))
    for step in range(STEPS):
        first, second = (loss_of(model, step + each, world, rank) for each in range(2))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(plain.state_dict(), Path(out) / f"{rank}.pt")
    fleet.barrier_worker()


def alone() -> None:
    assert (get_rank(), get_world_size()) == (0, 1)
    fleet.init(is_collective=True)
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.minimize(model(torch.ones(1, 2)).sum())
    assert all(parameter.grad is None for parameter in model.parameters())
    fleet.barrier_worker()
    for call in (fleet.init_worker, fleet.stop_worker, fleet.init_server, fleet.run_server):
        try:
            call()
        except RuntimeError as error:
            print(error)


if __name__ == "__main__":
    cases = {
        "fleet": by_fleet,
        "torchrun": by_parallel_env,
        "passes": several_passes,
        "alone": alone,
    }
    cases[sys.argv[1]](*sys.argv[2:])
