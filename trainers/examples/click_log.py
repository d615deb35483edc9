"""Write a click log for wide_and_deep --data DIR.

The log consists of MultiSlot files in DIR/train and DIR/test, and of DIR/best.json with the best result that
a model can reach on the test files.

    python -m trainers.examples.click_log DIR --rows 400000
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trainers.data.click_files import write_slots, write_tsv
from trainers.data.clicks import ClickModel, Clicks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a generated click log")
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--test_rows", type=int, default=50_000)
    parser.add_argument("--files", type=int, default=4, help="so many for training, half as many for testing")
    parser.add_argument("--seed", type=int, default=0, help="other rows of the same truth")
    parser.add_argument("--tsv", action="store_true", help="Criteo's tab-separated lines, not MultiSlot")
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


if __name__ == "__main__":
    main()
