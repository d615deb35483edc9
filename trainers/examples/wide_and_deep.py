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
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from trainers import fleet
from trainers.data.click_files import CLICK_SLOTS, ID_SLOTS
from trainers.data.clicks import ClickModel, Clicks
from trainers.data.dataset import InMemoryDataset
from trainers.examples import click_log
from trainers.examples.arguments import add_training, positive
from trainers.metrics import Auc
from trainers.ps import SparseEmbedding, Uniform
from trainers.zoo.click_models import WideDeep

OPTIMIZERS = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
REPORT_EVERY = 20
TEST_ROWS = 50_000

Batch = tuple[Tensor, Tensor, Tensor]
"""ids (n, 26) int64, dense (n, 13) float32, labels (n,) float32."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Wide & deep on a click log")
    parser.add_argument("--data", metavar="DIR", type=Path, help="MultiSlot files (default: generated rows)")
    parser.add_argument("--rows", type=positive, default=200_000, help="how many each trainer generates")
    parser.add_argument("--mode", choices=["async", "sync", "geo"], default="async")
    add_training(parser, epochs=2, batch_size=512, lr=0.002)
    parser.add_argument("--dim", type=positive, default=9)
    parser.add_argument("--hidden", type=positive, nargs="+", default=[128, 64])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    args = parser.parse_args()
    # checked here, because a restart would not help
    if args.data and not (args.data / "best.json").is_file():
        parser.error(
            f"{args.data} has no best.json: write it with python -m {click_log.__name__} {args.data}"
        )
    return args


class WideDeepDataset(Dataset[Batch]):
    """Rows of a generated log. An index is a list for a whole batch, so that rows are not handled one
    by one.
    """

    def __init__(self, clicks: Clicks) -> None:
        self._ids, self._dense, self._labels = clicks.tensors()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, rows: list[int]) -> Batch:
        return self._ids[rows], self._dense[rows], self._labels[rows]


class Generated:
    """Rows drawn in memory. Each trainer has its own, from one distribution."""

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        self._truth = ClickModel()
        self._batch_size = batch_size
        train_data = WideDeepDataset(
            self._truth.draw(rows, 1 + seed * fleet.worker_num() + fleet.worker_index())
        )
        shuffled = torch.Generator().manual_seed(seed)
        batches = BatchSampler(RandomSampler(train_data, generator=shuffled), batch_size, drop_last=True)
        self._reader = DataLoader(train_data, sampler=batches, batch_size=None)

    def epoch(self) -> Iterable[Batch]:
        return self._reader

    def test(self) -> tuple[Iterable[Batch], float]:
        """Return batches, and the best possible AUC on them."""
        clicks = self._truth.draw(TEST_ROWS, 0)
        split = (torch.split(each, self._batch_size) for each in clicks.tensors())
        return zip(*split, strict=True), clicks.best().auc


class Files:
    """MultiSlot files in DIR/train and DIR/test. Each trainer reads its share."""

    def __init__(self, directory: Path, batch_size: int) -> None:
        self._directory, self._batch_size = directory, batch_size
        paths = sorted((directory / "train").iterdir())
        self._train = self._loaded(paths[fleet.worker_index() :: fleet.worker_num()])

    def epoch(self) -> Iterable[Batch]:
        self._train.local_shuffle()
        return self._batches(self._train)

    def test(self) -> tuple[Iterable[Batch], float]:
        """Return batches, and the best possible AUC on them."""
        best = json.loads((self._directory / "best.json").read_text())
        return self._batches(self._loaded(sorted((self._directory / "test").iterdir()))), best["auc"]

    def _loaded(self, paths: list[Path]) -> InMemoryDataset:
        dataset = InMemoryDataset()
        dataset.init(use_var=CLICK_SLOTS, batch_size=self._batch_size)
        dataset.set_filelist(paths)
        dataset.load_into_memory()
        return dataset

    def _batches(self, dataset: InMemoryDataset) -> Iterable[Batch]:
        for batch in dataset:
            yield batch.joined(*ID_SLOTS), batch.tensor("dense_input"), batch.tensor("label").squeeze(1)


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
