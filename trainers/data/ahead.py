"""Ahead: some batches ahead of the one that is trained. Knows iterators; what is prepared is its caller's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Batch = TypeVar("Batch")


def prefetched(
    batches: Iterable[Batch], prepare: Callable[[Batch], object], ahead: int = 1
) -> Iterator[Batch]:
    """The same batches; each but the first is prepared before the one `ahead` places before it is given
    out.
    """
    coming: deque[Batch] = deque()
    for number, batch in enumerate(batches):
        if number:
            prepare(batch)
        coming.append(batch)
        if len(coming) > ahead:
            yield coming.popleft()
    yield from coming
