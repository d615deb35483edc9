"""Parse arguments of the examples. Unusable numbers and directories fail immediately, as restarts would not
help.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

# ---- Numbers on a command line


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


count = partial(_at_least, 0)
"""Parse a whole number from 0 on, for `type=` of an argument."""
positive = partial(_at_least, 1)
"""Parse a whole number from 1 on, for `type=` of an argument."""


def add_training(
    parser: argparse.ArgumentParser, *, epochs: int, batch_size: int, lr: float, batch_of: str | None = None
) -> None:
    """Add the arguments for the length and settings of training, with these defaults. `batch_of` describes
    the batch.
    """
    parser.add_argument("--epochs", type=count, default=epochs)
    parser.add_argument("--steps", type=count, help="stop after this many batches")
    parser.add_argument("--batch_size", type=positive, default=batch_size, help=batch_of)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=lr)


def add_wide_deep(parser: argparse.ArgumentParser, *, rows: int, epochs: int) -> None:
    """Add the arguments of the Wide & Deep trainers: rows, training and model."""
    parser.add_argument(
        "--rows", type=positive, default=rows, help="number of rows that each trainer generates"
    )
    add_training(parser, epochs=epochs, batch_size=512, lr=0.002)
    parser.add_argument("--dim", type=positive, default=9)
    parser.add_argument("--hidden", type=positive, nargs="+", default=[128, 64])


# ---- Directories of data on a command line


def files_in(folder: Path) -> list[Path]:
    """Return the files sorted by name. Hidden ones are left out, because they may be half-written or an
    editor's.
    """
    return sorted(folder.glob("[!.]*"))


def folder_of_files(text: str) -> Path:
    """Parse a directory with files and without subdirectories, for `type=` of an argument."""
    return _checked_folder(Path(text))


def folder_with_train(text: str) -> Path:
    """Parse a directory whose subdirectory "train" contains only files, for `type=` of an argument."""
    return _checked_folder(Path(text) / "train").parent


def _checked_folder(folder: Path) -> Path:
    if not folder.is_dir() or not files_in(folder):
        raise argparse.ArgumentTypeError(f"{folder} is not a directory with files")
    if folders := [path for path in files_in(folder) if path.is_dir()]:
        raise argparse.ArgumentTypeError(f"{folders[0]} is a directory; give the directory of the files")
    return folder
