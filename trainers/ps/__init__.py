"""Train models with parameter servers, for tables that do not fit into one process. Each name is imported on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.ps.saves.read import read_values
    from trainers.ps.tables.rules import (
        FTRL,
        SGD,
        Adagrad,
        Adam,
        RMSprop,
        RowWiseAdagrad,
        RowWiseAdam,
        SparseAdam,
    )
    from trainers.ps.tables.spec import ShrinkPolicy
    from trainers.ps.trainer.modules import (
        Constant,
        CountFilterEntry,
        Normal,
        ProbabilityEntry,
        ShowClickEntry,
        SparseEmbedding,
        Uniform,
    )

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Constant",
    "CountFilterEntry",
    "Normal",
    "ProbabilityEntry",
    "RMSprop",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "ShowClickEntry",
    "ShrinkPolicy",
    "SparseAdam",
    "SparseEmbedding",
    "Uniform",
    "read_values",
]

_RULES = "trainers.ps.tables.rules"
_EMBEDDING = "trainers.ps.trainer.modules"
_HOMES = {
    "FTRL": _RULES,
    "SGD": _RULES,
    "Adagrad": _RULES,
    "Adam": _RULES,
    "RMSprop": _RULES,
    "RowWiseAdagrad": _RULES,
    "RowWiseAdam": _RULES,
    "SparseAdam": _RULES,
    "ShrinkPolicy": "trainers.ps.tables.spec",
    "read_values": "trainers.ps.saves.read",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_HOMES.get(name, _EMBEDDING)), name)
    raise AttributeError(f"module 'trainers.ps' has no attribute {name!r}")
