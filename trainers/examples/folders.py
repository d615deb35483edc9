"""Folders of data on a command line: one that cannot be read is said at once, where no restart helps."""

from __future__ import annotations

import argparse
from pathlib import Path


def files_in(folder: Path) -> list[Path]:
    """In the order of their names. Hidden ones are left out: half-written, or an editor's."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def folder_of_files(text: str) -> Path:
    """A folder with files and no folders in it, for `type=` of an argument."""
    return _checked(Path(text))


def folder_with_train(text: str) -> Path:
    """A folder whose folder "train" is such a one, for `type=` of an argument."""
    folder = Path(text)
    _checked(folder / "train")
    return folder


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{folder} is not a folder of files")
    files = files_in(folder)
    if not files:
        raise argparse.ArgumentTypeError(f"{folder} has no files")
    folders = [path for path in files if path.is_dir()]
    if folders:
        raise argparse.ArgumentTypeError(f"{folders[0]} is a folder; give the one that has the files")
    return folder
