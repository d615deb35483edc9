"""Publish files first, then the manifest that names them, then remove the files that no manifest names.

Every reader of the directory, also after a kill or a power failure, finds a manifest whose files are all
complete. Files must be durable before the manifest is written, and `LocalFolder.write` makes them durable.
Former files must stay until the new manifest is durable. Until then, they may be the only files that a reader
finds.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress

from trainers.process.log import glog
from trainers.storage.folder import Folder


def current(folder: Folder, manifest: str) -> bytes | None:
    """Return the manifest of the directory, or None if the directory has none. Raises OSError."""
    return folder.read(manifest).numpy().tobytes() if manifest in folder.names() else None


def listed(names: Sequence[str]) -> str:
    """Return the names in a directory without a manifest, for messages."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"


def publish(folder: Folder, manifest: str, content: bytes) -> bool:
    """Make this the manifest of the directory. Return False if it is, but may not survive a power failure.

    After an error, the write may still have taken effect. An object store may lose its reply, and a file may
    have its name before the error. The directory is therefore read. The error is raised only if the directory
    has another manifest, or none.
    """
    try:
        folder.write(manifest, [content])
    except Exception as error:  # (a storage library may raise anything)
        with suppress(Exception):
            if current(folder, manifest) == content:
                glog(f"{folder.path(manifest)} was written despite an error: {error or repr(error)}")
                return False
        raise
    return True


def withdraw(folder: Folder, manifest: str, names: Container[str]) -> None:
    """Remove these files or directories unless the manifest names them. Raise nothing, because the caller
    already has an error to report. The next publication removes the remaining files.
    """
    with suppress(Exception):
        sweep(folder, names.__contains__, (current(folder, manifest) or b"").decode())


def sweep(folder: Folder, ours: Callable[[str], object], named: Container[str]) -> None:
    """Remove names that are `ours` and not `named`. Log a failure, because the manifest already counts."""
    try:
        for name in folder.names():
            if ours(name) and name not in named:
                folder.remove(name)
    except Exception as error:  # noqa: BLE001  (a storage library may raise anything)
        glog(f"Files in {folder.where} are no longer needed but could not be removed: {error or repr(error)}")
