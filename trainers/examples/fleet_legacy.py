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
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from trainers import fleet, static
from trainers.data.clicks import ClickModel
from trainers.examples.arguments import count, files_in, folder_with_train, positive
from trainers.examples.click_log import Batch, drawn_batches, load, loaded_batches
from trainers.metrics import Auc, auc
from trainers.ps import SparseEmbedding, Uniform
from trainers.roles.identity import RoleMaker
from trainers.zoo.click_models import WideDeep

DIM = 8


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Clicks on parameter servers, in the first FleetAPI's words")
    parser.add_argument(
        "--data", metavar="DIR", type=folder_with_train, help="MultiSlot files (default: generated rows)"
    )
    parser.add_argument(
        "--rows", type=positive, default=2400, help="number of rows that each worker generates"
    )
    parser.add_argument("--passes", type=count, default=10)
    parser.add_argument("--steps", type=count, help="stop after this many batches")
    parser.add_argument("--batch_size", type=positive, default=24)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save_dir", metavar="DIR", type=Path, help="directory for the model at the end")
    config = parser.add_argument_group("DistributeTranspilerConfig")
    config.add_argument("--sync_mode", action=argparse.BooleanOptionalAction, default=True)
    config.add_argument("--split_method", choices=["RoundRobin", "HashName"], default="RoundRobin")
    config.add_argument("--slice_var_up", action=argparse.BooleanOptionalAction, default=True)
    roles = parser.add_argument_group("role and number of this process")
    roles.add_argument("--role_maker", choices=["cloud", "user", "mpi"], help="default: from the environment")
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


def train_reader(args: argparse.Namespace) -> Callable[[], Iterable[Batch]]:
    """Return a function that starts a pass.

    Each worker reads its share of the files in DIR/train, or its own rows, drawn in memory from one
    distribution.
    """
    worker, workers = fleet.worker_index(), fleet.worker_num()
    if args.data:
        dataset = load(files_in(args.data / "train")[worker::workers], args.batch_size)
        return lambda: loaded_batches(dataset)
    clicks = ClickModel().draw(args.rows, 1 + args.seed * workers + worker)
    return lambda: drawn_batches(clicks, args.batch_size)


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
    reader = train_reader(args)
    exe = static.Executor()
    step = 0
    for pass_id in range(args.passes):
        for batch in reader():
            if step == args.steps:
                return
            step += 1
            avg_loss_value, auc_value, auc_batch_value = exe.run(
                program, feed=batch, fetch_list=["avg_cost", "auc", "auc_batch"]
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
