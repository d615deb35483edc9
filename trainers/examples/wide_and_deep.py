"""Wide & deep on a click log whose ids have no end: asynchronous, synchronous or geo training on parameter
servers. The log is generated, so that the best AUC that any model could reach is known.

fleetrun --server_num=1 --trainer_num=2 -m trainers.examples.wide_and_deep
fleetrun --server_num=2 --trainer_num=4 -m trainers.examples.wide_and_deep --mode geo --data DIR

DIR: see trainers.examples.click_log.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from trainers import fleet
from trainers.data.click_files import CLICK_SLOTS, ID_SLOTS
from trainers.data.clicks import ClickModel, Clicks
from trainers.data.inmemory import InMemoryDataset
from trainers.examples import click_log
from trainers.examples.mnist import report
from trainers.metrics import Auc
from trainers.ps import SparseEmbedding, Uniform
from trainers.zoo.wide_deep import WideDeep

OPTIMIZERS = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
REPORT_EVERY = 100
TEST_ROWS = 50_000

Batches = Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(ids (n, 26) int64, dense (n, 13) float32, labels (n,) float32)."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Wide & deep on a click log")
    parser.add_argument("--data", metavar="DIR", type=Path, help="MultiSlot files (default: generated rows)")
    parser.add_argument("--rows", type=int, default=200_000, help="how many each trainer generates")
    parser.add_argument("--mode", choices=["async", "sync", "geo"], default="async")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="stop after so many batches")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--dim", type=int, default=9)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.data and not (args.data / "best.json").is_file():  # said here, it is nothing to restart after
        parser.error(
            f"{args.data} has no best.json: write it with python -m {click_log.__name__} {args.data}"
        )
    return args


class Generated:
    """Rows drawn in memory: each trainer its own, of one truth."""

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        self._batch_size, self._truth = batch_size, ClickModel()
        self._train = self._truth.draw(rows, 1 + seed * fleet.worker_num() + fleet.worker_index())

    def epoch(self) -> Batches:
        yield from self._batches(self._train)

    def test(self) -> tuple[Batches, float]:
        """Batches, and the best possible AUC on them."""
        clicks = self._truth.draw(TEST_ROWS, 0)
        return self._batches(clicks), clicks.best().auc

    def _batches(self, clicks: Clicks) -> Batches:
        yield from zip(*(torch.split(each, self._batch_size) for each in clicks.tensors()), strict=True)


class Files:
    """MultiSlot files in DIR/train and DIR/test: each trainer its share of them."""

    def __init__(self, directory: Path, batch_size: int) -> None:
        self._directory, self._batch_size = directory, batch_size
        paths = sorted((directory / "train").iterdir())
        self._train = self._loaded(paths[fleet.worker_index() :: fleet.worker_num()])

    def epoch(self) -> Batches:
        self._train.local_shuffle()
        yield from self._batches(self._train)

    def test(self) -> tuple[Batches, float]:
        """Batches, and the best possible AUC on them."""
        best = json.loads((self._directory / "best.json").read_text())
        return self._batches(self._loaded(sorted((self._directory / "test").iterdir()))), best["auc"]

    def _loaded(self, paths: list[Path]) -> InMemoryDataset:
        dataset = InMemoryDataset()
        dataset.init(use_var=CLICK_SLOTS, batch_size=self._batch_size)
        dataset.set_filelist(paths)
        dataset.load_into_memory()
        return dataset

    def _batches(self, dataset: InMemoryDataset) -> Batches:
        for batch in dataset:
            yield batch.joined(*ID_SLOTS), batch.tensor("dense_input"), batch.tensor("label").squeeze(1)


def strategy(mode: str) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = mode != "sync"
    if mode == "geo":
        strategy.a_sync_configs = {"k_steps": 100}
    return strategy


@torch.no_grad()
def test_auc(model: torch.nn.Module, batches: Batches) -> float:
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
        for _ in range(args.epochs):
            for ids, dense, labels in fleet.prefetch(data.epoch(), lambda batch: batch[0]):
                if step == args.steps:
                    break
                step += 1
                loss = cross_entropy(model(ids, dense), labels)
                optimizer.minimize(loss)
                if step % REPORT_EVERY == 0:
                    report(step, loss)
        fleet.barrier_worker()
        if fleet.is_first_worker():
            batches, best = data.test()
            print(f"test AUC: {test_auc(model, batches):.4f}, best possible: {best:.4f}", flush=True)
        fleet.stop_worker()


if __name__ == "__main__":
    main()
