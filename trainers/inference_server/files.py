"""Write files that workers map, so that all workers share one copy in memory.

In tmpfs (/dev/shm), the files are memory. On a disk, they use its page cache and may be larger than memory.
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
from trainers.storage.safetensors import unpack

_PREFIX = "fleetrun-serve-"
_SHARED_MEMORY = Path("/dev/shm")


@frozen
class CacheFile:
    """A file of the cache, as sent to workers."""

    path: str
    size: int

    def mapped(self, *, private: bool = False) -> NDArray[Any]:
        """Map the file as (size,) uint8, writable. With `private`, writes do not reach the file.
        Raises OSError.
        """
        if not self.size:
            return np.empty(0, np.uint8)
        return np.memmap(self.path, np.uint8, "c" if private else "r+", shape=(self.size,))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a safetensors file. Writes to them do not reach the file."""
        return unpack(torch.from_numpy(self.mapped(private=True)))


def map_file(path: str) -> NDArray[Any]:
    """Map a whole file of the cache, as `mapped` does."""
    return CacheFile(path, Path(path).stat().st_size).mapped()


class Cache:
    """The directory of one server, below `where`. With "", it is in shared memory if available.

    Directories of killed servers are removed.
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
        """Create a file of zeros. Raises LoadError if it cannot reserve the space."""
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
        """Reserve space for the bytes before `stop`. Without it, writing to the mapped file would kill the
        process.

        Raises LoadError if there is not enough space.
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
        """Create a file with this content. Raises LoadError."""
        size = sum(len(memoryview(piece).cast("B")) for piece in content)
        file = self.make(name, size)
        with Path(file.path).open("r+b") as made:
            for piece in content:
                made.write(piece)
        return file

    def remove(self, file: CacheFile) -> None:
        """Remove a file. Workers that have mapped it keep it."""
        Path(file.path).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def no_room(error: OSError, path: Path, size: int) -> LoadError:
    """Return an error that explains the lack of space for `size` bytes."""
    if error.errno != errno.ENOSPC:
        return LoadError(f"{path} cannot be written: {error}")
    free = shutil.disk_usage(path).free
    return LoadError(
        f"{path.parent} has no room for {size / 1e6:,.1f} MB of weights and tables: {free / 1e6:,.1f} MB "
        "are free. Pass --cache with a directory on a disk, where tables may be larger than memory."
    )


def _locked(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_if_left(folder: Path) -> None:
    """Remove the directory of an ended server, whose lock the system has released.

    A directory without a lock file is about to get one, and is kept.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / "lock", os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
