"""Served embeddings as they are at the moment, as modules that need no servers. Knows how a save becomes
rows in this process; leaves saving to the caller and programs to `program`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from typing import Any

import torch

from trainers.ps.saved.folder import open_folder
from trainers.ps.saved.reading import open_saves
from trainers.ps.saved.values import SparseValues, read_values
from trainers.ps.tables.spec import Initializer
from trainers.ps.trainer.modules import EmbeddingModule, bound, find
from trainers.serving.bags import Bags
from trainers.serving.rows import SavedRows, initial

_ASIDE = re.compile(r"tables-[0-9a-f]{8}")

StandIns = dict[torch.nn.Module, torch.nn.Module]


def stand_ins_of(
    model: torch.nn.Module, where: str | os.PathLike[str], save: Callable[[str], None]
) -> StandIns:
    """For each served embedding a module with its rows, all as of one moment. `save(folder)`: have the
    servers save their values; into a folder inside of `where`, which is gone afterwards. The rows of all of
    them must fit into this process. Raises what `save` raises, and LoadError.
    """
    served = find(model)
    if not served:
        return {}
    folder = open_folder(where)
    for left in filter(_ASIDE.fullmatch, folder.names()):  # by a trainer that was killed here
        folder.remove(left)
    name = f"tables-{secrets.token_hex(4)}"
    try:
        save(folder.path(name))
        values = read_values(folder.path(name)).sparse
        inits = {
            table: saved.spec.rows.init for table, saved in open_saves(folder.path(name)).tables().items()
        }
    finally:
        folder.remove(name)
    found: StandIns = {}
    for path, module in served:
        table = f"{path}.weight" if path else "weight"
        found[module] = _stand_in(module, values[table], inits[table])
    return found


def _stand_in(module: EmbeddingModule, saved: SparseValues, init: Initializer) -> torch.nn.Module:
    total = bound(module)
    if total is None:
        rows = SavedRows(saved.keys, saved.values, init, module.padding_idx)
        return Bags(module, rows) if isinstance(module, torch.nn.EmbeddingBag) else rows
    table: Any = torch.nn.Embedding if isinstance(module, torch.nn.Embedding) else torch.nn.EmbeddingBag
    weight = _whole(total, saved, init)
    own: torch.nn.Module = table(
        *weight.shape, _weight=weight, padding_idx=module.padding_idx, **_options(module)
    )
    return own


def _options(module: EmbeddingModule) -> dict[str, Any]:
    if not isinstance(module, torch.nn.EmbeddingBag):
        return {}
    return {"mode": module.mode, "include_last_offset": module.include_last_offset}


def _whole(total: int, saved: SparseValues, init: Initializer) -> torch.Tensor:
    """(total, dim): rows that `shrink` has removed read as the servers read them."""
    weight = torch.empty(total, saved.values.shape[1])
    weight[saved.keys] = saved.values
    if len(saved.keys) < total:
        gone = torch.ones(total, dtype=torch.bool).index_fill_(0, saved.keys, False).nonzero()[:, 0]
        weight[gone] = initial(init, gone, weight.shape[1])
    return weight
