"""Stores for checkpoints that are no file systems, over a folder so that several processes share them.

objects://  keys and values: no folders, a value is there all at once when it has been written, a rename is a
            copy and a removal
torn://     what is being written is seen
gated://    in this process only: who writes waits until `GATE` is open
lossy://    in this process only: the last of `LOST` is what gets lost of a manifest: the "request" to write
            it, the "reply", with the reply all later requests ("reply and more"), or "reads"
"""

from __future__ import annotations

import io
import threading
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

GATE = threading.Event()


class Gated(MemoryFileSystem):
    protocol = "gated"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb" and not GATE.wait(100):
            raise OSError("nobody has opened the gate")
        return super()._open(path, mode, **options)


class LossError(Exception):
    """A storage library's own error, which is no OSError."""


class Lossy(MemoryFileSystem):
    protocol = "lossy"
    store: dict[str, Any] = {}  # noqa: RUF012  (as fsspec's own)
    pseudo_dirs = [""]  # noqa: RUF012

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if not path.endswith("manifest.json"):
            return super()._open(path, mode, **options)
        lost = LOST[-1] if LOST else ""
        if mode == "rb" and lost not in ("reads", "all"):
            return super()._open(path, mode, **options)
        if lost in ("request", "reads", "all"):
            raise LossError(f"{lost} lost")
        return _ReplyLost(self, path, lost) if lost else super()._open(path, mode, **options)


LOST: list[str] = []


class _ReplyLost(io.BytesIO):
    def __init__(self, files: Lossy, path: str, lost: str) -> None:
        super().__init__()
        self._files, self._path, self._lost = files, path, lost

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            LOST.append("")
            self._files.pipe_file(self._path, content)
            LOST.pop()
            if self._lost == "reply and more":
                LOST[-1] = "all"
            raise LossError("the reply was lost")


class Torn(LocalFileSystem):
    protocol = "torn"


class Objects(AbstractFileSystem):
    """The value of the key /a/b/saved/x/y is the file %2Fa%2Fb%2Fsaved%2Fx%2Fy in `OBJECTS`."""

    protocol = "objects"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return str(path).removeprefix("objects://").rstrip("/")

    @staticmethod
    def _file(key: str) -> Path:
        return _folder(key) / quote(key, safe="")

    def _keys(self, path: str) -> list[str]:
        folder = _folder(path)
        names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        return sorted(unquote(name) for name in names if not name.startswith("."))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        path = self._strip_protocol(path)
        keys = self._keys(path)
        if path in keys:
            found = {path: {"name": path, "size": self._file(path).stat().st_size, "type": "file"}}
        else:
            found = {}
            for key in keys:
                if key.startswith(f"{path}/"):
                    head, _, tail = key.removeprefix(f"{path}/").partition("/")
                    name = f"{path}/{head}"
                    size = 0 if tail else self._file(key).stat().st_size
                    found[name] = {"name": name, "size": size, "type": "directory" if tail else "file"}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            return self._file(path).open("rb")
        return _Value(self._file(path))

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        with self._open(self._strip_protocol(path2), "wb") as value:
            value.write(self._file(self._strip_protocol(path1)).read_bytes())

    def _rm(self, path: str) -> None:
        self._file(self._strip_protocol(path)).unlink()

    def rm_file(self, path: str) -> None:
        self._rm(path)


class _Value(io.BytesIO):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def close(self) -> None:
        if not self.closed:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            aside = self._file.with_name(f".{uuid.uuid4().hex}")
            aside.write_bytes(self.getvalue())
            aside.replace(self._file)
        super().close()


def _folder(key: str) -> Path:
    """Everything of one test: its own folder's name is what comes before /saved."""
    return Path(key.partition("/saved")[0]) / "objects"


def register() -> None:
    fsspec.register_implementation("gated", Gated, clobber=True)
    fsspec.register_implementation("lossy", Lossy, clobber=True)
    fsspec.register_implementation("objects", Objects, clobber=True)
    fsspec.register_implementation("torn", Torn, clobber=True)
