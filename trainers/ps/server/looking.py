"""The answer to a LOOK: rows of a table that a person wants to see."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from trainers.ps.server.members import Refusal
from trainers.ps.server.store import AnyTable
from trainers.ps.tables.looking import look
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.wire import Code, Field, Part

MOST_KEYS = 1000


def answer_look(tables: Iterable[AnyTable], parts: Sequence[Part]) -> str:
    """JSON: `rows`, one for each key of the KEYS part, of the sparse table that the TEXT part names; without
    such a table the names of those that there are, in `tables`. Raises Refusal.
    """
    if [part.field for part in parts] != [Field.TEXT, Field.KEYS]:
        raise Refusal(Code.BAD_MESSAGE, "a LOOK needs the name of a table and keys")
    name, keys = parts[0].data.numpy().tobytes().decode("utf-8", "replace"), parts[1].data.numpy()
    if len(keys) > MOST_KEYS:
        raise Refusal(Code.BAD_MESSAGE, f"a LOOK for {len(keys)} keys; at most {MOST_KEYS}")
    sparse = {each.spec.name: each for each in tables if isinstance(each, SparseTable)}
    if name not in sparse:
        return json.dumps({"tables": sorted(sparse)})
    try:
        return json.dumps({"rows": look(sparse[name], keys)})
    except OSError as error:  # of rows on disk
        raise Refusal(Code.FAILED, str(error)) from error
