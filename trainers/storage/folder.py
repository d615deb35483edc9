"""Folders: where saves live, on this machine or anywhere that fsspec reaches. Knows files; leaves what is in
them to others.

On this machine a file is durable and whole when `write` returns. Elsewhere there is no rename to rely on;
there only the rule counts that the manifest is written last.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import fsspec
import torch

from trainers.errors import UsageError
from trainers.storage.files import Buffer, write_file

_BLOCK = 16 << 20


class Folder(Protocol):
    """Names are `file` or `folder/file`. Every verb raises OSError."""

    @property
    def where(self) -> str: ...

    def path(self, name: str) -> str:
        """The whole path, for a person."""
        ...

    def make(self, name: str) -> None: ...

    def write(self, name: str, content: Sequence[Buffer]) -> None: ...

    def size(self, name: str) -> int: ...

    def read(self, name: str, into: torch.Tensor | None = None) -> torch.Tensor:
        """(size,) uint8: the beginning of `into` when the file fits there, memory of its own otherwise."""
        ...

    def names(self, name: str = "") -> list[str]:
        """What is in the folder, ascending; nothing where there is no folder."""
        ...

    def remove(self, name: str) -> None:
        """A file or a folder with everything in it; fine when it is not there."""
        ...

    def free(self) -> int | None:
        """Bytes of free space, None where nobody can tell."""
        ...


def open_folder(where: str | os.PathLike[str]) -> Folder:
    """A path of this machine, or a URL of fsspec (`s3://bucket/path`, `memory://path`)."""
    text = os.fspath(where)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" in text:
        return RemoteFolder(text)
    if not text:
        raise UsageError("the folder of a save is an empty text; give a path or a URL")
    return LocalFolder(Path(text))


class LocalFolder:
    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def where(self) -> str:
        return str(self._path)

    def path(self, name: str) -> str:
        return str(self._path / name)

    def make(self, name: str) -> None:
        (self._path / name).mkdir(parents=True, exist_ok=True)

    def write(self, name: str, content: Sequence[Buffer]) -> None:
        write_file(self._path / name, content)

    def size(self, name: str) -> int:
        return (self._path / name).stat(follow_symlinks=False).st_size

    def read(self, name: str, into: torch.Tensor | None = None) -> torch.Tensor:
        descriptor = os.open(self._path / name, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            return _filled(_room(os.fstat(descriptor).st_size, into), file)

    def names(self, name: str = "") -> list[str]:
        folder = self._path / name
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def remove(self, name: str) -> None:
        path = self._path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free(self) -> int | None:
        place = self._path
        while not place.exists() and place != place.parent:
            place = place.parent
        return shutil.disk_usage(place).free


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path there. Raises UsageError for one that it does not know."""
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UsageError(f"{url!r} cannot be opened: {error}") from error
    return files, root


class RemoteFolder:
    """Through fsspec; the URL's options come from fsspec's own configuration and the environment."""

    def __init__(self, url: str) -> None:
        self._files, self._root = file_system(url)
        self._url = url.rstrip("/")

    @property
    def where(self) -> str:
        return self._url

    def path(self, name: str) -> str:
        return f"{self._url}/{name}"

    def make(self, name: str) -> None:
        self._files.makedirs(self._inside(name), exist_ok=True)

    def write(self, name: str, content: Sequence[Buffer]) -> None:
        with self._files.open(self._inside(name), "wb") as file:
            for piece in content:
                file.write(piece)

    def size(self, name: str) -> int:
        self._files.invalidate_cache()  # another machine may have written since
        return int(self._files.info(self._inside(name))["size"])

    def read(self, name: str, into: torch.Tensor | None = None) -> torch.Tensor:
        content = _room(self.size(name), into)
        with self._files.open(self._inside(name), "rb") as file:
            return _filled(content, file)

    def names(self, name: str = "") -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._inside(name), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, name: str) -> None:
        if self._files.exists(self._inside(name)):
            self._files.rm(self._inside(name), recursive=True)

    def free(self) -> int | None:
        return None

    def _inside(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")


def _room(size: int, into: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8) if into is None or len(into) < size else into[:size]


def _filled(content: torch.Tensor, file: Any) -> torch.Tensor:
    """`content` read from the file. Raises OSError when the file is shorter."""
    view = content.numpy().data
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + _BLOCK])
        if not count:
            raise OSError(f"the file ends after {done} of {len(view)} bytes")
        done += count
    return content
