"""Parts of every manifest: file records with sizes and checksums, safe names, checksums of JSON."""

from __future__ import annotations

import json
import re

import xxhash

from fleetrun.aliases import Fields
from fleetrun.frozen import frozen
from trainers.storage.folder import Buffer

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


@frozen
class FileRecord:
    """A file of a save: its name inside the save's folder, bytes, and xxh3-64 checksum in hex."""

    name: str
    size: int
    xxh3_64: str

    @classmethod
    def of(cls, name: str, content: list[Buffer]) -> FileRecord:
        digest = xxhash.xxh3_64()
        for piece in content:
            digest.update(piece)
        return cls(name, sum(len(piece) for piece in content), digest.hexdigest())


def is_name(name: object) -> bool:
    """Whether it can name a file inside the folder, and nothing outside of it."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def checksum_of(body: Fields) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
