"""Where a bench writes its table in a document: between two marks that bear its name. Pure."""

from __future__ import annotations


def put_between_marks(document: str, bench: str, new: str) -> str:
    """`document` with `new` between the marks of `bench`. Raises ValueError when they are not there."""
    begin, end = (f"<!-- bench/{bench} --write: {word} -->" for word in ("begin", "end"))
    head, found_begin, rest = document.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"no {begin} ... {end} in it")
    return f"{head}{begin}\n{new}\n{end}{tail}"
