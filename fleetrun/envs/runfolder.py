"""The folder of a user's running launches: where their sockets are. Standard library only; makes nothing but
that folder.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path


def folder(environ: Mapping[str, str]) -> Path:
    """`$XDG_RUNTIME_DIR/fleetrun`; without that variable `/tmp/fleetrun-UID`."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base.startswith("/"):
        return Path(base) / "fleetrun"
    return Path("/tmp") / f"fleetrun-{os.getuid()}"


def control_socket(runtime: Path, pod: str) -> Path:
    """Where a launcher is asked (a stream)."""
    return runtime / f"{pod}.sock"


def progress_socket(runtime: Path, pod: str) -> Path:
    """Where the processes of a pod report (datagrams)."""
    return runtime / f"{pod}.progress"


def make(runtime: Path) -> None:
    """Make it, for this user only. Raises OSError, PermissionError too when it is somebody else's or open to
    others: what is in it cannot be trusted then.
    """
    runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = runtime.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{runtime} is not a folder of this user")
    if found.st_mode & 0o077:
        raise PermissionError(f"{runtime} is open to other users")


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """A name of this path that fits a socket address, which takes 107 bytes. Raises OSError."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
