"""Checkpoints in a folder of this machine's file systems. Knows POSIX: a rename is all or nothing.

DIR/step-00000120/               complete: it got its name by one rename, after all in it was fsynced
DIR/step-00000140.5c3e9a01.tmp/  being written, or left by a save that was interrupted
"""

from __future__ import annotations

import io
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import BinaryIO, cast

from trainers.checkpoints.manifest import MANIFEST
from trainers.ps.saved.descriptors import sync_folder, write_file

_NAME = re.compile(r"step-\d{8,}")
_ASIDE = re.compile(r"step-\d{8,}\.[0-9a-f]{8}\.tmp")


class LocalShelf:
    """Implements `shelf.Shelf`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> str:
        return str(self._folder)

    def path(self, name: str, file: str = "") -> str:
        return str(self._folder / name / file)

    def complete(self) -> list[str]:
        found = filter(_NAME.fullmatch, self._names())
        return sorted(found, key=lambda name: int(name.removeprefix("step-")), reverse=True)

    def interrupted(self) -> list[str]:
        return sorted(filter(_ASIDE.fullmatch, self._names()))

    def begin(self, step: int) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in self.interrupted():
            shutil.rmtree(self._folder / name, ignore_errors=True)
        name = _aside(f"step-{step:08d}")
        (self._folder / name).mkdir()
        return name

    def publish(self, name: str, content: bytes) -> str:
        aside, final = self._folder / name, self._folder / name.partition(".")[0]
        write_file(aside / MANIFEST, [content])  # durable, and so are all names beside it
        if final.exists():
            self.discard(final.name)  # it was found damaged, or nobody would save this step again
        aside.rename(final)
        sync_folder(self._folder)  # else the name might not outlive a power failure
        return final.name

    def discard(self, name: str) -> None:
        """Take its name from it, then its files: half of it is never a checkpoint."""
        path = self._folder / name
        if _ASIDE.fullmatch(name) is None:
            path = path.rename(self._folder / _aside(name))
        shutil.rmtree(path, ignore_errors=True)

    def open(self, name: str, file: str, mode: str) -> BinaryIO:
        path = self._folder / name / file
        if mode == "wb":
            return cast(BinaryIO, _Durable(io.FileIO(path, mode)))
        return cast(BinaryIO, path.open("rb"))

    def rename(self, name: str, file: str, to: str) -> None:
        (self._folder / name / file).rename(self._folder / name / to)

    def size(self, name: str, file: str) -> int | None:
        try:
            return (self._folder / name / file).stat().st_size
        except OSError:
            return None

    def free(self) -> int | None:
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
