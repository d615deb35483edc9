"""The conditions of a measurement, and where a bench writes its table: between two marks in a document."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path


def measured(what: str, load: float) -> str:
    """When and where something was measured. `load`: of the machine, before it."""
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} CPUs, Linux {platform.release()}, {what}, load "
        f"{load:.1f} before and {os.getloadavg()[0]:.1f} after."
    )


def check_marks(path: Path | None, bench: str) -> None:
    """Raises ValueError for a document without the marks of `bench`: now, and not after an hour."""
    if path is not None:
        between_marks(path.read_text(), bench)


def publish(text: str, path: Path | None, bench: str) -> None:
    """Print the text, and put it between the marks of the document, if one is given."""
    print(text)
    if path is not None:
        path.write_text(put_between_marks(path.read_text(), bench, text))


def put_between_marks(document: str, bench: str, new: str) -> str:
    """`document` with `new` between the marks of `bench`. Raises ValueError when they are not there."""
    begin, end = _marks(bench)
    head, _, tail = _parts(document, begin, end)
    return f"{head}{begin}\n{new}\n{end}{tail}"


def between_marks(document: str, bench: str) -> str:
    """What is there now. Raises ValueError when the marks are not there."""
    return _parts(document, *_marks(bench))[1].strip("\n")


def _marks(bench: str) -> tuple[str, str]:
    return f"<!-- bench/{bench} --write: begin -->", f"<!-- bench/{bench} --write: end -->"


def _parts(document: str, begin: str, end: str) -> tuple[str, str, str]:
    head, found_begin, rest = document.partition(begin)
    old, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"no {begin} ... {end} in it")
    return head, old, tail
