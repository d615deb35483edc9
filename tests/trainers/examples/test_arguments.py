"""Arguments that the examples share."""

import argparse
from pathlib import Path

import pytest

from trainers.examples.arguments import count, files_in, folder_of_files, folder_with_train, positive

# ---- Numbers on the command lines of examples.


def test_numbers_that_can_be_meant() -> None:
    assert [count("0"), count("7"), positive("1")] == [0, 7, 1]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--steps=-1", "argument --steps: '-1' is not a whole number of at least 0"),
        ("--batch_size=0", "argument --batch_size: '0' is not a whole number of at least 1"),
        ("--steps=ten", "argument --steps: 'ten' is not a whole number"),
    ],
)
def test_numbers_that_cannot_be_meant(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=count)
    parser.add_argument("--batch_size", type=positive)
    with pytest.raises(SystemExit):
        parser.parse_args([option])
    assert words in capsys.readouterr().err


# ---- Folders of data on the command lines of examples.


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
    with pytest.raises(argparse.ArgumentTypeError, match="nowhere/train is not a directory with files"):
        folder_with_train("nowhere")
    with pytest.raises(argparse.ArgumentTypeError, match="empty/train is not a directory with files"):
        folder_with_train(str(log / "empty"))
    with pytest.raises(
        argparse.ArgumentTypeError, match="empty is a directory; give the directory of the files"
    ):
        folder_of_files(str(log))
