"""Shrink a table at once, where a server does it in slices."""

from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import ShrinkPolicy


def shrink(table: SparseTable, policy: ShrinkPolicy) -> int:
    """Let a day pass, and return the number of removed rows."""
    table.begin_shrink(policy)
    while (removed := table.shrink_some(1 << 40)) is None:
        pass
    table.release()
    return removed
