"""A directory of checkpoints, wherever it is: which there are, which are damaged, which go. Leaves names and
files to `local` and `remote`, tensors to `tensors`, and who does what to `checkpoint`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

import xxhash

from trainers.checkpoints import manifest
from trainers.checkpoints.local import LocalShelf
from trainers.checkpoints.manifest import MANIFEST, CheckpointError, Manifest
from trainers.errors import NotSupportedError, UsageError

_PIECE = 1 << 22


class Shelf(Protocol):
    """Checkpoints by their names, and files in them by theirs. Every method raises OSError."""

    @property
    def where(self) -> str: ...

    def path(self, name: str, file: str = "") -> str:
        """The whole path or URL."""
        ...

    def complete(self) -> list[str]:
        """The newest first; what is in them nobody has looked at yet."""
        ...

    def interrupted(self) -> list[str]:
        """What saves have left that did not come to their end; also one that is under way."""
        ...

    def begin(self, step: int) -> str:
        """A new name to write under, which is no checkpoint yet and nobody else's: a process of a former life
        of this job that still writes, on a machine that was thought dead, does so elsewhere. Clears away what
        is `interrupted`.
        """
        ...

    def publish(self, name: str, content: bytes) -> str:
        """Make what was begun under `name` a checkpoint, all at once, in place of one of the same step; its
        name from then on. `content`: its manifest.
        """
        ...

    def discard(self, name: str) -> None:
        """Remove one; if that is interrupted, what is left of it is no checkpoint."""
        ...

    def open(self, name: str, file: str, mode: str) -> BinaryIO:
        """`mode` is "rb" or "wb". What was written is durable when it is closed."""
        ...

    def rename(self, name: str, file: str, to: str) -> None: ...

    def size(self, name: str, file: str) -> int | None:
        """None when it is not there."""
        ...

    def free(self) -> int | None:
        """Bytes of free space, None where nobody can tell."""
        ...


def open_shelf(directory: str | os.PathLike[str]) -> Shelf:
    """A path of this machine, or a URL of fsspec (`s3://bucket/run`). Raises UsageError."""
    text = os.fspath(directory)
    for protocol in ("file://", "local://"):
        text = text.removeprefix(protocol)
    if not text:
        raise UsageError("the directory of the checkpoints is empty; give a path or a URL")
    if "://" not in text:
        return LocalShelf(Path(text))
    from trainers.checkpoints.remote import RemoteShelf  # late: fsspec is for those who use it

    return RemoteShelf(text)


def step_of(name: str) -> int:
    return int(name.removeprefix("step-").partition(".")[0])


def commit(shelf: Shelf, name: str, about: Manifest) -> str:
    """Make a written checkpoint one. Raises CheckpointError when a file is not here that another rank has
    written, OSError.
    """
    for file, (size, _) in about.files.items():
        found = shelf.size(name, file)
        if found != size:
            raise CheckpointError(
                f"{shelf.path(name, file)} has {size} bytes where it was written and {found} here; the "
                "directory of checkpoints must be one that all machines of the job share"
            )
    return shelf.publish(name, manifest.to_bytes(about))


def prune(shelf: Shelf, keep: int, damaged: Collection[str] = ()) -> None:
    """Remove what is older than the newest `keep` checkpoints. `damaged`, paths, do not count."""
    whole = [name for name in shelf.complete() if shelf.path(name) not in damaged]
    for name in whole[keep:]:
        shelf.discard(name)


def read_manifest(shelf: Shelf, name: str) -> Manifest:
    """Raises CheckpointError for anything but a whole manifest and files of its sizes."""
    path = shelf.path(name, MANIFEST)
    try:
        with shelf.open(name, MANIFEST, "rb") as stream:
            content = stream.read()
    except OSError as error:
        raise CheckpointError(f"{path} is missing or cannot be read: {error!r}") from error
    try:
        about = manifest.from_bytes(content)
    except (CheckpointError, NotSupportedError) as error:
        raise type(error)(f"{path} {error}") from error
    for file, (size, _) in about.files.items():
        found = shelf.size(name, file)
        if found != size:
            raise CheckpointError(f"{shelf.path(name, file)} has {found} bytes; the manifest says {size}")
    return about


def damage(shelf: Shelf, name: str, files: Mapping[str, tuple[int, str]]) -> str | None:
    """What is wrong with the content of these files of a checkpoint, if anything."""
    for file, (_, digest) in files.items():
        try:
            if _checksum(shelf, name, file) != digest:
                return f"{shelf.path(name, file)} is damaged: its checksum does not fit"
        except OSError as error:
            return f"{shelf.path(name, file)} cannot be read: {error}"
    return None


def _checksum(shelf: Shelf, name: str, file: str) -> str:
    digest = xxhash.xxh3_128()
    with shelf.open(name, file, "rb") as content:
        while piece := content.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
