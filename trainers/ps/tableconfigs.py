"""Settings of one sparse table, which override what module and optimizer say. Knows names and types; leaves
their effect to the table's spec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from trainers.errors import UsageError
from trainers.ps.configs import flag, keys, positive
from trainers.ps.tables.rules import RULES, AnyRule
from trainers.ps.tables.spec import Entry, Initializer


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfigs:
    """The keys of `strategy.sparse_table_configs[name]`. None: as module and optimizer say.

    `rule`: an update rule of trainers.ps (SGD, Adagrad, SparseAdam, FTRL) in place of the optimizer's; `lr`:
    a learning rate of its own. `init`, `entry`: see `SparseEmbedding`; `low`, `high`: bounds of every value
    after an update; `statistics`: rows count shows, clicks and unseen days.
    """

    rule: AnyRule | None = None
    lr: float | None = None
    init: Initializer | None = None
    entry: Entry | None = None
    low: float = -math.inf
    high: float = math.inf
    statistics: bool = False

    def __post_init__(self) -> None:
        where = "sparse_table_configs"
        if self.rule is not None and not isinstance(self.rule, tuple(RULES.values())):
            raise UsageError(
                f"{where} rule is {self.rule!r}; use SGD, Adagrad, SparseAdam or FTRL of trainers.ps"
            )
        if self.lr is not None:
            positive(f"{where} lr", self.lr)
        if self.init is not None and not isinstance(self.init, Initializer):
            raise UsageError(f"{where} init is {self.init!r}; use Uniform, Normal or Constant of trainers.ps")
        if self.entry is not None and not isinstance(self.entry, Entry):
            raise UsageError(
                f"{where} entry is {self.entry!r}; use ProbabilityEntry, CountFilterEntry or ShowClickEntry "
                "of trainers.ps"
            )
        if not self.low < self.high:
            raise UsageError(f"{where} bounds are {self.low!r} and {self.high!r}; the lower one comes first")
        flag(f"{where} statistics", self.statistics)


def sparse_table_configs(name: str, value: Any) -> Mapping[str, Any]:
    """The mapping of mappings, read-only and checked; raises UsageError."""
    if not isinstance(value, Mapping):
        raise UsageError(f"strategy.{name} is {value!r}; it must be a dict of dicts")
    known = [field.name for field in fields(TableConfigs)]
    checked = {str(table): keys(f"{name}[{table!r}]", configs, known) for table, configs in value.items()}
    for configs in checked.values():
        TableConfigs(**configs)
    return MappingProxyType(checked)
