"""Numbers on the command lines of examples."""

import argparse

import pytest

from trainers.examples.arguments import count, positive


def test_numbers_that_can_be_meant() -> None:
    assert [count("0"), count("7"), positive("1")] == [0, 7, 1]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--steps=-1", "argument --steps: -1 is too small; it must be at least 0"),
        ("--batch_size=0", "argument --batch_size: 0 is too small; it must be at least 1"),
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
