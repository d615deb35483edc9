"""A directory of checkpoints: which there are, which are damaged, which go. Here on this machine's file
systems, where a rename is all or nothing; `remote` has those that fsspec reaches.

DIR/step-00000120/               complete: it got its name by one rename, after all in it was fsynced
DIR/step-00000140.5c3e9a01.tmp/  being written, or left by a save that was interrupted
"""

from __future__ import annotations

import io
import os
import re
import shutil
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import xxhash

from trainers.checkpoints import manifest
from trainers.checkpoints.manifest import MANIFEST, CheckpointError, Manifest, step_of
from trainers.checkpoints.remote import RemoteDirectory
from trainers.errors import NotSupportedError, UsageError
from trainers.storage.folder import Where, sync_folder, write_file

# ---- Checkpoints on a local file system

_NAME = re.compile(r"step-\d{8,}")
_ASIDE = re.compile(r"step-\d{8,}\.[0-9a-f]{8}\.tmp")


class LocalDirectory:
    """Checkpoints by their names, and files in them by theirs. Every method raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> str:
        return str(self._folder)

    def path(self, name: str, file: str = "") -> str:
        """Return the whole path or URL."""
        return str(self._folder / name / file)

    def complete(self) -> list[str]:
        """Return the names of the checkpoints, the newest first. Their content has not been checked."""
        return sorted(filter(_NAME.fullmatch, self._names()), key=step_of, reverse=True)

    def interrupted(self) -> list[str]:
        """Return the names of saves that have not come to their end, also of one that is under way."""
        return sorted(filter(_ASIDE.fullmatch, self._names()))

    def begin(self, step: int) -> str:
        """Return a new name to write under, which is not a checkpoint yet, and unique: an earlier process of
        this job that still writes, on a machine that was thought dead, writes elsewhere. Removes what is
        `interrupted`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in self.interrupted():
            shutil.rmtree(self._folder / name, ignore_errors=True)
        name = _aside(f"step-{step:08d}")
        (self._folder / name).mkdir()
        return name

    def publish(self, name: str, content: bytes) -> str:
        """Make what was begun under `name` a checkpoint, all at once, in place of one of the same step.
        Return its name from then on. `content`: its manifest.
        """
        aside, final = self._folder / name, self._folder / name.partition(".")[0]
        write_file(aside / MANIFEST, [content])  # durable, and so are all other names in its folder
        if final.exists():
            self.discard(final.name)  # it was found damaged, else this step would not be saved again
        aside.rename(final)
        sync_folder(self._folder)  # else the name might not outlive a power failure
        return final.name

    def discard(self, name: str) -> None:
        """Remove a checkpoint: first its name, then its files. If that is interrupted, the rest is not
        a checkpoint.
        """
        path = self._folder / name
        if _ASIDE.fullmatch(name) is None:
            path = path.rename(self._folder / _aside(name))
        shutil.rmtree(path, ignore_errors=True)

    def open(self, name: str, file: str, mode: str) -> BinaryIO:
        """`mode` is "rb" or "wb". What was written is durable when the file is closed."""
        path = self._folder / name / file
        if mode == "wb":
            return cast(BinaryIO, _Durable(io.FileIO(path, mode)))
        return cast(BinaryIO, path.open("rb"))

    def rename(self, name: str, file: str, to: str) -> None:
        (self._folder / name / file).rename(self._folder / name / to)

    def size(self, name: str, file: str) -> int | None:
        """Return the number of bytes, None if the file does not exist."""
        try:
            return (self._folder / name / file).stat().st_size
        except OSError:
            return None

    def free(self) -> int | None:
        """Return the number of free bytes, None if unknown."""
        return shutil.disk_usage(self._folder).free

    def _names(self) -> list[str]:
        try:
            return [entry.name for entry in self._folder.iterdir() if entry.is_dir()]
        except FileNotFoundError:
            return []


class _Durable(io.BufferedWriter):
    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


def _aside(name: str) -> str:
    return f"{name}.{uuid.uuid4().hex[:8]}.tmp"


# ---- Checkpoints wherever they are

_PIECE = 1 << 22


CheckpointDirectory = LocalDirectory | RemoteDirectory


def open_directory(directory: Where) -> CheckpointDirectory:
    """A path of this machine, or a URL of fsspec (`s3://bucket/run`). Raises UsageError."""
    text = os.fspath(directory)
    for protocol in ("file://", "local://"):
        text = text.removeprefix(protocol)
    if not text:
        raise UsageError("the directory of the checkpoints is empty; give a path or a URL")
    if "://" not in text:
        return LocalDirectory(Path(text))
    return RemoteDirectory(text)


def commit(checkpoints: CheckpointDirectory, name: str, about: Manifest) -> str:
    """Make a written checkpoint one. Raises CheckpointError when a file is not here that another rank has
    written, OSError.
    """
    for file, (size, _) in about.files.items():
        found = checkpoints.size(name, file)
        if found != size:
            raise CheckpointError(
                f"{checkpoints.path(name, file)} has {size} bytes where it was written and {found} here; the "
                "directory of checkpoints must be one that all machines of the job share"
            )
    return checkpoints.publish(name, manifest.manifest_to_bytes(about))


def prune(checkpoints: CheckpointDirectory, keep: int, damaged: Collection[str] = ()) -> None:
    """Remove what is older than the newest `keep` checkpoints. `damaged`, paths, do not count."""
    whole = [name for name in checkpoints.complete() if checkpoints.path(name) not in damaged]
    for name in whole[keep:]:
        checkpoints.discard(name)


def read_manifest(checkpoints: CheckpointDirectory, name: str) -> Manifest:
    """Raises CheckpointError for anything but a whole manifest and files of its sizes."""
    path = checkpoints.path(name, MANIFEST)
    try:
        with checkpoints.open(name, MANIFEST, "rb") as stream:
            content = stream.read()
    except OSError as error:
        raise CheckpointError(f"{path} is missing or cannot be read: {error!r}") from error
    try:
        about = manifest.manifest_from_bytes(content)
    except (CheckpointError, NotSupportedError) as error:
        raise type(error)(f"{path} {error}") from error
    for file, (size, _) in about.files.items():
        found = checkpoints.size(name, file)
        if found != size:
            raise CheckpointError(
                f"{checkpoints.path(name, file)} has {found} bytes; the manifest says {size}"
            )
    return about


def damage(checkpoints: CheckpointDirectory, name: str, files: Mapping[str, tuple[int, str]]) -> str | None:
    """What is wrong with the content of these files of a checkpoint, if anything."""
    for file, (_, digest) in files.items():
        try:
            if _checksum(checkpoints, name, file) != digest:
                return f"{checkpoints.path(name, file)} is damaged: its checksum does not fit"
        except OSError as error:
            return f"{checkpoints.path(name, file)} cannot be read: {error}"
    return None


def _checksum(checkpoints: CheckpointDirectory, name: str, file: str) -> str:
    digest = xxhash.xxh3_128()
    with checkpoints.open(name, file, "rb") as content:
        while piece := content.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
