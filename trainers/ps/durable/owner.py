"""Owner: a folder belongs to one server of one job, and to one process at a time. Knows the lock and the
identity; leaves the rest of the folder to others.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from trainers.ps.durable.errors import DurabilityError
from trainers.ps.saved.descriptors import write_file

VERSION = 2
_LOCK = "lock"
_OWNER = "owner.json"


@dataclass(frozen=True, slots=True)
class Owner:
    """`job`: a text that is equal for all incarnations of a job's servers and differs between jobs; the
    number of trainers, which may change, is not in it.
    `journal`: whether there is a journal beside the snapshots.
    """

    job: str
    server: int
    journal: bool


def lock(folder: Path) -> int:
    """Take the folder for this process; returns the descriptor that holds it, to be closed at the end. The
    kernel lets it go when the process ends, however it ends. Raises DurabilityError when another has it.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise DurabilityError(
            f"another process uses {folder}: two servers cannot share it. Stop that server, or give this "
            "job a durability_dir of its own."
        ) from error
    return descriptor


def claim(folder: Path, owner: Owner) -> None:
    """Write down whose folder it is, or check it. Raises DurabilityError for another's."""
    path = folder / _OWNER
    if not path.exists():
        content = json.dumps({"version": VERSION, **asdict(owner)}, indent=1).encode()
        write_file(path, [content])
        return
    found = _read(path)
    if found != owner:
        raise DurabilityError(
            f"{folder} belongs to {_words(found)}, and this is {_words(owner)}. Choose another "
            "durability_dir, or remove that folder if its state is no longer wanted."
        )


def _read(path: Path) -> Owner:
    try:
        body = json.loads(path.read_bytes())
        version = body.pop("version")
        if version == VERSION:
            return Owner(**body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DurabilityError(
            f"{path} is damaged: {error}. Choose another durability_dir or remove it."
        ) from error
    raise DurabilityError(
        f"{path.parent} was written by another fleetrun (format {version}, this one has {VERSION}). "
        "Go on with that version, or choose another durability_dir."
    )


def _words(owner: Owner) -> str:
    kept = "snapshots and a journal" if owner.journal else "snapshots only"
    return f"server {owner.server} of the job {owner.job!r} with {kept}"
