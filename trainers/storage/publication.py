"""Publication: files first, then the manifest that names them, then the removal of what no manifest names.

Whoever reads the folder at any moment, also after a kill or a power failure, finds a manifest whose files are
all complete. Files must be durable before the manifest is written (`LocalFolder.write` sees to that). Former
files must stay until the new manifest is durable: until then they may be the only ones that a reader finds.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress

from trainers.process.log import glog
from trainers.storage.folder import Folder


def current(folder: Folder, manifest: str) -> bytes | None:
    """Return the manifest that the folder has, None if it has none. Raises OSError."""
    return folder.read(manifest).numpy().tobytes() if manifest in folder.names() else None


def listed(names: Sequence[str]) -> str:
    """Return the names in a folder that has no manifest, for messages."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"


def publish(folder: Folder, manifest: str, content: bytes) -> bool:
    """Make this the manifest of the folder. Return False if it is, but may not survive a power failure.

    An error does not say whether the write took effect: an object store may lose its reply, and a file may
    have its name before the error. So the folder is read then, and the error is raised only if another
    manifest, or none, is there.
    """
    try:
        folder.write(manifest, [content])
    except Exception as error:  # (a storage library may raise anything)
        with suppress(Exception):
            if current(folder, manifest) == content:
                glog(f"{folder.path(manifest)} was written in spite of an error: {error or repr(error)}")
                return False
        raise
    return True


def withdraw(folder: Folder, manifest: str, names: Container[str]) -> None:
    """Remove these files or folders unless the manifest names them. Raise nothing: the caller has an error
    that is the reason, and the next publication sweeps what stays.
    """
    with suppress(Exception):
        sweep(folder, names.__contains__, (current(folder, manifest) or b"").decode())


def sweep(folder: Folder, ours: Callable[[str], object], named: Container[str]) -> None:
    """Remove what is `ours` and not `named`. A failure is logged: the manifest counts already."""
    try:
        for name in folder.names():
            if ours(name) and name not in named:
                folder.remove(name)
    except Exception as error:  # noqa: BLE001  (a storage library may raise anything)
        glog(f"files in {folder.where} are not needed any more but stay: {error or repr(error)}")
