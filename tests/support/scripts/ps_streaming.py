"""Training on a stream: each record adds exactly 1 to the row of its id, and to its shows, so that a lost or
doubled one shows in the end. `ps_streaming JSON`, see Options.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainers import fleet
from trainers.data.kafka import KafkaTopic
from trainers.data.parquet import ParquetFiles
from trainers.data.slots import Batch, Slot
from trainers.data.stream import Source
from trainers.data.stream_files import MultiSlotFiles
from trainers.ps import Constant, SparseEmbedding

SLOTS = [Slot("id"), Slot("words", length=None)]


@dataclass
class Options:
    """The streams are these directories of the folder, or topics of these names at `brokers`, a batch of each
    in turn. `follow`: until a file `over` is in the folder. `save`: the tables, into the folder's `saved`, at
    the end. `hold`: before the push of this step, counted by each process, wait for a file `go` there.
    """

    folder: str
    ps: dict[str, Any] = field(default_factory=dict)
    sync: bool = False
    asynchronous: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 8
    follow: bool = True
    save: bool = False
    prefetch: bool = False
    pause_ms: int = 0
    hold: int = -1
    parquet: bool = False
    brokers: str = ""
    streams: Sequence[str] = ("records",)


class Model(torch.nn.Module):
    """Two tables, of ids one by one and of any number."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = SparseEmbedding(1, init=Constant(0.0), statistics=True)
        self.words = SparseEmbedding(1, init=Constant(0.0), statistics=True)

    def calls(self, batch: Batch) -> dict[torch.nn.Module, torch.Tensor]:
        return {self.ids: batch.tensor("id"), self.words: batch.bag("words").values}

    def forward(self, ids: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.ids(ids).sum() + self.words(words).sum()


def in_turn(streams: Sequence[Iterator[Batch]]) -> Iterator[Batch]:
    left = list(streams)
    while left:
        for each in list(left):
            batch = next(each, None)
            if batch is None:
                left.remove(each)
            else:
                yield batch


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    folder = Path(options.folder)
    torch.set_num_threads(1)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = not options.sync
    if options.asynchronous:
        strategy.a_sync_configs = options.asynchronous
    strategy.ps_configs = {"trainer_timeout_s": 60.0, "log_fsync": "no", **options.ps}
    model = fleet.distributed_model(Model())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
    if fleet.is_server():
        fleet.init_server()
        return fleet.run_server()
    fleet.init_worker()
    print("joined", flush=True)

    def source(name: str) -> Source:
        if options.brokers:
            return KafkaTopic(name, brokers=options.brokers, use_var=SLOTS)
        kind = ParquetFiles if options.parquet else MultiSlotFiles
        return kind(folder / name, use_var=SLOTS, name=name)

    until = (folder / "over").exists if options.follow else None
    streams = [
        fleet.stream(
            source(name),
            batch_size=options.batch_size,
            follow=options.follow,
            until=until,
            poll_s=0.01,
        )
        for name in options.streams
    ]
    batches = [fleet.prefetch(each, model.calls) if options.prefetch else iter(each) for each in streams]
    for number, batch in enumerate(in_turn(batches)):
        loss = -model(batch.tensor("id"), batch.bag("words").values)  # of rows that are here now
        if number == options.hold:
            print("held", flush=True)
            while not (folder / "go").exists():
                time.sleep(0.005)
        optimizer.minimize(loss)
        print("step", number, flush=True)
        time.sleep(options.pause_ms / 1000)
    print("through", flush=True)
    if options.save:
        fleet.save_persistables(folder / "saved")
    fleet.stop_worker()


if __name__ == "__main__":
    main()
