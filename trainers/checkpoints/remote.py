"""Store checkpoints through fsspec, on s3://, gs://, hdfs:// and others.

These stores have no reliable rename, and a file may be visible before it is complete.

    URL/step-00000120.5c3e9a01/  complete once it has a whole manifest, which is written last
    URL/step-00000140.97d0e3f2/  without a manifest: being written, or left by an interrupted save

The files are the same as in a local directory. You may copy a checkpoint between the two, so a name without
the id is valid too.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from typing import BinaryIO, cast

from trainers.checkpoints.manifest import MANIFEST, is_ended, step_of
from trainers.storage.folder import RemoteFolder

_NAME = re.compile(r"step-(\d{8,})(\.[0-9a-f]{8})?")


class RemoteDirectory:
    """Does the work of `LocalDirectory` for a URL. Its options come from fsspec's configuration and the
    environment.
    """

    def __init__(self, url: str) -> None:
        self._folder = RemoteFolder(url)
        self._files = self._folder.files
        self.where = self._folder.where

    def path(self, name: str, file: str = "") -> str:
        return self._folder.path(f"{name}/{file}").rstrip("/")

    def complete(self) -> list[str]:
        found = filter(self._is_complete, self._names())
        return sorted(found, key=lambda name: (step_of(name), name), reverse=True)

    def interrupted(self) -> list[str]:
        return sorted(name for name in self._names() if not self._is_complete(name))

    def begin(self, step: int) -> str:
        for name in self.interrupted():
            with contextlib.suppress(OSError):
                self.discard(name)
        name = f"step-{step:08d}.{uuid.uuid4().hex[:8]}"
        self._folder.make(name)
        return name

    def publish(self, name: str, content: bytes) -> str:
        others = [other for other in self.complete() if step_of(other) == step_of(name)]
        with self.open(name, MANIFEST, "wb") as file:
            file.write(content)
        for other in others:
            self.discard(other)  # it was found damaged, because this step would otherwise not be saved again
        return name

    def discard(self, name: str) -> None:
        """Remove a checkpoint, manifest first, so that a half-removed one never counts as complete."""
        if self.size(name, MANIFEST) is not None:
            self._files.rm_file(self._inside(name, MANIFEST))
        self._files.invalidate_cache()
        folder = self._inside(name)
        if files := self._files.find(folder):
            self._files.rm(files)
        self._files.invalidate_cache()
        if self._files.exists(folder):  # for stores with directories; an object store has none without a file
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

    def free(self) -> int | None:
        return None

    def _is_complete(self, name: str) -> bool:
        size = self.size(name, MANIFEST)
        try:
            return size not in (None, 0) and is_ended(
                self._files.cat_file(self._inside(name, MANIFEST), start=size - 1)
            )
        except FileNotFoundError:
            return False  # removed meanwhile

    def _names(self) -> list[str]:
        return [name for name in self._folder.names() if _NAME.fullmatch(name)]

    def _inside(self, name: str, file: str = "") -> str:
        return self._folder.inside(f"{name}/{file}")
