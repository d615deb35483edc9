"""Read and write a checkpoint's manifest, one JSON document with a checksum and the small values."""

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
"""The only newline of a document, at its end, because JSON escapes newlines."""


class CheckpointError(FleetError):
    """A checkpoint could not be written, or all existing checkpoints are unreadable."""


@frozen(kw_only=True)
class Manifest:
    """The description of a checkpoint.

    `files` maps names to (bytes, xxh3-128). `index` locates each tensor. `parts` holds the other values.
    """

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
    """Return True if the document was written to its end. Its content is not checked."""
    return content.endswith(_END)


def manifest_from_bytes(content: bytes) -> Manifest:
    """Read a document. Raises CheckpointError if it is damaged, and NotSupportedError for a later version's
    format.
    """
    try:
        outer = json.loads(content)
        body = outer["manifest"]
        if xxhash.xxh3_128_hexdigest(body.encode()) != outer["xxh3"]:
            raise CheckpointError("is damaged: its checksum does not match")
        fields = json.loads(body)
        version = fields.pop("format")
        if version != FORMAT:
            raise NotSupportedError(
                f"has format {version}, but this version of fleetrun reads only format {FORMAT}"
            )
        fields["files"] = {name: (int(size), str(digest)) for name, (size, digest) in fields["files"].items()}
        return Manifest(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"is damaged: {error!r}") from error


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint."""
    return int(name.removeprefix("step-").partition(".")[0])


# ---- States of objects and dicts


def is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def values_of(value: Any) -> Any:
    return value.state_dict() if is_stateful(value) else value


def put_values(state: Fields, saved: Fields) -> None:
    """Load saved values into the objects and dicts of `state` with the same names."""
    for name, value in state.items():
        if is_stateful(value):
            value.load_state_dict(saved[name])
        else:
            value.clear()
            value.update(saved[name])


# ---- Small values as JSON

_ITEMS = "__items__"
"""Marks a dict with keys that are not strings (such as milestones of a learning rate schedule), as a list of
pairs.
"""


def to_json(name: str, value: object) -> object:
    """Convert a value of numbers, strings, lists, tuples and dicts to JSON.

    Raises UsageError, with `name`, for any other type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json(name, item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and key != _ITEMS for key in value):
            return {key: to_json(f"{name}.{key}", item) for key, item in value.items()}
        return {_ITEMS: [[to_json(name, key), to_json(name, item)] for key, item in value.items()]}
    raise UsageError(
        f"{name} is of type {type(value).__name__} and cannot be kept in a checkpoint. Besides tensors of "
        "the model and the optimizer, it can contain numbers, strings, lists and dicts."
    )


def from_json(value: object) -> Any:
    """Return the value from `to_json`. Tuples have become lists."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_ITEMS}:
            return {from_json(key): from_json(item) for key, item in value[_ITEMS]}
        return {key: from_json(item) for key, item in value.items()}
    return value
