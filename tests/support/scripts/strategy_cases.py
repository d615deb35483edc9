"""What the fields of a strategy do, by two processes: `strategy_cases OUT`. Each case is a training of its
own in the same two processes; what it finds goes to `OUT/RANK.pt` under its name, for the test to judge.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.strategies import (
    EQUAL,
    FLOAT16,
    STEPS,
    Make,
    Net,
    Values,
    adam,
    batch,
    furthest,
    loss_of,
    merged,
    momentum,
    sharded,
)
from trainers.errors import FleetError
from trainers.fleet import Fleet
from trainers.strategy import DistributedStrategy

LOCAL = {"localsgd": True, "localsgd_configs": {"k_steps": 2, "begin_step": 3}}


@dataclass
class Job:
    """One process may be in several, one after the other, of the same process group."""

    fleet: Fleet
    plain: Net
    model: Any
    optimizer: Any
    own: torch.optim.Optimizer
    """The script's own, of which fleet has made the optimizer."""

    def losses(self, pieces: int = 1) -> Iterator[torch.Tensor]:
        for step in range(STEPS):
            for piece in range(pieces):
                yield loss_of(self.model, *batch(step, dist.get_rank(), pieces, piece))


def strategy_with(**fields: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in fields.items():
        setattr(strategy, name, value)
    return strategy


def begin(fields: dict[str, Any], make: Make = momentum, *, model_first: bool = False, **kind: bool) -> Job:
    """The optimizer comes first, as in the seeds, or the model."""
    fleet = Fleet()
    fleet.init(is_collective=True, strategy=strategy_with(**fields))
    torch.manual_seed(0)
    plain = Net(**kind)
    inner = make(plain.parameters())
    if model_first:
        model = fleet.distributed_model(plain)
        return Job(fleet, plain, model, fleet.distributed_optimizer(inner), inner)
    optimizer = fleet.distributed_optimizer(inner)
    return Job(fleet, plain, fleet.distributed_model(plain), optimizer, inner)


def values(model: torch.nn.Module) -> Values:
    """Whole, whoever has which part."""
    found = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = whole.detach().clone()
    return found


def message(call: Callable[[], Any]) -> str:
    """What the error says."""
    try:
        call()
    except FleetError as error:
        return str(error)
    return "no error"


# ---- one function for each case


def equal() -> dict[str, Values]:
    found = {}
    for place, (name, case) in enumerate(EQUAL.items()):
        job = begin(case.fields, case.make, model_first=place % 2 == 1, **case.kind)
        for loss in job.losses(case.pieces):
            job.fleet.minimize(loss)
        found[name] = values(job.plain)
    return found


def habits() -> dict[str, Values]:
    """The ways in which scripts write a step, all with merged gradients."""
    found = {}

    def paddle(job: Job, loss: torch.Tensor) -> None:
        loss.backward()
        job.optimizer.minimize(loss)
        job.model.clear_gradients()

    def plain(job: Job, loss: torch.Tensor) -> None:
        job.optimizer.zero_grad()  # between forward and backward
        loss.backward()
        job.optimizer.step()

    def last(job: Job, loss: torch.Tensor) -> None:
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.model.zero_grad()

    for stage in ({}, sharded(2)):
        for habit in (paddle, plain, last):
            job = begin(merged(4) | stage)
            for loss in job.losses(pieces=4):
                habit(job, loss)
            found[f"{habit.__name__} {len(stage)}"] = values(job.plain)
    return found


def own_scaler() -> Values:
    """A script that scales by itself, with merged gradients, and clips where it must."""
    job = begin(merged(2) | FLOAT16)
    scaler = job.fleet.distributed_scaler(torch.amp.GradScaler("cpu", init_scale=1024.0))
    for loss in job.losses(pieces=2):
        scaler.scale(loss).backward()
        scaler.unscale_(job.optimizer)
        if not job.optimizer.merges:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1e6)
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
    assert scaler.get_scale() == 1024.0
    return values(job.plain)


def exchanged() -> dict[str, list[float]]:
    """A weight's gradient after each backward pass, and a weight after each step."""
    found: dict[str, list[float]] = {"merge": [], "local": [], "buffer": []}
    for mode in (True, False):  # a script may train in eval mode, without dropout
        job = begin(merged(3))
        job.model.train(mode)
        for loss in job.losses():
            loss.backward()
            found["merge"].append(float(job.plain.last.weight.grad[0, 0]))  # type: ignore[index]
            job.optimizer.minimize(loss)
    job = begin(LOCAL, norm=True)
    for loss in job.losses():
        job.optimizer.minimize(loss)
        found["local"].append(float(job.plain.last.weight.detach()[0, 0]))
        found["buffer"].append(float(job.plain.norm.running_mean[0]))  # type: ignore[index,arg-type]
    return found


def local(folder: Path) -> dict[str, Any]:
    """localsgd from the third update on; and what a checkpoint in the middle makes of it."""
    job = begin(LOCAL)
    for loss in job.losses():
        job.optimizer.minimize(loss)
    found: dict[str, Any] = {"end": values(job.plain)}
    job.optimizer.minimize(next(job.losses()))
    found["apart"] = values(job.plain)
    for background in (False, True):
        job.fleet.save_checkpoint(folder, 7 + background, job.model, job.optimizer, async_save=background)
    job.fleet.checkpoint(folder, 9, job.model, job.optimizer)  # a third, which the directory may get too
    job.fleet.wait_checkpoint()
    found["kept"] = values(job.plain)
    after = begin(LOCAL)
    after.fleet.load_checkpoint(folder, after.model, after.optimizer)
    found["loaded"] = values(after.plain)
    quiet = begin(LOCAL)
    for loss in quiet.losses():
        quiet.optimizer.minimize(loss)
    quiet.optimizer.minimize(next(quiet.losses()))
    for each in (job, after, quiet):
        for _, loss in zip(range(3), each.losses(), strict=False):
            each.optimizer.minimize(loss)
    found |= {
        "on": values(job.plain),
        "quiet": values(quiet.plain),
        "after": values(after.plain),
        "others": [],
    }
    for optimizer in (None, after.own):  # without fleet's optimizer it is a checkpoint of one model as well
        after.fleet.save_checkpoint(folder / str(optimizer is None), 10, after.model, optimizer)
        other = Net()
        after.fleet.load_checkpoint(folder / str(optimizer is None), other)
        found["others"].append((values(other), values(after.plain)))
        after.optimizer.minimize(next(after.losses()))
    return found


def overflow() -> dict[str, Any]:
    """Rank 1's gradient is not finite in the second and third step; of a model that nothing exchanges."""
    job = begin({"amp": True, "amp_configs": {"dtype": "float16", "init_loss_scaling": 8.0}})
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    scaler = job.fleet.distributed_scaler(torch.amp.GradScaler("cpu", init_scale=8.0))
    found: dict[str, Any] = {"alone": []}
    for step in range(4):
        before = values(alone)
        bad = float("inf") if step in (1, 2) and dist.get_rank() == 1 else 1.0
        scaler.scale(loss_of(alone, *batch(step, dist.get_rank())) * bad).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(value, before[name]) for name, value in values(alone).items())
        found["alone"].append((moved, scaler.get_scale()))
    found["minimize"] = []
    for step, loss in enumerate(job.losses()):
        before = values(job.plain)
        job.fleet.minimize(loss * (float("inf") if step in (1, 2, 4) and dist.get_rank() == 1 else 1.0))
        moved = any(not torch.equal(value, before[name]) for name, value in values(job.plain).items())
        found["minimize"].append((moved, job.optimizer.scaler.get_scale()))
    merging = begin(FLOAT16 | merged(2))
    found["merged"] = []
    for step, loss in enumerate(merging.losses()):
        before = values(merging.plain)
        merging.fleet.minimize(loss * (float("inf") if step == 1 else 1.0))
        found["merged"].append(furthest(values(merging.plain), before) > 0)
    after = begin(FLOAT16)
    after.optimizer.load_extra_state(job.optimizer.extra_state())
    return found | {"after": after.optimizer.scaler.get_scale()}


def half() -> dict[str, Any]:
    """In what the model computes, what it gives, and that autocast ends with it."""
    job = begin({"amp": True})
    seen = []
    job.plain.first.register_forward_hook(lambda module, inputs, output: seen.append(str(output.dtype)))
    out = job.model(batch(0)[0])
    with torch.no_grad():
        tested = job.model.eval()(batch(0)[0])
    with suppress(RuntimeError):
        job.model(torch.zeros(1, 99))
    outputs = [str(out.dtype), str(tested.dtype)]
    return {"seen": seen, "outputs": outputs, "left": torch.is_autocast_enabled("cpu")}


def large_batch() -> dict[str, Values]:
    found = {}
    for field, make in (("lars", momentum), ("lamb", adam)):
        options = {field: True, f"{field}_configs": {"exclude_from_weight_decay": ["last"]}}
        job = begin({"fuse_grad_size_in_MB": 1} | options, make, model_first=True)
        assert job.model.bucket_bytes_cap == 1 << 20
        for loss in job.losses():
            job.optimizer.minimize(loss)
        found[field] = values(job.plain)
    job = begin({"lars": True, "sharding": True})
    for loss in job.losses():
        job.optimizer.minimize(loss)
    found["lars stage 1"] = values(job.plain)
    return found


def resumed(folder: Path) -> dict[str, tuple[Values, Values]]:
    """The end of a training, and of one that goes on from its checkpoint, with other values before."""
    found = {}
    for name, fields in {
        "lamb": {"lamb": True} | sharded(1),
        "float16": FLOAT16 | merged(2) | sharded(1),
        "float16 sharded": FLOAT16 | sharded(3),
    }.items():
        jobs = [begin(fields, adam), begin(fields, adam)]
        for job in jobs:
            for loss in job.losses():
                job.optimizer.minimize(loss)
        for _ in range(2):  # merged into one update
            jobs[0].optimizer.minimize(next(jobs[0].losses()) * 2)
        jobs[0].fleet.save_checkpoint(folder / name, 8, jobs[0].model, jobs[0].own)
        jobs[1].fleet.load_checkpoint(folder / name, jobs[1].model, jobs[1].optimizer)
        for job in jobs:
            for loss in job.losses():
                job.optimizer.minimize(loss)
        found[name] = (values(jobs[0].plain), values(jobs[1].plain))
    return found


def errors() -> dict[str, str]:
    found = {}
    job = begin({})
    found["late"] = message(
        lambda: job.fleet.distributed_optimizer(momentum(job.plain.parameters()), strategy_with(amp=True))
    )
    found["wrapped"] = message(lambda: job.fleet.distributed_model(job.model))
    no_optimizer = Fleet()
    no_optimizer.init(is_collective=True, strategy=strategy_with(**merged(2)))
    found["minimize"] = message(lambda: no_optimizer.minimize(torch.zeros(())))
    model = no_optimizer.distributed_model(Net())
    found["no optimizer"] = message(lambda: model(batch(0)[0]))
    found["twice"] = message(lambda: no_optimizer.distributed_model(Net()))

    found["no parameters"] = message(lambda: begin(sharded(3)).fleet.distributed_model(torch.nn.Softmax()))

    job = begin(merged(3))
    losses = job.losses()
    job.optimizer.minimize(next(losses))
    found["inner step"] = message(job.optimizer.inner.step)
    job.optimizer.inner.zero_grad()
    found["cleared"] = message(lambda: job.optimizer.minimize(next(losses)))
    found["closure"] = message(lambda: job.optimizer.step(lambda: 0.0))

    job = begin(FLOAT16)
    loss = next(job.losses())
    loss.backward()
    found["unscaled step"] = message(job.optimizer.step)
    found["unscaled minimize"] = message(lambda: job.optimizer.minimize(loss))

    sys.modules["pytorch_optimizer"] = None  # type: ignore[assignment]  # how Python says: not to be found
    found["not installed"] = message(lambda: begin({"lars": True}))
    job = begin({"gradient_scale_configs": {"scale_strategy": "customized"}})
    loss = next(job.losses())
    found["customized"] = message(lambda: job.optimizer.minimize(loss))
    (loss / 2).backward()
    job.optimizer.minimize(loss)  # and with the script's own backward it is a step
    return found


def main(out: str) -> None:
    cases = (equal, habits, own_scaler, exchanged, overflow, half, large_batch)
    found: dict[str, Any] = {case.__name__: case() for case in cases}
    found["local"] = local(Path(out) / "local")
    found["resumed"] = resumed(Path(out) / "resumed")
    found["errors"] = errors()  # the last: it hides a library
    torch.save(found, Path(out) / f"{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
