"""Folders of data on the command lines of examples."""

import argparse
from pathlib import Path

import pytest

from trainers.examples.arguments import files_in, folder_of_files, folder_with_train


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A click log as trainers.examples.click_log writes it; a hidden file is beside the parts."""
    (tmp_path / "train").mkdir()
    for name in ("part-1", "part-0", ".part-2.half"):
        (tmp_path / "train" / name).touch()
    (tmp_path / "best.json").touch()
    return tmp_path


def test_folders_with_files(log: Path) -> None:
    assert folder_of_files(str(log / "train")) == log / "train"
    assert folder_with_train(str(log)) == log
    assert [path.name for path in files_in(log / "train")] == ["part-0", "part-1"]


def test_folders_without(log: Path) -> None:
    (log / "empty" / "train").mkdir(parents=True)
    with pytest.raises(argparse.ArgumentTypeError, match="nowhere/train is not a folder of files"):
        folder_with_train("nowhere")
    with pytest.raises(argparse.ArgumentTypeError, match="empty/train has no files"):
        folder_with_train(str(log / "empty"))
    with pytest.raises(
        argparse.ArgumentTypeError, match="empty is a folder; give the one that has the files"
    ):
        folder_of_files(str(log))
