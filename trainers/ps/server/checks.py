"""Check the state of a server while it works. Each check takes constant time, and ends the server with one
sentence instead of training on with damage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import numpy as np

from trainers.errors import BrokenError, FleetError
from trainers.ps.tables.budget import Budget
from trainers.ps.tables.looking import look
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import EntryKind


class DivergedError(FleetError):
    """A row that is not finite any more."""

    restart_helps = False


def check_duties(unattended: float, waits: bool, budgets: Iterable[Budget]) -> None:
    """Raise BrokenError if trainers wait, or rows have a time to live, and neither was checked for so many
    seconds.
    """
    if unattended > 5.0 and (waits or any(each.bound.ttl_s for each in budgets)):
        raise BrokenError(f"Trainers and rows were not checked for {unattended:.0f} s, so this server stops.")


def check_row(table: object, key: int) -> None:
    """Check the row of a key that was just pushed to a sparse table. A bound or an entry filter may leave it
    out. Raises BrokenError or DivergedError.
    """
    assert isinstance(table, SparseTable)
    (found,) = look(table, np.array([key]))
    name, rows = table.spec.name, table.spec.rows
    if "values" not in found and rows.bound is None and rows.entry.kind is EntryKind.ALL:
        raise BrokenError(
            f"Id {key} of table {name!r} has no row after a push, so this server stops: {found}"
        )
    if not all(map(math.isfinite, chain(found.get("values", ()), *found.get("optimizer", ())))):
        raise DivergedError(
            f"After a push of finite gradients, id {key} of table {name!r} has the row {found}. This server "
            "stops, because the table would stay wrong. Lower the learning rate, or give the table bounds."
        )
