"""Ahead: one batch ahead of the one that is trained. Knows iterators; what is prepared is its caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Batch = TypeVar("Batch")


def prefetched(batches: Iterable[Batch], prepare: Callable[[Batch], object]) -> Iterator[Batch]:
    """The same batches; each but the first is prepared before the one ahead of it is given out."""
    ahead: list[Batch] = []
    for following in batches:
        if ahead:
            prepare(following)
            yield ahead.pop()
        ahead.append(following)
    yield from ahead
