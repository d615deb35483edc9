"""The order in which a block of code makes files durable, renames and removes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

Event = tuple[str, str]
"""What was done, and the path, relative to the folder that is watched: its new one, if it was renamed."""


@contextmanager
def watched(folder: Path) -> Iterator[list[Event]]:
    """Collect what happens to files below the folder. A symbolic link or a hard link is not seen."""
    events: list[Event] = []

    def note(what: str, path: str) -> None:
        if Path(path).is_relative_to(folder):
            events.append((what, str(Path(path).relative_to(folder))))

    def fsync(descriptor: int, original: Callable[[int], None] = os.fsync) -> None:
        note("fsync", place_of(descriptor))
        original(descriptor)

    def renaming(original: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            original(source, target, **options)
            note("rename", os.fspath(target))

        return rename

    def unlinking(original: Callable[..., None]) -> Callable[..., None]:
        def unlink(path: Any, *, dir_fd: int | None = None) -> None:
            inside = "" if dir_fd is None else place_of(dir_fd)
            original(path, dir_fd=dir_fd)
            note("remove", str(Path(inside, path)))

        return unlink

    with (
        patch("os.fsync", fsync),
        patch("os.rename", renaming(os.rename)),
        patch("os.replace", renaming(os.replace)),
        patch("os.unlink", unlinking(os.unlink)),
    ):
        yield events


def place_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def written(folder: str, name: str) -> list[Event]:
    """A file that was written atomically and durably."""
    inside = f"{folder}/" if folder != "." else ""
    return [("fsync", f"{inside}.{name}.part"), ("rename", f"{inside}{name}"), ("fsync", folder)]
