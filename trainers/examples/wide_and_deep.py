"""Train Wide & Deep on a click log with unbounded ids, on parameter servers.

Training is asynchronous, synchronous or geo. The log is generated, so the best possible AUC is known.

    fleetrun --server_num=1 --trainer_num=2 -m trainers.examples.wide_and_deep
    fleetrun --server_num=2 --trainer_num=4 -m trainers.examples.wide_and_deep --mode geo --data DIR

For DIR, see trainers.examples.click_log.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch

from trainers import fleet
from trainers.data.clicks import ClickModel
from trainers.examples.arguments import add_wide_deep, files_in
from trainers.examples.click_log import Batch, drawn_batches, load, loaded_batches
from trainers.metrics import Auc
from trainers.ps import SparseEmbedding, Uniform
from trainers.zoo.click_models import WideDeep

OPTIMIZERS = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
REPORT_EVERY = 20
TEST_ROWS = 50_000


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Wide & deep on a click log")
    parser.add_argument("--data", metavar="DIR", type=Path, help="MultiSlot files (default: generated rows)")
    parser.add_argument("--mode", choices=["async", "sync", "geo"], default="async")
    add_wide_deep(parser, rows=200_000, epochs=2)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    args = parser.parse_args()
    # checked here, because a restart would not help
    if args.data and not (args.data / "best.json").is_file():
        parser.error(
            f"{args.data} has no best.json. Write it with python -m trainers.examples.click_log {args.data}"
        )
    return args


class Generated:
    """Rows drawn in memory. Each trainer has its own, from one distribution."""

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        self._truth = ClickModel()
        self._batch_size = batch_size
        clicks = self._truth.draw(rows, 1 + seed * fleet.worker_num() + fleet.worker_index())
        self._ids, self._dense, self._labels = clicks.tensors()
        self._shuffled = torch.Generator().manual_seed(seed)

    def epoch(self) -> Iterable[Batch]:
        """Yield full batches in random order."""
        order = torch.randperm(len(self._labels), generator=self._shuffled)
        for rows in torch.split(order, self._batch_size):
            if len(rows) == self._batch_size:
                yield self._ids[rows], self._dense[rows], self._labels[rows]

    def test(self) -> tuple[Iterable[Batch], float]:
        """Return batches, and the best possible AUC on them."""
        clicks = self._truth.draw(TEST_ROWS, 0)
        return drawn_batches(clicks, self._batch_size), clicks.best().auc


class Files:
    """MultiSlot files in DIR/train and DIR/test. Each trainer reads its share."""

    def __init__(self, directory: Path, batch_size: int) -> None:
        self._directory, self._batch_size = directory, batch_size
        paths = files_in(directory / "train")
        self._train = load(paths[fleet.worker_index() :: fleet.worker_num()], batch_size)

    def epoch(self) -> Iterable[Batch]:
        self._train.local_shuffle()
        return loaded_batches(self._train)

    def test(self) -> tuple[Iterable[Batch], float]:
        """Return batches, and the best possible AUC on them."""
        best = json.loads((self._directory / "best.json").read_text())
        test = load(files_in(self._directory / "test"), self._batch_size)
        return loaded_batches(test), best["auc"]


def strategy(mode: str) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = mode != "sync"
    if mode == "geo":
        strategy.a_sync_configs = {"k_steps": 100}
    return strategy


@torch.no_grad()
def test_auc(model: torch.nn.Module, batches: Iterable[Batch]) -> float:
    model.eval()
    area = Auc()
    for ids, dense, labels in batches:
        area.update(torch.sigmoid(model(ids, dense)), labels)
    return area.value()


def main() -> None:
    args = options()
    torch.manual_seed(args.seed)
    fleet.init()
    table = SparseEmbedding(args.dim, init=Uniform(-0.01, 0.01), padding_idx=0)
    model = fleet.distributed_model(WideDeep(table, args.dim, hidden=args.hidden))
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr)
    optimizer = fleet.distributed_optimizer(optimizer, strategy(args.mode))

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        fleet.init_worker()
        data: Files | Generated
        if args.data:
            data = Files(args.data, args.batch_size)
        else:
            data = Generated(args.rows, args.batch_size, args.seed)
        cross_entropy = torch.nn.BCEWithLogitsLoss()
        step = 0
        for epoch_id in range(args.epochs):
            for ids, dense, labels in fleet.prefetch(data.epoch(), lambda batch: batch[0]):
                if step == args.steps:
                    break
                step += 1
                loss = cross_entropy(model(ids, dense), labels)
                optimizer.minimize(loss)
                fleet.report(samples=len(labels))
                if step % REPORT_EVERY == 0:
                    print(f"TRAIN ---> pass: {epoch_id} loss: {loss.item():.6f}", flush=True)
        fleet.barrier_worker()
        if fleet.is_first_worker():
            batches, best = data.test()
            print(f"test AUC: {test_auc(model, batches):.4f}, best possible: {best:.4f}", flush=True)
        fleet.stop_worker()


if __name__ == "__main__":
    main()
