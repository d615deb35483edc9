"""Parts of every manifest: file records with sizes and checksums, safe names, JSON with a checksum."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeVar

import xxhash

from fleetrun.aliases import Document, Fields
from fleetrun.frozen import frozen
from trainers.storage.folder import Buffer

Made = TypeVar("Made")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


@frozen
class FileRecord:
    """A file of a save: its name inside the save's directory, bytes, and xxh3-64 checksum in hex."""

    name: str
    size: int
    xxh3_64: str

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ManifestError(f"{self.name!r} is not a valid file name")

    @classmethod
    def of(cls, name: str, content: list[Buffer]) -> FileRecord:
        digest = xxhash.xxh3_64()
        for piece in content:
            digest.update(piece)
        return cls(name, sum(len(piece) for piece in content), digest.hexdigest())


def is_name(name: object) -> bool:
    """Return True if the name can only be a file inside the directory."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


class ManifestError(ValueError):
    """Text that is not a valid manifest or part."""


def sealed(kind: str, version: int, body: Fields, *, whole: bool = False) -> bytes:
    """Return the JSON of a manifest, with its checksum. With `whole`, the checksum also covers kind and
    version.
    """
    head = {"format": kind, "version": version}
    checksum = _checksum({**head, **body} if whole else body)
    return json.dumps({**head, **body, "checksum": checksum}, indent=1).encode() + b"\n"


def opened(
    text: bytes, kind: str, newest: int, made: Callable[[Document], Made], *, whole: bool = False
) -> Made:
    """Return what `made` makes of the body of a manifest of this kind, up to the `newest` version. Raises
    ManifestError.
    """
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ManifestError(f"the file is not JSON: {error}") from error
    if not isinstance(body, dict) or body.get("format") != kind:
        raise ManifestError(f"the file is not a manifest of {kind}")
    checksum, version = body.pop("checksum", None), body.get("version")
    if not isinstance(version, int) or version < 1:
        raise ManifestError(f"its format version is {version!r}")
    if version > newest:
        raise ManifestError(
            f"its format version is {version}, but this fleetrun reads versions up to {newest}. Use a newer "
            "fleetrun"
        )
    rest = {key: each for key, each in body.items() if key not in ("format", "version")}
    if checksum != _checksum(body if whole else rest):
        raise ManifestError("its checksum is wrong: it was modified or damaged")
    try:
        return made(rest)
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"it is not a complete manifest of {kind}: {error!r}") from error


def _checksum(body: Fields) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
