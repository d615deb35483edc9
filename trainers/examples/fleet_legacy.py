"""Predict clicks on parameter servers with the first FleetAPI, fed and fetched batch by batch.

A role maker identifies each process, and a DistributeTranspilerConfig sets how it trains.

    fleetrun --server_num=2 --worker_num=2 trainers/examples/fleet_legacy.py
    mpirun -n 4 python trainers/examples/fleet_legacy.py
    python trainers/examples/fleet_legacy.py --role_maker user --role worker --current_id 0 --worker_num 2 \\
        --server_endpoints 127.0.0.1:6001          (by hand: this is one of three processes)

With --data DIR, it reads MultiSlot files, see trainers.examples.click_log.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import default_collate

from trainers import fleet, static
from trainers.data.click_files import CLICK_SLOTS, ID_SLOTS
from trainers.data.clicks import ClickModel
from trainers.data.dataset import InMemoryDataset
from trainers.examples.arguments import count, files_in, folder_with_train, positive
from trainers.metrics import Auc, auc
from trainers.ps import SparseEmbedding, Uniform
from trainers.roles.identity import RoleMaker
from trainers.zoo.click_models import WideDeep

DIM = 8

Sample = tuple[Tensor, ...]
"""(ids (26,) int64, dense (13,) float32, label () float32)."""
Reader = Callable[[], Iterator[Sample]]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Clicks on parameter servers, in the first FleetAPI's words")
    parser.add_argument(
        "--data", metavar="DIR", type=folder_with_train, help="MultiSlot files (default: generated rows)"
    )
    parser.add_argument("--rows", type=positive, default=2400, help="how many each worker generates")
    parser.add_argument("--passes", type=count, default=10)
    parser.add_argument("--steps", type=count, help="stop after so many batches")
    parser.add_argument("--batch_size", type=positive, default=24)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save_dir", metavar="DIR", type=Path, help="save the model there in the end")
    config = parser.add_argument_group("DistributeTranspilerConfig")
    config.add_argument("--sync_mode", action=argparse.BooleanOptionalAction, default=True)
    config.add_argument("--split_method", choices=["RoundRobin", "HashName"], default="RoundRobin")
    config.add_argument("--slice_var_up", action=argparse.BooleanOptionalAction, default=True)
    roles = parser.add_argument_group("who this process is")
    roles.add_argument("--role_maker", choices=["cloud", "user", "mpi"], help="default: by the environment")
    roles.add_argument("--current_id", type=int, default=0)
    roles.add_argument("--role", type=str.upper, choices=[role.name for role in fleet.Role], default="WORKER")
    roles.add_argument("--worker_num", type=positive, default=1)
    roles.add_argument("--server_endpoints", type=lambda text: text.split(","), default=[])
    return parser.parse_args()


def role_maker(args: argparse.Namespace) -> RoleMaker | None:
    if args.role_maker == "cloud":
        return fleet.PaddleCloudRoleMaker()
    if args.role_maker == "mpi":
        return fleet.MPISymmetricRoleMaker()
    if args.role_maker == "user":
        return fleet.UserDefinedRoleMaker(
            current_id=args.current_id,
            role=fleet.Role[args.role],
            worker_num=args.worker_num,
            server_endpoints=args.server_endpoints,
        )
    return None


def fake_reader(rows: int, seed: int) -> Reader:
    """Return a reader of rows drawn in memory. Each worker has its own, from one distribution."""

    def reader() -> Iterator[Sample]:
        yield from zip(*clicks.tensors(), strict=True)

    clicks = ClickModel().draw(rows, 1 + seed * fleet.worker_num() + fleet.worker_index())
    return reader


def file_reader(directory: Path) -> Reader:
    """Return a reader of the files in DIR/train. Each worker reads its share."""

    def reader() -> Iterator[Sample]:
        for rows in dataset:
            label = rows.tensor("label").squeeze(1)
            yield from zip(rows.joined(*ID_SLOTS), rows.tensor("dense_input"), label, strict=True)

    paths = files_in(directory / "train")
    dataset = InMemoryDataset()
    dataset.init(use_var=CLICK_SLOTS, batch_size=512)
    dataset.set_filelist(paths[fleet.worker_index() :: fleet.worker_num()])
    dataset.load_into_memory()
    return reader


def batch(reader: Reader, batch_size: int) -> Callable[[], Iterator[list[Sample]]]:
    """Group samples as `paddle.batch` does."""

    def batches() -> Iterator[list[Sample]]:
        samples: list[Sample] = []
        for sample in reader():
            samples.append(sample)
            if len(samples) == batch_size:
                yield samples
                samples = []
        if samples:
            yield samples

    return batches


def ctr_program(net: Module, optimizer: Optimizer) -> static.Program:
    """Return one step with its cost, the AUC of all rows of this worker so far, and the AUC of the batch."""
    seen = Auc()

    def model(net: Module, ids: Tensor, dense: Tensor, label: Tensor) -> dict[str, Tensor | float]:
        logits = net(ids, dense)
        predictions = torch.sigmoid(logits.detach())
        seen.update(predictions, label)
        return {
            "avg_cost": torch.nn.functional.binary_cross_entropy_with_logits(logits, label),
            "auc": seen.value(),
            "auc_batch": auc(predictions, label),
        }

    feeds = [
        static.data("ids", [None, 26], "int64"),
        static.data("dense", [None, 13], "float32"),
        static.data("label", [None], "float32"),
    ]
    return static.Program(net, feeds, model, loss="avg_cost", optimizer=optimizer)


def train(program: static.Program, args: argparse.Namespace) -> None:
    feeder = default_collate  # converts samples to one tensor for each feed, as a DataFeeder does
    reader = file_reader(args.data) if args.data else fake_reader(args.rows, args.seed)
    train_reader = batch(reader, args.batch_size)
    exe = static.Executor()
    step = 0
    for pass_id in range(args.passes):
        for data in train_reader():
            if step == args.steps:
                return
            step += 1
            avg_loss_value, auc_value, auc_batch_value = exe.run(
                program, feed=feeder(data), fetch_list=["avg_cost", "auc", "auc_batch"]
            )
            print(
                f"Pass {pass_id}, cost = {avg_loss_value:f}, auc = {auc_value:f}, "
                f"batch_auc = {auc_batch_value:f}",
                flush=True,
            )


def main() -> None:
    args = options()
    torch.manual_seed(args.seed)
    fleet.init(role_maker(args))

    config = fleet.DistributeTranspilerConfig()
    config.sync_mode = args.sync_mode
    config.split_method = args.split_method
    config.slice_var_up = args.slice_var_up

    table = SparseEmbedding(DIM, init=Uniform(-0.01, 0.01), padding_idx=0)
    net = fleet.distributed_model(WideDeep(table, DIM, hidden=[64, 32]))
    optimizer: Optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    optimizer = fleet.distributed_optimizer(optimizer, config)

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    if fleet.is_worker():
        fleet.init_worker()
        train(ctr_program(net, optimizer), args)
        if args.save_dir and fleet.is_first_worker():
            fleet.save_persistables(args.save_dir / "persistables")
            example = (torch.zeros(2, 26, dtype=torch.int64), torch.zeros(2, 13))  # ids, dense
            fleet.save_inference_model(args.save_dir / "inference", net, example)
        fleet.stop_worker()


if __name__ == "__main__":
    main()
