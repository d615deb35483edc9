"""Parts: which parts of a message belong together - KEYS, then ROWS, then perhaps STATS - and that a VALUES
part may run over several dense blocks. Leaves what is done with them to `store`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import torch

from trainers.ps.net.wire import Code, Field, Part
from trainers.ps.server.members import Refusal
from trainers.ps.server.rounds import Gradient
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import TableKind

AnyTable = DenseTable | SparseTable


def asks(parts: Sequence[Part]) -> list[Part]:
    """The parts of a push that ask for values, to be answered once it counts."""
    return [part for part, follower in _with_followers(parts) if _asks(part, follower)]


def entries(parts: Sequence[Part], table: Callable[[int], AnyTable]) -> Iterator[Gradient]:
    """One entry for each dense block and each KEYS + ROWS (+ STATS), without those that ask. `table` finds a
    table by its number or raises Refusal, as this does for parts in the wrong order.
    """
    keys: Part | None = None
    for part, follower in _with_followers(parts):
        if _asks(part, follower) or (part.field is Field.STATS and keys is not None):
            table(part.table)
        elif part.field is Field.VALUES:
            yield from _run(part, table)
        elif part.field is Field.KEYS:
            keys = part
        elif part.field is Field.ROWS and keys is not None and keys.table == part.table:
            table(part.table)
            stats = _stats(follower, keys)
            yield Gradient(part.table, part.data.float(), keys.data, part.lr, stats)
        else:
            raise Refusal(Code.BAD_MESSAGE, f"a {part.field.name} part in the wrong place")
        keys = None if part.field is Field.STATS else keys


def _run(part: Part, table: Callable[[int], AnyTable]) -> Iterator[Gradient]:
    """One entry for each dense block that this part runs over."""
    number, at = part.table, 0
    while True:
        spec = table(number).spec
        if spec.kind is not TableKind.DENSE or at + spec.size > len(part.data):
            raise Refusal(
                Code.BAD_SHAPE,
                f"{len(part.data)} values from table {part.table} on do not fill whole dense blocks",
            )
        yield Gradient(number, part.data[at : at + spec.size].float(), None, part.lr)
        number, at = number + 1, at + spec.size
        if at == len(part.data):
            return


def _with_followers(parts: Sequence[Part]) -> Iterator[tuple[Part, Part | None]]:
    return zip_longest(parts, parts[1:])


def _asks(part: Part, follower: Part | None) -> bool:
    """Keys that no rows follow ask for rows."""
    alone = follower is None or follower.field is not Field.ROWS or follower.table != part.table
    return part.field is Field.WANT or (part.field is Field.KEYS and alone)


def _stats(part: Part | None, keys: Part) -> torch.Tensor | None:
    if part is None or part.field is not Field.STATS or part.table != keys.table:
        return None
    if part.data.shape != (len(keys.data), 2):
        raise Refusal(Code.BAD_SHAPE, f"statistics of shape {list(part.data.shape)}")
    return part.data
