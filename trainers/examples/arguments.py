"""Parse arguments of the examples. Unusable numbers and directories fail immediately, as restarts would not
help.
"""

from __future__ import annotations

import argparse
from pathlib import Path

# ---- Numbers on a command line


def count(text: str) -> int:
    """Parse a whole number from 0 on, for `type=` of an argument."""
    return _at_least(text, 0)


def positive(text: str) -> int:
    """Parse a whole number from 1 on, for `type=` of an argument."""
    return _at_least(text, 1)


def add_training(
    parser: argparse.ArgumentParser, *, epochs: int, batch_size: int, lr: float, batch_of: str | None = None
) -> None:
    """Add the arguments for the length and settings of training, with these defaults. `batch_of` describes
    the batch.
    """
    parser.add_argument("--epochs", type=count, default=epochs)
    parser.add_argument("--steps", type=count, help="stop after so many batches")
    parser.add_argument("--batch_size", type=positive, default=batch_size, help=batch_of)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=lr)


def _at_least(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is too small; it must be at least {least}")
    return number


# ---- Directories of data on a command line


def files_in(folder: Path) -> list[Path]:
    """Return the files sorted by name. Hidden ones are left out, because they may be half-written or an
    editor's.
    """
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def folder_of_files(text: str) -> Path:
    """Parse a directory with files and without subdirectories, for `type=` of an argument."""
    return _checked_folder(Path(text))


def folder_with_train(text: str) -> Path:
    """Parse a directory whose subdirectory "train" contains only files, for `type=` of an argument."""
    folder = Path(text)
    _checked_folder(folder / "train")
    return folder


def _checked_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{folder} is not a folder of files")
    files = files_in(folder)
    if not files:
        raise argparse.ArgumentTypeError(f"{folder} has no files")
    folders = [path for path in files if path.is_dir()]
    if folders:
        raise argparse.ArgumentTypeError(f"{folders[0]} is a folder; give the one that has the files")
    return folder
