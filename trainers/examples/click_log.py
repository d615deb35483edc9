"""Write a click log for wide_and_deep --data DIR, and read it in batches.

The log consists of MultiSlot files in DIR/train and DIR/test, and of DIR/best.json with the best result that
a model can reach on the test files.

    python -m trainers.examples.click_log DIR --rows 400000
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from trainers.data.click_files import CLICK_SLOTS, ID_SLOTS, write_slots, write_tsv
from trainers.data.clicks import ClickModel, Clicks
from trainers.data.dataset import InMemoryDataset

Batch = tuple[Tensor, Tensor, Tensor]
"""ids (n, 26) int64, dense (n, 13) float32, labels (n,) float32."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a generated click log")
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--test_rows", type=int, default=50_000)
    parser.add_argument(
        "--files", type=int, default=4, help="how many rows for training; the tests get half as many"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows; the truth stays the same")
    parser.add_argument(
        "--tsv", action="store_true", help="write Criteo's tab-separated lines instead of MultiSlot"
    )
    args = parser.parse_args(arguments)

    truth = ClickModel()
    test = truth.draw(args.test_rows, 2 * args.seed + 1)
    write(test, args.directory / "test", max(1, args.files // 2), tsv=args.tsv)
    write(truth.draw(args.rows, 2 * args.seed), args.directory / "train", args.files, tsv=args.tsv)
    best = test.best()
    (args.directory / "best.json").write_text(json.dumps(asdict(best)) + "\n")
    print(f"best possible on the test files: AUC {best.auc:.4f}, log loss {best.log_loss:.4f}")


def write(clicks: Clicks, directory: Path, files: int, *, tsv: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"part-{number}" for number in range(files)]
    (write_tsv if tsv else write_slots)(clicks, paths)


def load(paths: Sequence[Path], batch_size: int) -> InMemoryDataset:
    """Load MultiSlot files of a click log."""
    dataset = InMemoryDataset()
    dataset.init(use_var=CLICK_SLOTS, batch_size=batch_size)
    dataset.set_filelist(paths)
    dataset.load_into_memory()
    return dataset


def loaded_batches(dataset: InMemoryDataset) -> Iterator[Batch]:
    for rows in dataset:
        yield rows.joined(*ID_SLOTS), rows.tensor("dense_input"), rows.tensor("label").squeeze(1)


def drawn_batches(clicks: Clicks, batch_size: int) -> Iterator[Batch]:
    ids, dense, labels = (torch.split(each, batch_size) for each in clicks.tensors())
    return zip(ids, dense, labels, strict=True)


if __name__ == "__main__":
    main()
