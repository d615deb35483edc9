"""Files in directories that scripts write to as well, and the run folder: the directory with the sockets of a
user's running launches. Standard library only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fleetrun.aliases import Environ

# ---- Files in a directory where a script may have put anything: a pipe, a link to a device, a directory.
# Opening must not block on such a file.


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Raises OSError, also for anything else of that name."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "Not a file")
    if flags & os.O_ACCMODE != os.O_RDONLY:
        os.set_blocking(fd, True)  # a process that inherits it expects a blocking file
    return fd


def new_file(path: str | Path, mode: int) -> int:
    """A descriptor to write to it. Raises OSError, also where a link has the name."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def read_file(path: Path) -> str:
    """Read a short text; empty for what is not there, or may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def modified(path: Path) -> float | None:
    """Tell when it was written to last, in seconds since the epoch; None for what is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def last_bytes(path: Path, most: int) -> tuple[bytes, bool]:
    """The last `most` bytes, and whether the file has more. Raises OSError."""
    with os.fdopen(open_plain(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return file.read(most), size > most


def end_of(path: Path, most: int) -> str:
    """The last `most` bytes; whole lines, if it has more. Raises OSError."""
    data, cut = last_bytes(path, most)
    return (data.partition(b"\n")[2] if cut else data).decode(errors="replace")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name next to `path` to write to: at the end of the block that file takes its place. If the block
    fails, the file at `path` stays as it is, and the other one is deleted. Raises OSError.
    """
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        yield aside
        aside.replace(path)
    finally:
        with suppress(OSError):
            aside.unlink()


def replace_file(path: Path, text: str) -> None:
    """Replace the file, or whatever has its name, atomically. Raises OSError."""
    aside = path.with_suffix(".new")
    aside.unlink(missing_ok=True)
    with os.fdopen(new_file(aside, 0o666), "w") as file:
        file.write(text)
    aside.replace(path)


# ---- The run folder


def run_folder(environ: Environ) -> Path:
    """`$XDG_RUNTIME_DIR/fleetrun`; without that variable `/tmp/fleetrun-UID`. So too where it names a folder
    of a login that this machine does not have: sbatch and srun export the variable of another one.
    """
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base.startswith("/") and (not base.startswith("/run/user/") or Path(base).is_dir()):
        return Path(base) / "fleetrun"
    return Path("/tmp") / f"fleetrun-{os.getuid()}"


def control_socket(runtime: Path, pod: str) -> Path:
    """The stream socket for requests to a launcher."""
    return runtime / f"{pod}.sock"


def progress_socket(runtime: Path, pod: str) -> Path:
    """The datagram socket for progress reports of a pod."""
    return runtime / f"{pod}.progress"


def memory_socket(runtime: Path, pod: str) -> Path:
    """The packet socket for memory that outlives a process of a pod."""
    return runtime / f"{pod}.memory"


def probe_socket(runtime: Path, container: str) -> Path:
    """Where the probe in a container's process answers; `container` is `pod.role.index`, the same for each
    rank that the process gets.
    """
    return runtime / f"{container}.probe"


def remove_probe_sockets(runtime: Path, pod: str) -> None:
    """What processes of this pod have left; they are gone."""
    for path in runtime.glob(f"{pod}.*.probe*"):
        with suppress(OSError):
            path.unlink()


def make_run_folder(runtime: Path) -> None:
    """Create it, for this user only. Raises OSError, and PermissionError when it belongs to another user or
    is open to others: its content cannot be trusted then.
    """
    runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = runtime.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{runtime} is not a folder of this user")
    if found.st_mode & 0o077:
        raise PermissionError(f"{runtime} is open to other users")


@contextmanager
def short_socket_path(path: Path) -> Iterator[str]:
    """A name of this path that fits into a socket address (107 bytes). Raises OSError."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def peer(connected: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the peer when it connected or listened; see unix(7)."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", data)
    return pid, uid, gid


def ask_for_writes(directory: int) -> None:
    """One SIGIO to this process at the next write into a file of the directory."""
    fcntl.fcntl(directory, fcntl.F_NOTIFY, fcntl.DN_MODIFY)
