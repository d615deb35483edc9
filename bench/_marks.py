"""Where a bench writes its table in a document: between two marks that bear its name. Pure."""

from __future__ import annotations


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
