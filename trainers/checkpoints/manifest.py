"""What a checkpoint says of itself: one JSON document with its own checksum, and the small values in it.
Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import xxhash

from fleetrun.aliases import Fields
from fleetrun.frozen import frozen
from trainers.errors import FleetError, NotSupportedError, UsageError

# ---- The document

MANIFEST = "checkpoint.json"
FORMAT = 1

_END = b"\n"
"""JSON escapes newlines, so that a document has this one only, at its end."""


class CheckpointError(FleetError):
    """A checkpoint could not be written, or there are some and none of them can be read."""


@frozen(kw_only=True)
class Manifest:
    """`files` are (bytes, xxh3-128) by name, `index` where each tensor is, `parts` the other values."""

    step: int
    world: int
    files: Mapping[str, tuple[int, str]]
    index: Fields
    parts: Fields


def manifest_to_bytes(manifest: Manifest) -> bytes:
    body = json.dumps({"format": FORMAT, **asdict(manifest)})
    text = json.dumps({"xxh3": xxhash.xxh3_128_hexdigest(body.encode()), "manifest": body})
    return text.encode() + _END


def is_ended(content: bytes) -> bool:
    """Whether the document was written to its end; its content has not been checked."""
    return content.endswith(_END)


def manifest_from_bytes(content: bytes) -> Manifest:
    """Raises CheckpointError for anything but a whole document, NotSupportedError for a later version's."""
    try:
        outer = json.loads(content)
        body = outer["manifest"]
        if xxhash.xxh3_128_hexdigest(body.encode()) != outer["xxh3"]:
            raise CheckpointError("is damaged: its checksum does not fit")
        told = json.loads(body)
        version = told.pop("format")
        if version != FORMAT:
            raise NotSupportedError(f"has format {version}; this version reads {FORMAT}")
        told["files"] = {name: (int(size), str(digest)) for name, (size, digest) in told["files"].items()}
        return Manifest(**told)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"is damaged: {error!r}") from error


def step_of(name: str) -> int:
    """Return the step that the name of a checkpoint says."""
    return int(name.removeprefix("step-").partition(".")[0])


# ---- States of objects and dicts


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def values_of(value: Any) -> Any:
    return value.state_dict() if is_stateful(value) else value


def put_values(state: Fields, saved: Fields) -> None:
    """Bring the objects and dicts of `state` to what was saved under the same names."""
    for name, value in state.items():
        if is_stateful(value):
            value.load_state_dict(saved[name])
        else:
            value.clear()
            value.update(saved[name])


# ---- Small values as JSON

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
        f"{name} is of type {type(value).__name__} and cannot be kept in a checkpoint: besides the tensors "
        "of model and optimizer it holds numbers, strings, lists and dicts"
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
