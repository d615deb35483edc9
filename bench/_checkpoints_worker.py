"""One process of bench/checkpoints.py: trains, saves in each way in turn, and times it.

_checkpoints_worker.py FOLDER MB STEPS REPEAT
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from trainers import fleet

Wait = Callable[[], object]

LAYERS = 8


class Job:
    """A training, and where it saves."""

    def __init__(self, folder: Path, size: int) -> None:
        width = int((size / LAYERS / 12) ** 0.5)  # float32, and two of Adam's for each
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width) for _ in range(LAYERS)]
        self.plain = torch.nn.Sequential(*layers)
        self.model = fleet.distributed_model(self.plain)
        self.optimizer = fleet.distributed_optimizer(torch.optim.Adam(self.model.parameters(), lr=1e-4))
        self.batch = torch.randn(8, width)
        self.folder, self.saves = folder, 0
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.train(2)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.minimize(self.model(self.batch).square().mean())

    def state(self) -> dict[str, object]:
        return {"model": self.plain.state_dict(), "optimizer": self.optimizer.state_dict()}

    def place(self) -> str:
        self.saves += 1
        return str(self.folder / "dcp" / str(self.saves))

    # ---- the ways: each returns what to call to wait for its end

    def at_once(self) -> Wait:
        self.saves += 1
        fleet.save_checkpoint(self.folder / "ours", self.saves, self.model, self.optimizer, keep=1)
        return lambda: None

    def beside(self) -> Wait:
        self.saves += 1
        fleet.save_checkpoint(
            self.folder / "ours", self.saves, self.model, self.optimizer, keep=1, async_save=True
        )
        return fleet.wait_checkpoint

    def dcp(self) -> Wait:
        save(self.state(), checkpoint_id=self.place())
        return lambda: None

    def dcp_beside(self) -> Wait:
        return async_save(self.state(), checkpoint_id=self.place(), process_group=self.group).result  # type: ignore[union-attr]  # a Future

    def dcp_staged(self) -> Wait:
        saved = async_save(
            self.state(),
            checkpoint_id=self.place(),
            process_group=self.group,
            async_stager=self.stager,
        )
        return saved.result  # type: ignore[union-attr]  # a Future, as the stager is not asynchronous

    group: dist.ProcessGroup | None = None


def timed(act: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def one(job: Job, way: Callable[[], Wait], steps: int) -> tuple[float, float, float]:
    """(the call, until all is durable, the call with steps after it)."""
    durable = timed(lambda: way()())
    dist.barrier()
    began = time.perf_counter()
    wait = way()
    pause = time.perf_counter() - began
    job.train(steps)
    wait()
    whole = time.perf_counter() - began
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(job.folder / "dcp", ignore_errors=True)
    return pause, durable, whole


def main() -> None:
    folder, size, steps, repeat = Path(sys.argv[1]), *map(int, sys.argv[2:])
    fleet.init(is_collective=True)
    job = Job(folder, size * 1_000_000)
    job.group = dist.new_group(backend="gloo")
    ways = {
        "fleet.save_checkpoint": job.at_once,
        "the same, async_save=True": job.beside,
        "dcp.save": job.dcp,
        "dcp.async_save": job.dcp_beside,
        "dcp.async_save, its stager kept": job.dcp_staged,
    }
    for way in ways.values():  # imports, first memory, groups
        one(job, way, 1)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    alone = []
    for _ in range(repeat):
        alone.append(timed(lambda: job.train(steps)))
        for name, way in ways.items():
            pause, durable, whole = one(job, way, steps)
            for what, value in (("pause", pause), ("durable", durable), ("lost", whole - alone[-1])):
                found[name].setdefault(what, []).append(value)
    tensors = [
        *job.plain.parameters(),
        *(value for each in job.optimizer.state.values() for value in each.values()),
    ]
    about = {
        "bytes": {"of a checkpoint": [float(sum(tensor.nbytes for tensor in tensors))]},
        "steps": {"alone": alone},
    }
    if dist.get_rank() == 0:
        (folder / "told.json").write_text(json.dumps({"ways": found, "about": about}))


if __name__ == "__main__":
    main()
