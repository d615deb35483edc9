"""Jobs that save, die, go on and stop: `checkpoint_cases CASE OUT ...`."""

import functools
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tests.support.stores import register
from tests.support.training import TwoTables, loss_of
from trainers import fleet
from trainers.collective.sharding import zero_optimizer
from trainers.data.sampler import ElasticBatchSampler
from trainers.errors import FleetError
from trainers.optimizer import DistributedOptimizer

ATTEMPT = int(os.environ.get("PADDLE_RESTART_COUNT", "0"))
KILLS = 2
STEPS = 60
BATCH = 20


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(130, 6, generator=generator), torch.randn(130, 1, generator=generator))


def deep() -> torch.nn.Module:
    """A model with all that must go on: parameters, dropout's random numbers, running means."""
    return torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(seed: int) -> None:
    """In each attempt but the last, one rank kills itself: at a moment, or at one of its file operations."""
    chance = random.Random(f"{seed} {ATTEMPT}")
    victim, by_time = chance.randrange(2), chance.random() < 0.5
    moment, operation = chance.uniform(0.0, 0.5), chance.randrange(1, 200)
    if ATTEMPT >= KILLS or seed < 0 or fleet.worker_index() != victim:
        return
    print(f"seed {seed} attempt {ATTEMPT}: rank {victim} dies", end=" ")
    if by_time:
        print(f"after {moment:.3f} s", flush=True)
        timer = threading.Timer(moment, die)
        timer.daemon = True
        timer.start()
        return
    print(f"at file operation {operation}", flush=True)
    left = [operation]

    def count(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"):
            left[0] -= 1
            if left[0] == 0:
                die()

    sys.addaudithook(count)


def killed(out: str, seed: str, where: str, how: str) -> None:
    fleet.init(is_collective=True)
    rank, world = fleet.worker_index(), fleet.worker_num()
    torch.manual_seed(rank)
    plain = deep()
    model = fleet.distributed_model(plain)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [20, 40], gamma=0.5)
    sampler = ElasticBatchSampler(130, BATCH, rank=rank, trainers=world, seed=3)
    kept = {"sampler": sampler, "schedule": schedule}
    step = fleet.load_latest(where, model, optimizer, **kept) or 0
    assert step == fleet.resume_step()
    arm(int(seed))
    while step < STEPS:
        for x, y in sampler.batches(DataLoader(data(), batch_sampler=sampler)):
            optimizer.minimize(torch.nn.functional.mse_loss(model(x), y))
            schedule.step()
            step += 1
            if step % 3 == 0:
                fleet.save_checkpoint(where, step, model, optimizer, async_save=how == "async", **kept)
            if step == STEPS:
                break
    if ATTEMPT < KILLS and int(seed) >= 0:
        die()  # its moment has not come: it is now
    if rank == 0:
        torch.save(plain.state_dict(), Path(out) / "final.pt")


def worlds(out: str, steps: str) -> None:
    fleet.init(is_collective=True)
    rank, world = fleet.worker_index(), fleet.worker_num()
    torch.manual_seed(rank)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model = fleet.distributed_model(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = ElasticBatchSampler(130, BATCH, rank=rank, trainers=world, seed=3)
    step = fleet.load_checkpoint(f"{out}/saved", model, optimizer, sampler=sampler) or 0
    if rank == 0 and step == 0:
        torch.save(plain.state_dict(), Path(out) / "first.pt")
    while step < int(steps):
        for x, y in sampler.batches(DataLoader(data(), batch_sampler=sampler)):
            loss = torch.nn.functional.mse_loss(model(x), y, reduction="sum") * world / BATCH
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == int(steps):
                break
    fleet.save_checkpoint(f"{out}/saved", step, model, optimizer, sampler=sampler)
    if rank == 0:
        torch.save(plain.state_dict(), Path(out) / "final.pt")


def agree(out: str) -> None:
    """Save 1 and 2, spoil a file of 2 that rank 1 looks at, load: everybody has 1."""
    fleet.init(is_collective=True)
    rank = fleet.worker_index()
    model = fleet.distributed_model(TwoTables(sparse=False))
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    for step in (1, 2):
        optimizer.minimize(loss_of(model, step, 2, rank))
        path = Path(fleet.save_checkpoint(f"{out}/saved", step, model, optimizer) or "")
    fleet.barrier_worker()
    if rank == 0:
        victim = sorted(each.name for each in path.iterdir() if each.name != "checkpoint.json")[1]
        content = bytearray((path / victim).read_bytes())
        content[len(content) // 2] ^= 1
        (path / victim).write_bytes(content)
    fleet.barrier_worker()
    print("loaded", fleet.load_checkpoint(f"{out}/saved", model, optimizer), fleet.resume_step(), flush=True)
    fleet.save_checkpoint(f"{out}/saved", 2, model, optimizer)  # in the place of the damaged one
    print("again", fleet.load_checkpoint(f"{out}/saved", model, optimizer), flush=True)
    if rank == 1:
        optimizer.state.clear()
    try:
        fleet.save_checkpoint(f"{out}/saved", 3, model, optimizer)
    except FleetError as error:
        print("refused", error, flush=True)


def apart(out: str) -> None:
    """Each rank has a folder of its own under the same name."""
    fleet.init(is_collective=True)
    mine = Path(out) / str(fleet.worker_index())
    mine.mkdir()
    os.chdir(mine)
    model = torch.nn.Linear(20, 20)
    try:
        fleet.save_checkpoint("saved", 1, model)
    except FleetError as error:
        print(type(error).__name__, error, flush=True)
    print("loaded", fleet.load_checkpoint("saved", model), flush=True)


def full(out: str) -> None:
    """Rank 1 can write no large file for a while, as on a full disk."""
    fleet.init(is_collective=True)
    model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 50))
    fleet.save_checkpoint(f"{out}/saved", 1, model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fleet.worker_index() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    for how in ("at once", "beside"):
        try:
            fleet.save_checkpoint(f"{out}/saved", 2, model, async_save=how == "beside")
            fleet.wait_checkpoint()
        except FleetError as error:
            print(f"{how}: {type(error).__name__}", error, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print("there", *sorted(path.name for path in Path(out, "saved").iterdir()), flush=True)
    fleet.barrier_worker()
    fleet.save_checkpoint(f"{out}/saved", 3, model)


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))


def five_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, start: int) -> None:
    for step in range(start, start + 5):
        model(torch.full((4, 6), step / 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(out: str) -> None:
    """Parameters of which each rank holds a part only, and those of which it has a part of the state only."""
    fleet.init(is_collective=True)
    parts = fully_shard(small())
    of_parts = torch.optim.AdamW(parts.parameters(), lr=0.01)
    whole = fleet.distributed_model(small())
    of_whole = DistributedOptimizer(zero_optimizer(torch.optim.AdamW(whole.parameters(), lr=0.01)))
    for name, model, optimizer in (("parts", parts, of_parts), ("whole", whole, of_whole)):
        where = f"{out}/{name}"
        start = fleet.load_checkpoint(where, model, optimizer) or 0
        five_steps(model, optimizer, start)
        fleet.save_checkpoint(where, start + 5, model, optimizer, async_save=True)
        held = len(of_whole.state)
        print(name, fleet.wait_checkpoint(), "with the state of", held, flush=True)
    for name, model in (("parts", parts), ("whole", whole)):
        found = {
            key.removeprefix("module."): getattr(value, "full_tensor", value.detach)().detach()
            for key, value in model.named_parameters()
        }
        if fleet.is_first_worker():
            torch.save(found, Path(out) / f"{name}.pt")


def refused(out: str) -> None:
    """Whatever only one rank can see, both get the same answer."""
    fleet.init(is_collective=True)
    rank, where = fleet.worker_index(), f"{out}/saved"
    model = fleet.distributed_model(torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    foreign = torch.optim.SGD(torch.nn.Linear(6, 1).parameters(), lr=0.1)
    sampler = ElasticBatchSampler(130, BATCH, rank=rank, trainers=2)
    other = ElasticBatchSampler(130, BATCH, rank=rank, trainers=2, seed=1)

    def later(step: int, optimizer: torch.optim.Optimizer = optimizer, **more: Any) -> object:
        fleet.save_checkpoint(where, step, model, optimizer, async_save=True, **more)
        return fleet.wait_checkpoint()

    def both(name: str, call: Callable[..., object], *arguments: object, **more: object) -> None:
        try:
            answer = "done" if call(*arguments, **more) is None else "saved"
        except FleetError as error:
            answer = str(error).partition(". ")[0]
        except ValueError as error:  # the script's own
            answer = f"rank {rank}: ValueError: {error}"
        print(f"{name}: {answer}", flush=True)

    def load_state_dict(state: object) -> None:
        raise ValueError("not today")

    broken = SimpleNamespace(state_dict=sampler.state_dict, load_state_dict=load_state_dict)
    save = functools.partial(fleet.save_checkpoint, where, model=model, optimizer=optimizer)
    keep = functools.partial(fleet.checkpoint, where, model=model, optimizer=optimizer)
    load = functools.partial(fleet.load_checkpoint, where, model)
    for victim in (0, 1):
        mine, step = rank == victim, 10 * victim
        for _ in sampler.batches(DataLoader(data(), batch_sampler=sampler)):
            break
        if mine:
            next(iter(DataLoader(data(), batch_sampler=sampler)))
        both(f"{victim} peek, save", save, step=step + 1, sampler=sampler)
        both(f"{victim} peek, later", later, step + 2, sampler=sampler)
        both(f"{victim} peek, memory", keep, step=step + 3, sampler=sampler)
        both(f"{victim} peek, memory only", keep, step=step + 4, sampler=sampler, every=None)
        fleet.barrier_worker()
        sampler = ElasticBatchSampler(130, BATCH, rank=rank, trainers=2)
        both(f"{victim} no object", save, step=step + 5, sampler=3 if mine else sampler)
        both(f"{victim} none to keep", save, step=step + 5, sampler=sampler, keep=0 if mine else 1)
        both(f"{victim} foreign", later, step + 5, **({"optimizer": foreign} if mine else {}))
        both(f"{victim} sampler", save, step=step + 6, sampler=sampler)
        both(f"{victim} load foreign", load, foreign if mine else optimizer)
        both(f"{victim} load more", load, optimizer, **({"more": {}} if mine else {}))
        both(f"{victim} load other", load, optimizer, sampler=other if mine else sampler)
        both(f"{victim} load broken", load, optimizer, sampler=broken if mine else sampler)
    both("load", load, optimizer, sampler=sampler)


def told(out: str) -> None:
    """Train until notice; rank 1 is slow, and asks long after rank 0 has heard its signal."""
    fleet.init(is_collective=True)
    rank, step, notice = fleet.worker_index(), 0, None
    while notice is None:
        step += 1
        time.sleep(0.002 * rank)
        notice = fleet.stop_requested(signals=[signal.SIGUSR1])
        if step == 3:
            print("ready", os.getpid(), flush=True)
    left = "forever" if notice.deadline == float("inf") else f"{notice.seconds_left > 0}"
    print(f"left at step {step} why {notice.why} left {left}", flush=True)
    fleet.save_checkpoint(f"{out}/saved", step, torch.nn.Linear(1, 1))


if __name__ == "__main__":
    register()
    cases = (killed, worlds, agree, apart, full, sharded, refused, told)
    {case.__name__: case for case in cases}[sys.argv[1]](*sys.argv[2:])
