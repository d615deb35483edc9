"""Our side: `fleetrun` with servers and trainers; prints one line of JSON.

    python bench/torchrec/ours.py --data DATA.pt --servers 1 --trainers 2 --mode async --tables 26 --dims 16

--kind sparse: SparseEmbedding, 63-bit ids without an end; nn: nn.Embedding(sparse=True) of a known size;
collection: TorchRec's EmbeddingBagCollection, with the rival's batches (needs torchrec here too).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import workload
from workload import Data, Dense, Shape, Split


class Model(torch.nn.Module):
    def __init__(self, shape: Shape, sizes: list[int], kind: str, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.tables = torch.nn.ModuleList(
            _table(shape, sizes, kind, number) for number in range(shape.tables)
        )
        self.dense = Dense(shape.width, hidden)

    def forward(self, ids: list[torch.Tensor], dense: torch.Tensor) -> torch.Tensor:
        rows = [table(each) for table, each in zip(self.tables, ids, strict=True)]
        return self.dense(workload.joined(rows, self.shape), dense)


def collected(shape: Shape, data: Data, hidden: tuple[int, ...]) -> torch.nn.Module:
    """The rival's model before it is sharded."""
    import rival
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection

    tables = rival.configs(shape, data)
    for each in tables:
        each.init_fn = partial(torch.nn.init.uniform_, a=-0.01, b=0.01)
    made = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    # As in TorchRec's examples. The strategy gives the rule.
    apply_optimizer_in_backward(torch.optim.Adagrad, made.parameters(), {"lr": 0.01})
    return rival.Recommended(shape, made, hidden)


def model_of(args: argparse.Namespace, shape: Shape, data: Data) -> Any:
    if args.kind == "collection":
        return collected(shape, data, args.hidden)
    return Model(shape, data.sizes, args.kind, args.hidden)


def ids_of(model: Any, kind: str, ids: Any) -> Any:
    """What fleet.prefetch needs of a batch."""
    return {model.tables: ids} if kind == "collection" else dict(zip(model.tables, ids, strict=True))


def _table(shape: Shape, sizes: list[int], kind: str, number: int) -> torch.nn.Module:
    from trainers.ps import SparseEmbedding, Uniform

    if kind == "sparse":
        return SparseEmbedding(shape.dim(number), init=Uniform(-0.01, 0.01, seed=number), padding_idx=0)
    size = sum(sizes) if shape.tables == 1 else sizes[shape.slot(number)]
    table = torch.nn.Embedding(size, shape.dim(number), padding_idx=0, sparse=True)
    with torch.no_grad():
        table.weight.uniform_(-0.01, 0.01)
        table.weight[0] = 0
    return table


def batches(split: Split, data: Data, shape: Shape, kind: str) -> list[Any]:
    if kind == "collection":
        import rival

        return rival.batches(split, data, shape, "dmp")
    if kind == "sparse":
        split = Split(data.signed(split.ids), split.dense, split.labels)
    elif shape.tables == 1:
        first = torch.tensor([0, *data.sizes[:-1]]).cumsum(0)
        split = Split(torch.where(split.ids == 0, 0, split.ids + first), split.dense, split.labels)
    return split.batches(shape)


def called(some: list[Any], shape: Shape, kind: str) -> Iterator[Any]:
    """The same batches, with a tensor of ids for each table; made when they are wanted, since a list of many
    thousand tensors costs Python's garbage collector more than training does.
    """
    keys = [f"f{number}" for number in range(shape.tables)]
    for ids, dense, labels in some:
        if kind == "collection":
            from torchrec import KeyedJaggedTensor

            yield KeyedJaggedTensor(keys, values=ids[0], lengths=ids[1]), dense, labels
            continue
        calls = [ids] if shape.tables == 1 else list(ids.view(shape.tables, shape.ids).unbind())
        yield calls, dense, labels


class Batches(torch.utils.data.Dataset[Any]):
    """The same, for torch's DataLoader."""

    def __init__(self, some: list[Any], shape: Shape, kind: str) -> None:
        self._some, self._shape, self._kind = some, shape, kind

    def __len__(self) -> int:
        return len(self._some)

    def __getitem__(self, number: int) -> Any:
        return next(called(self._some[number : number + 1], self._shape, self._kind))


def server_cpu(result: str) -> float:
    used = 0.0
    for path in Path(result).parent.glob("r.server*"):
        for task in Path(f"/proc/{path.read_text()}/task").iterdir():
            used += int((task / "schedstat").read_text().split()[0]) / 1e9
    return used


def strategy_of(args: argparse.Namespace) -> Any:
    from trainers import fleet
    from trainers.ps import Adagrad, SparseAdam

    strategy = fleet.DistributedStrategy()
    strategy.a_sync = args.mode in ("async", "geo")
    if args.mode == "geo":
        strategy.a_sync_configs = {"k_steps": 20}
    if args.loop == "allowed":
        strategy.ps_configs = {"read_ahead": True}
    if args.mode == "mixed":
        strategy.dense = "allreduce"
    rule = {"adagrad": Adagrad(eps=1e-8), "adam": SparseAdam()}[args.rule]
    strategy.sparse_table_configs = {"*": {"rule": rule, "lr": args.lr}}
    return strategy


def member(args: argparse.Namespace) -> None:
    from trainers import fleet

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = workload.shape_of(args)
    fleet.init()
    strategy = strategy_of(args)
    rank, trainers = (0, 1) if fleet.is_server() else (fleet.worker_index(), fleet.worker_num())
    data = Data(args.data, rank, trainers, args.rows)
    model = fleet.distributed_model(model_of(args, shape, data))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=args.dense_lr), strategy)
    if fleet.is_server():
        Path(f"{args.result}.server{fleet.server_index()}").write_text(str(os.getpid()))
        fleet.init_server()
        fleet.run_server()
        return
    train = batches(data.train, data, shape, args.kind)
    test = batches(data.test, data, shape, args.kind)
    fleet.init_worker()

    def steps(some: list[Any]) -> int:
        coming: Iterable[Any] = called(some, shape, args.kind)
        if args.loop in ("loader", "allowed"):
            coming = torch.utils.data.DataLoader(Batches(some, shape, args.kind), batch_size=None)
        elif args.loop == "prefetch":
            coming = fleet.prefetch(coming, lambda batch: ids_of(model, args.kind, batch[0]))
        count = 0
        for ids, dense, labels in coming:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, dense), labels)
            optimizer.minimize(loss)
            count += 1
        return count

    steps(train[: args.warm_up])
    fleet.barrier_worker()
    before = server_cpu(args.result)
    if args.go:  # a profiler may attach now
        Path(f"{args.result}.pid{rank}").write_text(str(os.getpid()))
    row = workload.timed(lambda: steps(train[args.warm_up :]), fleet.barrier_worker)
    row["server_cpu"] = server_cpu(args.result) - before
    fleet.barrier_worker()
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(ids, dense) for ids, dense, _ in called(test, shape, args.kind)])
    workload.leave(args.result, rank, row, logits, torch.cat([labels for *_, labels in test]))
    fleet.stop_worker()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    workload.add_arguments(parser)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--mode", choices=["async", "sync", "mixed", "geo"], default="async")
    parser.add_argument("--kind", choices=["sparse", "nn", "collection"], default="sparse")
    parser.add_argument(
        "--loop", choices=["prefetch", "loader", "allowed", "plain"], default="prefetch",
        help="over fleet.prefetch, over torch's DataLoader, the same with read_ahead, or plain [%(default)s]",
    )  # fmt: skip
    parser.add_argument("--go", help="directory for the files of the job (for profiling)")
    args = parser.parse_args()
    if args.result:
        member(args)
        return
    with tempfile.TemporaryDirectory(prefix="ours.") as made:
        folder = Path(args.go or made)
        fleetrun = Path(sys.executable).with_name("fleetrun")
        command = [
            str(fleetrun), f"--server_num={args.servers}", f"--trainer_num={args.trainers}", "--log_dir=log",
            str(Path(__file__).resolve()), *_absolute(sys.argv[1:], args.data), "--result", str(folder / "r"),
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit((done.stdout + done.stderr)[-3000:])
        print(json.dumps(workload.summary(args, folder)))


def _absolute(words: list[str], data: Path) -> list[str]:
    return [str(data.resolve()) if word == str(data) else word for word in words]


if __name__ == "__main__":
    main()
