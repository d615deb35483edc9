"""Small values in a checkpoint's manifest: numbers, strings, lists and dicts as JSON, and back. Pure."""

from __future__ import annotations

from typing import Any

from trainers.errors import UsageError

_ITEMS = "__items__"
"""A dict whose keys are not all strings (the milestones of a learning rate schedule) is a list of pairs."""


def to_json(name: str, value: Any) -> Any:
    """Raises UsageError, with `name`, for anything else than numbers, strings, lists, tuples and dicts."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json(name, item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and key != _ITEMS for key in value):
            return {key: to_json(f"{name}.{key}", item) for key, item in value.items()}
        return {_ITEMS: [[to_json(name, key), to_json(name, item)] for key, item in value.items()]}
    raise UsageError(
        f"{name} is of type {type(value).__name__} and cannot be kept in a checkpoint: beside the tensors of "
        "model and optimizer it holds numbers, strings, lists and dicts"
    )


def from_json(value: Any) -> Any:
    """The value that `to_json` was given; tuples have become lists."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_ITEMS}:
            return {from_json(key): from_json(item) for key, item in value[_ITEMS]}
        return {key: from_json(item) for key, item in value.items()}
    return value
