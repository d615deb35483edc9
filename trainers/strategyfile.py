"""A strategy as YAML and back. Knows plain values and the few kinds of objects that settings of tables have;
leaves the checks to the strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from trainers.errors import UsageError
from trainers.ps.tables.rules import RULES
from trainers.ps.tables.spec import Entry, EntryKind, Initializer, InitKind

_OBJECTS: dict[str, Any] = {rule.__name__: rule for rule in RULES.values()}
_OBJECTS |= {"Initializer": Initializer, "Entry": Entry}
_KINDS: dict[str, type[InitKind] | type[EntryKind]] = {"Initializer": InitKind, "Entry": EntryKind}


def dumped(values: Mapping[str, Any]) -> str:
    """The values by field, in this order."""
    import yaml

    plain = {name: _plain(value) for name, value in values.items()}
    return str(yaml.safe_dump(plain, sort_keys=False, default_flow_style=None))


def read(text: str, source: str) -> dict[str, Any]:
    """The values that `dumped` wrote; the fields are not checked. Raises UsageError for other YAML."""
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{source} is no YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{source} is {type(found).__name__}, not a mapping of a strategy's fields")
    return {name: _object(value, source) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {f"!{type(value).__name__}": inside}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _object(value: Any, source: str) -> Any:
    if isinstance(value, list):
        return [_object(each, source) for each in value]
    if not isinstance(value, dict):
        return value
    names = list(value)
    if len(names) == 1 and isinstance(names[0], str) and names[0].startswith("!"):
        return _made(names[0][1:], value[names[0]], source)
    return {key: _object(each, source) for key, each in value.items()}


def _made(name: str, given: Any, source: str) -> Any:
    make = _OBJECTS.get(name)
    if make is None or not isinstance(given, dict):
        raise UsageError(f"{source} has {name} {given!r}; it must be one of {', '.join(sorted(_OBJECTS))}")
    known = {field.name for field in fields(make)}
    if given.keys() != known:
        raise UsageError(f"{source} has {name} with {sorted(given)}; its fields are {sorted(known)}")
    values = dict(given)
    if name in _KINDS:
        kinds = {kind.name: kind for kind in _KINDS[name]}
        if values["kind"] not in kinds:
            raise UsageError(
                f"{source} has {name} of kind {values['kind']!r}; it must be one of {', '.join(kinds)}"
            )
        values["kind"] = kinds[values["kind"]]
    return make(**values)
