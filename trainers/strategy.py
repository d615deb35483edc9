"""DistributedStrategy: the wishes of a script, checked when they are written. Knows its fields; leaves those
of parameter servers to `ps.configs`, and what they do to `collective` and `ps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainers.errors import NotSupportedError, UsageError
from trainers.ps.configs import AsyncConfigs, PsConfigs, a_sync_configs, flag, nearest, positive, ps_configs
from trainers.ps.tableconfigs import TableConfigs, sparse_table_configs

DENSE = ("servers", "allreduce")


class DistributedStrategy:
    """How a job trains. An unknown field is an error that names the nearest one.

    `a_sync`: parameter servers apply a push on arrival (True) or a step of all trainers at once (False).
    `a_sync_configs`: see `AsyncConfigs`; `{"k_steps": 100}` asks for geo training. `ps_configs`: see
    `PsConfigs`. `sparse_table_configs`: `{"name of the embedding's weight": {...}}`, see `TableConfigs`.
    `dense`: the dense parameters are on the servers, or trained by the optimizer in each trainer with
    gradients averaged among them ("allreduce"). `find_unused_parameters`, `fuse_grad_size_in_MB`:
    collective; passed to torch's DistributedDataParallel.
    """

    a_sync: bool
    a_sync_configs: Mapping[str, Any]
    ps_configs: Mapping[str, Any]
    sparse_table_configs: Mapping[str, Any]
    dense: str
    find_unused_parameters: bool
    fuse_grad_size_in_MB: float

    def __init__(self) -> None:
        self.a_sync = False
        self.a_sync_configs = {}
        self.ps_configs = {}
        self.sparse_table_configs = {}
        self.dense = "servers"
        self.find_unused_parameters = False
        self.fuse_grad_size_in_MB = 25.0

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _CHECKS:
            raise UsageError(f"DistributedStrategy has no field {name!r}{nearest(name, _CHECKS)}")
        object.__setattr__(self, name, _CHECKS[name](name, value))

    def ps(self) -> PsConfigs:
        """`ps_configs` with the defaults filled in. Raises NotSupportedError for settings that contradict."""
        configs = PsConfigs(**self.ps_configs)
        if not self.a_sync and configs.durability == "snapshot":
            raise NotSupportedError(
                'ps_configs durability "snapshot" with a_sync False: servers that go back to snapshots of '
                'different steps cannot go on in step; use "log" or "none"'
            )
        return configs

    def asynchronous(self) -> AsyncConfigs:
        """`a_sync_configs` with the defaults filled in."""
        configs = AsyncConfigs(**self.a_sync_configs)
        if configs.k_steps and not self.a_sync:
            raise UsageError(
                f"a_sync_configs k_steps is {configs.k_steps} with a_sync False; geo training is "
                "asynchronous: set strategy.a_sync = True"
            )
        if configs.k_steps and self.dense == "allreduce":
            raise NotSupportedError(
                f'a_sync_configs k_steps is {configs.k_steps} with strategy.dense "allreduce": in geo '
                'training trainers step on their own; use dense "servers"'
            )
        return configs

    def agreed(self) -> str:
        """The settings that servers and trainers must have alike, as far as they are not the defaults."""
        configs, asynchronous = self.ps(), self.asynchronous()
        mine: dict[str, Any] = {}
        for name in ("durability", "nonfinite", "wire_dtype"):
            mine[name] = getattr(configs, name)
        mine["max_staleness"] = asynchronous.max_staleness if self.a_sync else None
        mine["geo"] = asynchronous.k_steps > 0
        usual: dict[str, Any] = {"durability": "none", "nonfinite": "refuse", "wire_dtype": "float32"}
        usual |= {"max_staleness": None, "geo": False}
        return ", ".join(f"{name} {value}" for name, value in mine.items() if value != usual[name])

    def tables(self) -> Mapping[str, TableConfigs]:
        """`sparse_table_configs` by the name of the embedding's weight."""
        return {name: TableConfigs(**configs) for name, configs in self.sparse_table_configs.items()}


def _dense(name: str, value: Any) -> str:
    if value not in DENSE:
        raise UsageError(f"strategy.{name} is {value!r}; it must be one of {', '.join(DENSE)}")
    return str(value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "a_sync": lambda name, value: flag(f"strategy.{name}", value),
    "a_sync_configs": a_sync_configs,
    "ps_configs": ps_configs,
    "sparse_table_configs": sparse_table_configs,
    "dense": _dense,
    "find_unused_parameters": lambda name, value: flag(f"strategy.{name}", value),
    "fuse_grad_size_in_MB": lambda name, value: positive(f"strategy.{name}", value),
}
