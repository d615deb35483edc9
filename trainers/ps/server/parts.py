"""Parts: which parts of a message belong together - KEYS, then ROWS, then perhaps STATS - and that a VALUES
part may run over several dense blocks. Leaves what is done with them to `store`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainers.ps.net.wire import Code, Field, Part
from trainers.ps.server.members import Refusal
from trainers.ps.server.rounds import Gradient
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.run import DenseRun
from trainers.ps.tables.sparse import SparseTable

AnyTable = DenseTable | SparseTable


def sort_parts(
    parts: Sequence[Part], table: Callable[[int], AnyTable], run: Callable[[int, int], DenseRun]
) -> tuple[list[Gradient], list[Part]]:
    """What is brought - an entry for each run of dense blocks and each KEYS + ROWS (+ STATS) - and the parts
    that ask: WANT, and KEYS that no rows follow. `table` finds a table by its number, `run` a run by its
    first block and its elements, or raises Refusal, as this does for parts in the wrong order.
    """
    brought: list[Gradient] = []
    asking: list[Part] = []
    before: Part | None = None
    for part in parts:
        number, field, data, lr = part
        if field is Field.VALUES:
            sizes = run(number, data.shape[0]).sizes
            brought.append(Gradient(number, data.float(), None, lr, None, sizes))
        elif field is Field.KEYS or field is Field.WANT:
            table(number)
            asking.append(part)
        elif before is None or before.table != number or before.field is not _FOLLOWS.get(field):
            raise Refusal(Code.BAD_MESSAGE, f"a {field.name} part in the wrong place")
        elif field is Field.ROWS:
            brought.append(Gradient(number, data.float(), asking.pop().data, lr))
        else:
            brought.append(_with_stats(brought.pop(), part))
        before = part
    return brought, asking


_FOLLOWS = {Field.ROWS: Field.KEYS, Field.STATS: Field.ROWS}


def _with_stats(gradient: Gradient, part: Part) -> Gradient:
    if gradient.keys is None or part.data.shape != (gradient.keys.shape[0], 2):
        raise Refusal(Code.BAD_SHAPE, f"statistics of shape {list(part.data.shape)}")
    return gradient._replace(stats=part.data)


def run_of(first: int, elements: int, table: Callable[[int], AnyTable]) -> DenseRun:
    """The dense blocks from `first` on that so many elements fill. Raises Refusal when they do not."""
    blocks: list[DenseTable] = []
    left = elements
    while left or not blocks:
        block = table(first + len(blocks))
        if not isinstance(block, DenseTable) or block.spec.size > left:
            raise Refusal(
                Code.BAD_SHAPE, f"{elements} values from table {first} on do not fill whole dense blocks"
            )
        blocks.append(block)
        left -= block.spec.size
    return DenseRun(blocks)
