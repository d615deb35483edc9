"""Check single settings, with messages that name the setting and its value. All checks raise UsageError."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard

from fleetrun.aliases import Fields
from trainers.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def keys(name: str, value: object, known: Iterable[str]) -> Fields:
    """Return a read-only copy of a dict with known keys only. A later change would escape the checks."""
    if not isinstance(value, Mapping):
        raise UsageError(f"strategy.{name} is {value!r}; it must be a dict")
    for key in value:
        if key not in known:
            raise UsageError(f"strategy.{name} has no key {key!r}{nearest(str(key), known)}")
    return MappingProxyType(dict(value))


def accepted(name: str, value: object, kind: type[DataclassInstance]) -> Fields:
    """Return a read-only copy of a dict that `kind` accepts, which has a field for each key."""
    configs = keys(name, value, [field.name for field in fields(kind)])
    kind(**configs)
    return configs


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name, with the nearest known name, or with all names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(names)}"


def flag(name: str, value: object) -> bool:
    """Return the value if it is True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it must be True or False")
    return value


def is_whole(value: object) -> TypeGuard[int]:
    """Return True for a whole number. True and False are not whole numbers."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a whole number or a float."""
    return is_whole(value) or isinstance(value, float)


def positive(name: str, value: object) -> float:
    """Return a number above 0 as float."""
    if not is_number(value) or not value > 0:
        raise UsageError(f"{name} is {value!r}; it must be a number above 0")
    return float(value)


def whole(name: str, value: object, least: int) -> int:
    """Return a whole number of at least `least`."""
    if not is_whole(value) or value < least:
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return value


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """Return the value if it is one of these."""
    if value not in known:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    return str(value)
