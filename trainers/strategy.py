"""DistributedStrategy: the wishes of a script, checked when they are written. Knows names, types and
ranges; leaves what they do to `collective` and `ps`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from trainers.errors import NotSupportedError, UsageError

SPLIT_METHODS = ("RoundRobin", "HashName")


@dataclass(frozen=True, slots=True, kw_only=True)
class PsConfigs:
    """Settings of parameter-server mode; the keys of `strategy.ps_configs`. Times are seconds.

    `split_method`: which server gets a dense block. `slice_var_up`: dense parameters over 8192 elements are
    sliced. `request_timeout_s`: a server that says nothing for so long is an error. `trainer_timeout_s`: a
    trainer whose connection is gone for so long is lost. `join_timeout_s`: how long to wait for processes
    that have not shown up yet.
    """

    split_method: str = "RoundRobin"
    slice_var_up: bool = True
    request_timeout_s: float = 60.0
    trainer_timeout_s: float = 10.0
    join_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.split_method not in SPLIT_METHODS:
            names = ", ".join(SPLIT_METHODS)
            raise UsageError(f"ps_configs split_method is {self.split_method!r}; it must be one of {names}")
        if not isinstance(self.slice_var_up, bool):
            raise UsageError(f"ps_configs slice_var_up is {self.slice_var_up!r}; it must be True or False")
        for name in ("request_timeout_s", "trainer_timeout_s", "join_timeout_s"):
            _positive(f"ps_configs {name}", getattr(self, name))


class DistributedStrategy:
    """How a job trains. An unknown field is an error that names the nearest one.

    `a_sync`: parameter servers apply a push on arrival (True) or a step of all trainers at once (False).
    `a_sync_configs`: `{"k_steps": 0}`; any other number of steps asks for geo training, which this version
    refuses. `ps_configs`: see `PsConfigs`. `find_unused_parameters`, `fuse_grad_size_in_MB`: collective;
    passed to torch's DistributedDataParallel.
    """

    a_sync: bool
    a_sync_configs: Mapping[str, Any]
    ps_configs: Mapping[str, Any]
    find_unused_parameters: bool
    fuse_grad_size_in_MB: float

    def __init__(self) -> None:
        self.a_sync = False
        self.a_sync_configs = {}
        self.ps_configs = {}
        self.find_unused_parameters = False
        self.fuse_grad_size_in_MB = 25.0

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _CHECKS:
            raise UsageError(f"DistributedStrategy has no field {name!r}{_nearest(name, _CHECKS)}")
        object.__setattr__(self, name, _CHECKS[name](name, value))

    def ps(self) -> PsConfigs:
        """`ps_configs` with the defaults filled in."""
        return PsConfigs(**self.ps_configs)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(names)}"


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"strategy.{name} is {value!r}; it must be True or False")
    return value


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UsageError(f"{name} is {value!r}; it must be a number above 0")
    return float(value)


def _keys(name: str, value: Any, known: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"strategy.{name} is {value!r}; it must be a dict")
    for key in value:
        if key not in known:
            raise UsageError(f"strategy.{name} has no key {key!r}{_nearest(str(key), known)}")
    return MappingProxyType(dict(value))  # read-only: a later change would escape the checks


def _a_sync_configs(name: str, value: Any) -> Mapping[str, Any]:
    configs = _keys(name, value, ("k_steps",))
    steps = configs.get("k_steps", 0)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise UsageError(f"strategy.{name} k_steps is {steps!r}; it must be a whole number")
    if steps > 0:
        raise NotSupportedError(
            f"strategy.{name} has k_steps {steps}: geo training is not in this version; "
            "leave k_steps out and use a_sync True (async) or False (sync)"
        )
    return configs


def _ps_configs(name: str, value: Any) -> Mapping[str, Any]:
    configs = _keys(name, value, [field.name for field in fields(PsConfigs)])
    PsConfigs(**configs)
    return configs


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "a_sync": _flag,
    "a_sync_configs": _a_sync_configs,
    "ps_configs": _ps_configs,
    "find_unused_parameters": _flag,
    "fuse_grad_size_in_MB": lambda name, value: _positive(f"strategy.{name}", value),
}
