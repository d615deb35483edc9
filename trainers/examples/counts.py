"""Numbers on a command line: one that cannot be meant is said at once."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number from 0 on, for `type=` of an argument."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number from 1 on, for `type=` of an argument."""
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is too small; it must be at least {least}")
    return number
