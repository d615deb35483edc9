"""The rival: TorchRec on CPUs; prints one line of JSON.

    python bench/torchrec/rival.py --data DATA.pt --side dmp --trainers 2 --tables 26 --dims 16

--side  dmp    DistributedModelParallel on gloo, tables sharded table-wise, dense parameters in DDP
        tbe    fbgemm's fused table batch (SplitTableBatchedEmbeddingBagsCodegen) alone, one process
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workload
from workload import SLOTS, Data, Dense, Shape, Split


def sizes_of(shape: Shape, data: Data) -> list[int]:
    if shape.tables == 1:
        return [sum(data.sizes)]
    return [data.sizes[shape.slot(number)] for number in range(shape.tables)]


def flat_ids(ids: torch.Tensor, shape: Shape, data: Data) -> torch.Tensor:
    """Of a batch, table by table; 0 where missing."""
    if shape.tables == 1:
        first = torch.tensor([0, *data.sizes[:-1]]).cumsum(0)
        ids = torch.where(ids == 0, 0, ids + first)
    return ids.reshape(-1)


def uniform(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.uniform_(weight, -0.01, 0.01)


def ordered(values: torch.Tensor, keys: list[str], shape: Shape) -> torch.Tensor:
    """(ids, all dims) of all tables -> (batch, width)."""
    if shape.tables == 1:
        return values.reshape(shape.batch, -1)
    if shape.share == 1:  # columns in whatever order, always the same
        return values
    rows = values.view(shape.ids, shape.tables, -1)
    order = [int(key[1:]) for key in keys]
    if order != sorted(order):
        rows = rows.index_select(1, torch.tensor(order).argsort())
    rows = rows.transpose(0, 1).reshape(SLOTS, shape.batch, -1)
    return rows.transpose(0, 1).reshape(shape.batch, -1)


class Batched(torch.nn.Module):
    """fbgemm's tables, without TorchRec."""

    def __init__(self, shape: Shape, data: Data, args: argparse.Namespace) -> None:
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.shape = shape
        specs = [
            (size, shape.dim(number), EmbeddingLocation.HOST, ComputeDevice.CPU)
            for number, size in enumerate(sizes_of(shape, data))
        ]
        optimizer = {
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            specs, optimizer=optimizer[args.rule], learning_rate=args.lr, eps=1e-8,
        )  # fmt: skip
        for weight in self.tables.split_embedding_weights():
            uniform(weight)
        self.dense = Dense(shape.width, args.hidden)

    def forward(self, ids: tuple[torch.Tensor, torch.Tensor], dense: torch.Tensor) -> torch.Tensor:
        values = self.tables(*ids)
        return self.dense(ordered(values, [f"f{n}" for n in range(self.shape.tables)], self.shape), dense)


class Recommended(torch.nn.Module):
    """TorchRec's tables; ids are a KeyedJaggedTensor."""

    def __init__(self, shape: Shape, tables: torch.nn.Module, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.tables, self.dense = shape, tables, Dense(shape.width, hidden)

    def forward(self, ids: Any, dense: torch.Tensor) -> torch.Tensor:
        found = self.tables(ids)
        return self.dense(ordered(found.values(), found.keys(), self.shape), dense)


def configs(shape: Shape, data: Data) -> list[Any]:
    from torchrec import EmbeddingBagConfig

    return [
        EmbeddingBagConfig(
            name=f"t{number}", embedding_dim=shape.dim(number), num_embeddings=size,
            feature_names=[f"f{number}"], init_fn=uniform,
        )
        for number, size in enumerate(sizes_of(shape, data))
    ]  # fmt: skip


def sharded(args: argparse.Namespace, shape: Shape, data: Data) -> torch.nn.Module:
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

    kind = {"adagrad": EmbOptimType.EXACT_ADAGRAD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    made = configs(shape, data)
    model: torch.nn.Module = Recommended(
        shape, EmbeddingBagCollection(tables=made, device=torch.device("meta")), args.hidden
    )
    sharders: Any = [
        EmbeddingBagCollectionSharder(
            fused_params={"optimizer": kind[args.rule], "learning_rate": args.lr, "eps": 1e-8}
        )
    ]
    planner = EmbeddingShardingPlanner(
        topology=Topology(args.trainers, "cpu", local_world_size=args.trainers),
        batch_size=shape.ids,
        constraints={
            each.name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
            for each in made
        },
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def batches(
    split: Split, data: Data, shape: Shape, side: str
) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    """Of ids as the side wants them: one tensor, (values, offsets) or a KeyedJaggedTensor without what is
    missing.
    """
    found: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for ids, dense, labels in split.batches(shape):
        flat = flat_ids(ids, shape, data)
        there = flat != 0
        values, lengths = flat[there], there.to(torch.int64)
        if side == "tbe":
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            found.append(((values, offsets), dense, labels))
            continue
        found.append(((values, lengths), dense, labels))
    return found


class Loop:
    """Steps of a side."""

    def __init__(self, args: argparse.Namespace, model: torch.nn.Module, shape: Shape) -> None:
        self._model, self._side = model, args.side
        self._keys = [f"f{number}" for number in range(shape.tables)]
        named = dict(model.named_parameters())
        dense = [each for name, each in named.items() if "tables" not in name]
        self._optimizer = torch.optim.Adam(dense, lr=args.dense_lr)

    def input(self, ids: Any) -> Any:
        """A KeyedJaggedTensor is made anew: the sharded modules keep what they compute in it."""
        if self._side == "tbe":
            return ids
        from torchrec import KeyedJaggedTensor

        return KeyedJaggedTensor(self._keys, values=ids[0], lengths=ids[1])

    def logits(self, ids: Any, dense: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._model(self.input(ids), dense)

    def __call__(self, some: list[tuple[Any, torch.Tensor, torch.Tensor]]) -> int:
        for ids, dense, labels in some:
            logits = self._model(self.input(ids), dense)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        return len(some)


def member(args: argparse.Namespace, rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = workload.shape_of(args)
    data = Data(args.data, rank, args.trainers, args.rows)
    barrier: Callable[[], None] = _nobody_else
    if args.side == "dmp":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        barrier = dist.barrier
    model = sharded(args, shape, data) if args.side == "dmp" else Batched(shape, data, args)
    train = batches(data.train, data, shape, args.side)
    test = batches(data.test, data, shape, args.side)
    loop = Loop(args, model, shape)
    loop(train[: args.warm_up])
    if args.go:
        Path(f"{args.result}.pid{rank}").write_text(str(os.getpid()))
    row = workload.timed(lambda: loop(train[args.warm_up :]), barrier)
    model.eval()
    with torch.no_grad():
        logits = torch.cat([loop.logits(*batch) for batch in test])
    workload.leave(args.result, rank, row, logits, torch.cat([labels for *_, labels in test]))
    if args.side == "dmp":
        barrier()
        torch.distributed.destroy_process_group()


def _nobody_else() -> None:
    return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    workload.add_arguments(parser)
    parser.add_argument("--side", choices=["dmp", "tbe"], default="dmp")
    parser.add_argument("--go", help="directory for the files of the job (for profiling)")
    args = parser.parse_args()
    if args.side != "dmp" and args.trainers != 1:
        parser.error(f"--side {args.side} needs --trainers 1, because it is one process")
    if args.result:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        member(args, int(os.environ["RANK"]))
        return
    with tempfile.TemporaryDirectory(prefix="rival.") as made:
        folder = Path(args.go or made)
        with socket.create_server(("127.0.0.1", 0)) as held:
            port = held.getsockname()[1]
        members = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--result", str(folder / "r")],
                env={
                    **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.trainers),
                    "LOCAL_WORLD_SIZE": str(args.trainers),
                },
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=(folder / f"err{rank}").open("wb"),
            )
            for rank in range(args.trainers)
        ]  # fmt: skip
        try:
            codes = [each.wait(600) for each in members]
        finally:
            for each in members:
                each.kill()
        if any(codes):
            raise SystemExit(
                "\n".join((folder / f"err{rank}").read_text()[-2000:] for rank in range(args.trainers))
            )
        print(json.dumps(workload.summary(args, folder)))


if __name__ == "__main__":
    main()
