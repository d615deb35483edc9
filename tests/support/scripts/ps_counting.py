"""Training that counts: each push adds exactly 1 to the rows of its trainer and of everybody, so that a lost
or doubled push shows in the end. `ps_counting JSON`, see Options.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.scripts import step_limit
from trainers import fleet
from trainers.ps import SparseEmbedding, Uniform

SHARED = 1000
"""The first of the rows to which every trainer adds; those of trainer r begin at 10 * r."""
WIDTHS = (1, 2, 3)
ROOM, NEW = 200, 8
"""Rows of the bounded table; new ones in each push, to which only this push adds."""
EXACT = 64
"""After so many steps the rows of the table in bfloat16 are others: it has whole numbers up to 256 only."""

Ids = dict[torch.nn.Module, torch.Tensor]


@dataclass
class Options:
    """`server`: what is otherwise in a server's ps_configs. `hold`: at this step trainers wait for a file
    `go` in the folder, when all of them do with all pushes on the servers; before the first, until
    `after_snapshots` servers have taken one. `limited`: no step is made before the file step_limit in the
    folder allows it. `file_bytes`: a server can write no larger file. `prefetch`: rows are asked for ahead.
    `many`: async training of 26 tables of three widths, one of them bounded and one in bfloat16.
    """

    folder: str
    steps: int
    ps: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    sync: bool = False
    asynchronous: dict[str, Any] = field(default_factory=dict)
    hold: int = -1
    hold_ranks: tuple[int, ...] = (0, 1)
    after_snapshots: int = 0
    limited: bool = False
    file_bytes: int = 0
    pause_ms: int = 0
    prefetch: bool = False
    many: bool = False


def say(*words: object) -> None:
    print(*words, flush=True)


def keys_of(rank: int) -> torch.Tensor:
    """Four rows of this trainer, four of all: on several servers."""
    return torch.cat([torch.arange(4) + 10 * rank, torch.arange(4) + SHARED])


class Model(torch.nn.Module):
    """One table or many. `left`: what rows of the bounded one have that were evicted."""

    def __init__(self, many: bool, left: int) -> None:
        super().__init__()
        self.left = left
        widths = [WIDTHS[number % 3] for number in range(26 if many else 1)]
        self.tables = torch.nn.ModuleList(SparseEmbedding(width, init=Uniform(0.0, 0.0)) for width in widths)
        self.many = many

    def ids(self, rank: int, step: int) -> Ids:
        """With which ids each table is called in a step."""
        keys = [keys_of(rank)] * len(self.tables)
        if self.many:
            keys[0] = torch.arange(NEW) + NEW * (step * fleet.worker_num() + rank)
            keys[1] = keys[1] + 2 * SHARED * (step // EXACT)
        return dict(zip(self.tables, torch.stack(keys), strict=True))  # one request for all, predicted

    def forward(self, ids: Ids) -> torch.Tensor:
        return torch.stack([table(some).sum() for table, some in ids.items()]).sum()

    def counts(self, rank: int, steps: int) -> torch.Tensor:
        """How often each of the `keys_of` was pushed; NaN where tables do not agree on it."""
        keys = keys_of(rank)
        if not self.many:
            return self.tables[0](keys)[:, 0]
        bounded, lean, *others = self.tables
        parts = [lean(keys + 2 * SHARED * part) for part in range(-(-steps // EXACT))]
        columns = torch.cat([torch.stack(parts).sum(0), *(table(keys) for table in others)], dim=1)
        new = bounded(torch.arange(NEW * steps * fleet.worker_num())).unique().tolist()
        agree = (columns == columns[:, :1]).all(1) & (new == sorted({self.left, 1}))
        return torch.where(agree, columns[:, 0], torch.nan)


def hold(options: Options) -> None:
    if set(range(fleet.worker_num())) <= set(options.hold_ranks):
        fleet.barrier_worker()
    say("held")
    while not Path(options.folder, "go").exists():
        time.sleep(0.005)


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = not options.sync
    if options.asynchronous:
        strategy.a_sync_configs = options.asynchronous
    ps = {"trainer_timeout_s": 60.0, "log_fsync": "no", **options.ps}
    strategy.ps_configs = ps | options.server if fleet.is_server() else ps
    if options.many:
        strategy.sparse_table_configs = {
            "tables.0.weight": {"max_rows": ROOM},
            "tables.1.weight": {"dtype": "bfloat16"},
        }
    model = fleet.distributed_model(Model(options.many, left=1 if "disk_dir" in options.ps else 0))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
    if fleet.is_server():
        if options.file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_bytes, options.file_bytes))
        fleet.init_server()
        return fleet.run_server()
    say("joining")
    fleet.init_worker()
    say("resumed at", fleet.resume_step())
    taken = "kept/server-*/snapshot-*/manifest.json"
    while len(list(Path(options.folder).glob(taken))) < options.after_snapshots:
        time.sleep(0.005)
    rank = fleet.worker_index()
    steps = range(fleet.resume_step(), options.steps)
    batches: Iterable[tuple[int, Ids]] = ((step, model.ids(rank, step)) for step in steps)
    if options.prefetch:
        batches = fleet.prefetch(batches, lambda batch: batch[1])
    for step, ids in batches:
        if step == options.hold and rank in options.hold_ranks and os.environ["PADDLE_RESTART_COUNT"] == "0":
            hold(options)
        if options.limited:
            step_limit.wait(Path(options.folder, "step_limit"), step)
        optimizer.minimize(-model(ids).sum())
        say("pushed", step)
        time.sleep(options.pause_ms / 1000)
    fleet.barrier_worker()
    with torch.no_grad():
        values = model.eval().counts(rank, options.steps)
    fleet.stop_worker()
    say("values", *(f"{value:g}" for value in values.tolist()))


if __name__ == "__main__":
    main()
