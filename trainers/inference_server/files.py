"""Files that the server writes and its workers map, so that all of them have one copy in memory. In tmpfs
(/dev/shm) they are memory; on a disk they are its page cache, and may be larger than memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleetrun.frozen import frozen
from trainers.storage.errors import LoadError
from trainers.storage.folder import Buffer
from trainers.storage.safetensors import EVERY_TYPE, unpack

_PREFIX = "fleetrun-serve-"
_SHARED_MEMORY = Path("/dev/shm")


@frozen
class CacheFile:
    """A file of the cache, as it is told to workers."""

    path: str
    size: int

    def mapped(self, *, private: bool = False) -> NDArray[Any]:
        """(size,) uint8, writable. `private`: what is written here does not reach the file. Raises
        OSError.
        """
        if not self.size:
            return np.empty(0, np.uint8)
        return np.memmap(self.path, np.uint8, "c" if private else "r+", shape=(self.size,))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a safetensors file. What is written to them does not reach the file."""
        return unpack(torch.from_numpy(self.mapped(private=True)), EVERY_TYPE)


def map_file(path: str) -> NDArray[Any]:
    """All of a file of the cache, as `mapped`."""
    return CacheFile(path, Path(path).stat().st_size).mapped()


class Cache:
    """A folder of one server, below `where`; "": in shared memory where there is such a thing. What servers
    left there that were killed is removed.
    """

    def __init__(self, where: str) -> None:
        parent = Path(where) if where else _SHARED_MEMORY
        if not where and not os.access(parent, os.W_OK):
            parent = Path(tempfile.gettempdir())
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{_PREFIX}*"):
            _remove_if_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = _locked(self.path)

    def make(self, name: str, size: int, *, reserve: bool = True) -> CacheFile:
        """A new file of zeros. Raises LoadError when there is no space to reserve."""
        file = CacheFile(str(self.path / name), size)
        try:
            descriptor = os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise no_room(error, self.path, size) from error
        try:
            os.truncate(descriptor, size)
            if reserve:
                self.reserve(file, size)
        except OSError as error:
            self.remove(file)
            raise no_room(error, self.path, size) from error
        except LoadError:
            self.remove(file)
            raise
        finally:
            os.close(descriptor)
        return file

    def reserve(self, file: CacheFile, stop: int) -> None:
        """The bytes before `stop` have space: without it, writing to the mapped file would kill the process.
        Raises LoadError when there is not so much.
        """
        descriptor = os.open(file.path, os.O_RDWR)
        try:
            if stop:
                os.posix_fallocate(descriptor, 0, stop)
        except OSError as error:
            raise no_room(error, self.path, stop) from error
        finally:
            os.close(descriptor)

    def write(self, name: str, content: Sequence[Buffer]) -> CacheFile:
        """A new file with this content. Raises LoadError."""
        size = sum(len(memoryview(piece).cast("B")) for piece in content)
        file = self.make(name, size)
        with Path(file.path).open("r+b") as made:
            for piece in content:
                made.write(piece)
        return file

    def remove(self, file: CacheFile) -> None:
        """Workers that have mapped it keep it."""
        Path(file.path).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def no_room(error: OSError, path: Path, size: int) -> LoadError:
    """Why so many bytes cannot be had there."""
    if error.errno != errno.ENOSPC:
        return LoadError(f"{path} cannot be written: {error}")
    free = shutil.disk_usage(path).free
    return LoadError(
        f"{path.parent} has no room for {size / 1e6:,.1f} MB of weights and tables: {free / 1e6:,.1f} MB are "
        "free there. Pass --cache with a folder on a disk: tables may be larger than memory there"
    )


def _locked(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_if_left(folder: Path) -> None:
    """The system releases the lock of a process that has ended; a folder without one is about to get it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / "lock", os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
