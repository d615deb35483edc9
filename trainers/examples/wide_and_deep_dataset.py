"""Train Wide & Deep on a click log that a pipe command reads, on parameter servers in static style.

It uses QueueDataset and train_from_dataset. Without --data, the first run generates the log in Criteo's
tab-separated lines.

    fleetrun --server_num=1 --trainer_num=2 trainers/examples/wide_and_deep_dataset.py
    fleetrun --server_num=1 --trainer_num=2 -m trainers.examples.wide_and_deep_dataset --data DIR/train

For DIR, see trainers.examples.click_log, with --tsv.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
from pathlib import Path

import torch
from torch import Tensor

from trainers import QueueDataset, fleet, static
from trainers.data.click_files import ID_SLOTS, write_tsv
from trainers.data.clicks import DENSE, SLOTS, ClickModel
from trainers.examples.arguments import add_wide_deep, files_in, folder_of_files
from trainers.ps import SparseEmbedding, Uniform
from trainers.zoo.click_models import WideDeep

READER = Path(__file__).with_name("criteo_reader.py")
GENERATED = Path("wide_and_deep_data")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Wide & deep on a click log, in static style")
    parser.add_argument(
        "--data", metavar="DIR", type=folder_of_files, help=f"files (default: makes them in {GENERATED})"
    )
    parser.add_argument(
        "--pipe_command",
        default=f"{shlex.quote(sys.executable)} {shlex.quote(str(READER))}",
        help="command that converts a file into MultiSlot text (default: python criteo_reader.py)",
    )
    parser.add_argument("--sync", action="store_true", help="let all trainers step together")
    add_wide_deep(parser, rows=50_000, epochs=1)
    return parser.parse_args()


def train_files(args: argparse.Namespace) -> list[str]:
    """Return this trainer's share of the files in --data, or one file, which is generated if it is
    missing.
    """
    if args.data:
        return fleet.util.get_file_shard(list(map(str, files_in(args.data))))
    path = GENERATED / f"part-{fleet.worker_index()}.rows-{args.rows}.seed-{args.seed}"
    if not path.exists():
        GENERATED.mkdir(exist_ok=True)
        clicks = ClickModel().draw(args.rows, (args.seed << 32) + fleet.worker_index())
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        write_tsv(clicks, [aside])
        aside.replace(path)  # atomic, so that readers never find a partial file
    return [str(path)]


class WideDeepModel:
    """`inputs` are the feeds of a step, and `net` computes it."""

    def __init__(self) -> None:
        self.inputs = [
            static.data(name="dense_input", shape=[None, DENSE], dtype="float32"),
            static.data(name="ids", shape=[None, SLOTS], dtype="int64", joins=ID_SLOTS),
            static.data(name="label", shape=[None, 1], dtype="float32"),
        ]

    @staticmethod
    def net(model: torch.nn.Module, dense_input: Tensor, ids: Tensor, label: Tensor) -> dict[str, Tensor]:
        predict = model(ids, dense_input)
        cost = torch.nn.functional.binary_cross_entropy_with_logits(predict, label.squeeze(1))
        return {"cost": cost}


def get_dataset(args: argparse.Namespace, train_model: WideDeepModel) -> QueueDataset:
    dataset = QueueDataset()
    dataset.init(
        use_var=train_model.inputs,
        pipe_command=args.pipe_command,
        batch_size=args.batch_size,
        thread_num=1,
    )
    dataset.set_filelist(train_files(args))
    return dataset


def main() -> None:
    args = options()
    torch.manual_seed(args.seed)
    fleet.init(is_collective=False)

    table = SparseEmbedding(args.dim, init=Uniform(-0.01, 0.01), padding_idx=0)
    train_model = WideDeepModel()
    model = fleet.distributed_model(WideDeep(table, args.dim, hidden=args.hidden))

    dist_strategy = fleet.DistributedStrategy()
    dist_strategy.a_sync = not args.sync
    adam = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = fleet.distributed_optimizer(adam, dist_strategy)
    program = static.Program(model, train_model.inputs, train_model.net, loss="cost", optimizer=optimizer)

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        dataset = get_dataset(args, train_model)
        exe = static.Executor("cpu")
        fleet.init_worker()

        left = args.steps
        for _ in range(args.epochs):
            done = exe.train_from_dataset(
                program,
                itertools.islice(dataset, left),
                fetch_list=["cost"],
                fetch_info=["loss"],
                print_period=1,
                prefetch=lambda feeds: fleet.prefetch(feeds, lambda feed: feed["ids"]),
            )
            left = None if left is None else left - done.batches

        fleet.stop_worker()


if __name__ == "__main__":
    main()
