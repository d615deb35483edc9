"""Directories of saves, on this node or anywhere that fsspec reaches.

On this node, `write` is atomic, and the file is durable when it returns. Remote directories have no reliable
rename. They rely on the rule that the manifest is written last.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainers.errors import UsageError

Buffer = bytes | bytearray | memoryview

_READ_BYTES = 16 << 20


Where = str | os.PathLike[str]
"""A directory: a path, or a URL that fsspec supports."""


def open_folder(where: Where) -> Folder:
    """Open a path of this node, or a URL of fsspec (`s3://bucket/path`, `memory://path`)."""
    text = os.fspath(where)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" in text:
        return RemoteFolder(text)
    if not text:
        raise UsageError("The directory of a save is an empty string. Pass a path or a URL.")
    return LocalFolder(Path(text))


def absolute_path(where: Where) -> str:
    """Return the same directory for processes with other working directories. URLs stay unchanged."""
    name = os.fspath(where)
    return name if "://" in name else str(Path(name).absolute())


class LocalFolder:
    """A directory on this node. Names are `file` or `folder/file`. Every method raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def where(self) -> str:
        return str(self._path)

    def path(self, name: str) -> str:
        """Return the full path, for messages."""
        return str(self._path / name)

    def make(self, name: str) -> None:
        (self._path / name).mkdir(parents=True, exist_ok=True)

    def write(self, name: str, content: Sequence[Buffer]) -> None:
        write_file(self._path / name, content)

    def size(self, name: str) -> int:
        return (self._path / name).stat(follow_symlinks=False).st_size

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        """Return (size,) uint8. The result is the beginning of `into` if the file fits there, else new
        memory.
        """
        descriptor = os.open(self._path / name, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            return _read_into(_buffer(os.fstat(descriptor).st_size, into), file)

    def names(self, name: str = "") -> list[str]:
        """Return the names in the directory, ascending. A directory that does not exist has no names."""
        folder = self._path / name
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def remove(self, name: str) -> None:
        """Remove a file, or a directory with its content. Do nothing if it does not exist."""
        path = self._path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free(self) -> int | None:
        """Return the number of free bytes, or None if unknown."""
        place = self._path
        while not place.exists() and place != place.parent:
            place = place.parent
        return shutil.disk_usage(place).free


class RemoteFolder:
    """A directory that fsspec reaches. The URL's options come from fsspec's own configuration and the
    environment variables.
    """

    def __init__(self, url: str) -> None:
        import fsspec  # slow to import, and local directories do not need it

        try:
            self.files, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:  # an unknown file system
            raise UsageError(f"{url!r} cannot be opened: {error}") from error
        self.where = url.rstrip("/")

    def path(self, name: str) -> str:
        return f"{self.where}/{name}"

    def make(self, name: str) -> None:
        self.files.makedirs(self.inside(name), exist_ok=True)

    def write(self, name: str, content: Sequence[Buffer]) -> None:
        with self.files.open(self.inside(name), "wb") as file:
            for piece in content:
                file.write(piece)

    def size(self, name: str) -> int:
        self.files.invalidate_cache()  # another node may have written since
        return int(self.files.info(self.inside(name))["size"])

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        content = _buffer(self.size(name), into)
        with self.files.open(self.inside(name), "rb") as file:
            return _read_into(content, file)

    def names(self, name: str = "") -> list[str]:
        self.files.invalidate_cache()
        try:
            found = self.files.ls(self.inside(name), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, name: str) -> None:
        if self.files.exists(self.inside(name)):
            self.files.rm(self.inside(name), recursive=True)

    def free(self) -> int | None:
        return None

    def inside(self, name: str) -> str:
        """Return the path of a name in the file system."""
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")


Folder = LocalFolder | RemoteFolder


def _buffer(size: int, into: Tensor | None) -> Tensor:
    return torch.empty(size, dtype=torch.uint8) if into is None or len(into) < size else into[:size]


def _read_into(content: Tensor, file: Any) -> Tensor:
    """Fill `content` from the file. Raises OSError if the file is shorter."""
    view = content.numpy().data
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + _READ_BYTES])
        if not count:
            raise OSError(f"the file ends after {done} of {len(view)} bytes")
        done += count
    return content


# ---- Files of this node.

_MOST_BUFFERS = 1024  # IOV_MAX of Linux
_LARGE = 1 << 20  # bytes of a file that goes past the page cache


def write_all(descriptor: int, content: Sequence[Buffer]) -> int:
    """Write everything at the descriptor's position, up to 1024 pieces in one call. Return the number of
    bytes. Raises OSError. Any part may have been written then.
    """
    pieces = _views(content)
    total = 0
    first = 0
    while first < len(pieces):
        written = os.writev(descriptor, pieces[first : first + _MOST_BUFFERS])
        total += written
        while first < len(pieces) and written >= len(pieces[first]):
            written -= len(pieces[first])
            first += 1
        if written:
            pieces[first] = pieces[first][written:]
    return total


def _views(content: Sequence[Buffer]) -> list[memoryview]:
    return [memoryview(piece).cast("B") for piece in content if len(piece)]


def sync_folder(path: Path) -> None:
    """Make the names in a directory durable. Otherwise, a renamed file may have its old name, or none, after
    a power failure.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: Sequence[Buffer]) -> None:
    """Write a file atomically and durably: a temporary file, fsync, rename, fsync of the directory.

    An existing symbolic link is not followed. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o666)
    try:
        try:
            if sum(map(len, views := _views(content))) < _LARGE:
                write_all(descriptor, views)
            else:
                write_direct(descriptor, views)
            # Before the rename. Otherwise a power failure could leave the name without the content.
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


# ---- Direct writes past the page cache. The page cache would need new memory for every byte. That costs many
# times the processor time of a copy into a reused block, and takes the time from training.

_ALIGNMENT = 4096  # for addresses, offsets and lengths, enough for every disk
_BLOCK = 8 << 20


class _ThreadBlock(threading.local):
    """A block for each thread, aligned to a page as all memory from mmap."""

    def __init__(self) -> None:
        self.block: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, _BLOCK), np.uint8)


_thread_block = _ThreadBlock()


def write_direct(descriptor: int, content: Sequence[memoryview]) -> None:
    """Write everything to a new file. If the file system requires the page cache, use it. Raises OSError. Any
    part may have been written then.
    """
    _set_direct(descriptor, True)
    block, used = _thread_block.block, 0
    for piece in content:
        left = np.frombuffer(piece, np.uint8)
        while len(left):
            count = min(len(left), _BLOCK - used)
            np.copyto(block[used : used + count], left[:count])  # without the GIL, unlike memoryviews
            left, used = left[count:], used + count
            if used == _BLOCK:
                _write(descriptor, block.data)
                used = 0
    whole = used // _ALIGNMENT * _ALIGNMENT
    _write(descriptor, block[:whole].data)
    _set_direct(descriptor, False)
    _write(descriptor, block[whole:used].data)


def _write(descriptor: int, block: memoryview) -> None:
    done = 0
    while done < len(block):
        try:
            done += os.write(descriptor, block[done:])
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(descriptor, False):
                raise


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Return True if the flag changed. Some file systems refuse O_DIRECT here, others at the first write."""
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    after = before | os.O_DIRECT if wanted else before & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, after)
    except OSError:
        return False
    return after != before
