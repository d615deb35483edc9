"""Find, publish and remove the checkpoints of a directory, and detect damaged checkpoints.

On a file system of this node, a checkpoint becomes visible by a rename, which is all or nothing:

    DIR/step-00000120/               complete: renamed after all files in it were fsynced
    DIR/step-00000140.5c3e9a01.tmp/  being written, or left by a save that was interrupted

On s3://, gs://, hdfs:// and other URLs of fsspec, no reliable rename exists, and a file may be visible before
it is complete:

    URL/step-00000120.5c3e9a01/      complete as soon as it has a whole manifest, which is written last
    URL/step-00000140.97d0e3f2/      without a manifest: being written, or left by a save that was interrupted

Both have the same files. You may copy a checkpoint from a directory to a URL and back, so a URL may have
names without the id.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

import xxhash

from trainers.checkpoints import manifest
from trainers.checkpoints.manifest import MANIFEST, CheckpointError, Manifest, is_ended, step_of
from trainers.errors import NotSupportedError, UsageError
from trainers.storage.folder import LocalFolder, RemoteFolder, Where, sync_folder


class _Directory:
    """Checkpoints by their names, and files in them by their names. Every method raises OSError."""

    suffix = ""
    """The end of the name of a checkpoint that is being written."""

    def __init__(self, folder: LocalFolder | RemoteFolder) -> None:
        self._folder = folder
        self.where, self.free = folder.where, folder.free

    def path(self, name: str, file: str = "") -> str:
        """Return the whole path or URL."""
        return self._folder.path(f"{name}/{file}".rstrip("/"))

    def complete(self) -> list[str]:
        """Return the names of the checkpoints, the newest first. Their content has not been checked."""
        return sorted(self._names(True), key=lambda name: (step_of(name), name), reverse=True)

    def interrupted(self) -> list[str]:
        """Return the names of unfinished saves, including a save in progress."""
        return sorted(self._names(False))

    def begin(self, step: int) -> str:
        """Remove all `interrupted` saves, and return a new name to write under. The name is not a checkpoint
        yet. It is unique, because an earlier process of this job may still write on a node that was
        considered dead.
        """
        for name in self.interrupted():
            with suppress(OSError):
                self.discard(name)
        name = self._unique(f"step-{step:08d}")
        self._folder.make(name)
        return name

    def publish(self, name: str, content: bytes) -> str:
        """Turn the files under `name` into a checkpoint atomically, in place of a checkpoint of the same
        step. Return its final name. `content` is its manifest.
        """
        damaged = [other for other in self.complete() if step_of(other) == step_of(name)]
        self._folder.write(f"{name}/{MANIFEST}", [content])  # durable, as are all other names beside it
        for other in damaged:  # otherwise this step would not be saved again
            self.discard(other)
        return name

    def discard(self, name: str) -> None:
        """Remove a checkpoint. First remove the file that makes it a checkpoint, then the other files. If the
        removal is interrupted, the rest is not a checkpoint.
        """
        raise NotImplementedError

    def _names(self, complete: bool) -> list[str]:
        raise NotImplementedError

    def _unique(self, name: str) -> str:
        return f"{name}.{uuid.uuid4().hex[:8]}{self.suffix}"


_NAME = re.compile(r"step-\d{8,}")
_ASIDE = re.compile(r"step-\d{8,}\.[0-9a-f]{8}\.tmp")
_NAME_ELSEWHERE = re.compile(r"step-(\d{8,})(\.[0-9a-f]{8})?")


class LocalDirectory(_Directory):
    suffix = ".tmp"

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalFolder(folder))

    def publish(self, name: str, content: bytes) -> str:
        final = name.partition(".")[0]
        super().publish(name, content)
        self._move(name, final)
        sync_folder(Path(self.where))  # otherwise the name might not survive a power failure
        return final

    def discard(self, name: str) -> None:
        if _ASIDE.fullmatch(name) is None:
            name = self._move(name, self._unique(name))
        shutil.rmtree(self.path(name), ignore_errors=True)

    def open(self, name: str, file: str, mode: str) -> BinaryIO:
        """Open a file. `mode` is "rb" or "wb". Written data is durable when the file is closed."""
        raw = io.FileIO(self.path(name, file), mode)
        return cast(BinaryIO, _Durable(raw) if mode == "wb" else io.BufferedReader(raw))

    def rename(self, name: str, file: str, to: str) -> None:
        self._move(f"{name}/{file}", f"{name}/{to}")

    def size(self, name: str, file: str) -> int | None:
        """Return the number of bytes, or None if the file does not exist."""
        try:
            return Path(self.path(name, file)).stat().st_size
        except OSError:
            return None

    def _move(self, name: str, to: str) -> str:
        Path(self.path(name)).rename(self.path(to))
        return to

    def _names(self, complete: bool) -> list[str]:
        kind = _NAME if complete else _ASIDE
        try:
            there = list(Path(self.where).iterdir())
        except FileNotFoundError:
            return []
        return [entry.name for entry in there if kind.fullmatch(entry.name) and entry.is_dir()]


class _Durable(io.BufferedWriter):
    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


class RemoteDirectory(_Directory):
    """Checkpoints at a URL. Its options come from fsspec's configuration and the environment variables."""

    def __init__(self, url: str) -> None:
        self._remote = RemoteFolder(url)
        super().__init__(self._remote)
        self._files = self._remote.files

    def discard(self, name: str) -> None:
        """Remove a checkpoint, the manifest first. Half a manifest is never a checkpoint."""
        if self.size(name, MANIFEST) is not None:
            self._files.rm_file(self._inside(name, MANIFEST))
        self._files.invalidate_cache()
        folder = self._inside(name)
        if files := self._files.find(folder):
            self._files.rm(files)
        self._files.invalidate_cache()
        if self._files.exists(folder):  # an object store has no directory without a file
            self._files.rm(folder, recursive=True)

    def open(self, name: str, file: str, mode: str) -> BinaryIO:
        return cast(BinaryIO, self._files.open(self._inside(name, file), mode))

    def rename(self, name: str, file: str, to: str) -> None:
        self._files.mv(self._inside(name, file), self._inside(name, to))

    def size(self, name: str, file: str) -> int | None:
        try:
            return self._folder.size(f"{name}/{file}")
        except FileNotFoundError:
            return None

    def _is_complete(self, name: str) -> bool:
        size = self.size(name, MANIFEST)
        try:
            return size not in (None, 0) and is_ended(
                self._files.cat_file(self._inside(name, MANIFEST), start=size - 1)
            )
        except FileNotFoundError:
            return False  # removed meanwhile

    def _names(self, complete: bool) -> list[str]:
        found = filter(_NAME_ELSEWHERE.fullmatch, self._folder.names())
        return [name for name in found if self._is_complete(name) is complete]

    def _inside(self, name: str, file: str = "") -> str:
        return self._remote.inside(f"{name}/{file}")


CheckpointDirectory = LocalDirectory | RemoteDirectory

# ---- Checkpoints on this node or at a URL

_PIECE = 1 << 22


def open_directory(directory: Where) -> CheckpointDirectory:
    """Open a path of this node, or a URL of fsspec (`s3://bucket/run`). Raises UsageError."""
    text = os.fspath(directory)
    for protocol in ("file://", "local://"):
        text = text.removeprefix(protocol)
    if not text:
        raise UsageError("The directory of the checkpoints is an empty string. Pass a path or a URL.")
    if "://" not in text:
        return LocalDirectory(Path(text))
    return RemoteDirectory(text)


def commit(checkpoints: CheckpointDirectory, name: str, about: Manifest) -> str:
    """Turn a written checkpoint into a complete one. Raises OSError, and CheckpointError if a file that
    another rank has written is missing here.
    """
    for path, size, found in _of_other_sizes(checkpoints, name, about):
        raise CheckpointError(
            f"{path} has {size} bytes on the node that wrote it, but {found} bytes on this node. Use a "
            "directory that all nodes of the job share."
        )
    return checkpoints.publish(name, manifest.manifest_to_bytes(about))


def prune(checkpoints: CheckpointDirectory, keep: int, damaged: Collection[str] = ()) -> None:
    """Remove checkpoints older than the newest `keep`. `damaged` holds paths that do not count."""
    whole = [name for name in checkpoints.complete() if checkpoints.path(name) not in damaged]
    for name in whole[keep:]:
        checkpoints.discard(name)


def read_manifest(checkpoints: CheckpointDirectory, name: str) -> Manifest:
    """Read a manifest. Raises CheckpointError unless the manifest is whole and the files have its sizes."""
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
    for path, size, found in _of_other_sizes(checkpoints, name, about):
        raise CheckpointError(f"{path} has {found} bytes, but the manifest lists {size}")
    return about


def _of_other_sizes(
    checkpoints: CheckpointDirectory, name: str, about: Manifest
) -> Iterator[tuple[str, int, int | None]]:
    for file, (size, _) in about.files.items():
        if (found := checkpoints.size(name, file)) != size:
            yield checkpoints.path(name, file), size, found


def damage(checkpoints: CheckpointDirectory, name: str, files: Mapping[str, tuple[int, str]]) -> str | None:
    """Return the damage in the content of these files of a checkpoint, or None if they are intact."""
    for file, (_, digest) in files.items():
        try:
            if _checksum(checkpoints, name, file) != digest:
                return f"{checkpoints.path(name, file)} is damaged: its checksum does not match"
        except OSError as error:
            return f"{checkpoints.path(name, file)} cannot be read: {error}"
    return None


def _checksum(checkpoints: CheckpointDirectory, name: str, file: str) -> str:
    digest = xxhash.xxh3_128()
    with checkpoints.open(name, file, "rb") as content:
        while piece := content.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
