"""Files in folders that others write to as well: regular files opened without waiting, and the folder of a
user's running launches with its sockets. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

# ---- Files in a folder where scripts may have put anything by now: a pipe, a link to a device, a folder.
# Opened and written without waiting for whoever is at the other end.


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of a regular file. Raises OSError, also for what is there and is none."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "Not a file")
    if flags & os.O_ACCMODE != os.O_RDONLY:
        os.set_blocking(fd, True)  # who inherits it did not ask for the other
    return fd


def replace_file(path: Path, text: str) -> None:
    """In place of whatever is there, and whole at once. Raises OSError."""
    aside = path.with_suffix(".new")
    aside.unlink(missing_ok=True)
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    aside.replace(path)


# ---- The folder of a user's running launches: where their sockets are. Standard library only; makes nothing
# but that folder.


def run_folder(environ: Mapping[str, str]) -> Path:
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


def make_run_folder(runtime: Path) -> None:
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
def short_socket_path(path: Path) -> Iterator[str]:
    """A name of this path that fits a socket address, which takes 107 bytes. Raises OSError."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def peer(connected: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as they were when it connected or listened; see unix(7)."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", data)
    return pid, uid, gid


def ask_for_writes(directory: int) -> None:
    """One SIGIO to this process at the next write into a file of the directory."""
    fcntl.fcntl(directory, fcntl.F_NOTIFY, fcntl.DN_MODIFY)
