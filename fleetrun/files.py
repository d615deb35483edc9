"""Open files beside a script's own, and manage the run directory. Scripts may write to the same directories.
The run directory holds the sockets of a user's running launches. Uses only the standard library.
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
    """Open a regular file and return its descriptor. Raises OSError, also if the path is another kind of
    file.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind):
        os.close(fd)
        raise OSError(errno.EINVAL, "Is a directory" if stat.S_ISDIR(kind) else "Not a regular file")
    if flags & os.O_ACCMODE != os.O_RDONLY:
        os.set_blocking(fd, True)  # a process that inherits the descriptor expects a blocking file
    return fd


def new_file(path: str | Path, mode: int) -> int:
    """Create a file and return a descriptor for writing. Raises OSError, also if a link has the name."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def read_file(path: Path) -> str:
    """Read a short text. Return an empty text if the file is missing or unreadable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def modified(path: Path) -> float | None:
    """Return the time of the last write, in seconds since the epoch, or None if the file is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def last_bytes(path: Path, most: int) -> tuple[bytes, bool]:
    """Return the last `most` bytes, and True if the file has more. Raises OSError."""
    with os.fdopen(open_plain(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return file.read(most), size > most


def end_of(path: Path, most: int) -> str:
    """Return the last `most` bytes as text, cut to whole lines if the file has more. Raises OSError."""
    data, cut = last_bytes(path, most)
    return (data.partition(b"\n")[2] if cut else data).decode(errors="replace")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path` to write to. At the end of the block the new file replaces
    `path`.

    If the block fails, `path` stays unchanged and the temporary file is deleted. Raises OSError.
    """
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        yield aside
        aside.replace(path)
    finally:
        with suppress(OSError):
            aside.unlink()


def replace_file(path: Path, text: str) -> None:
    """Replace the file, or a link of this name, atomically. Raises OSError."""
    with replacing(path) as aside, os.fdopen(new_file(aside, 0o666), "w") as file:
        file.write(text)


# ---- The run directory


def run_folder(environ: Environ) -> Path:
    """Return `$XDG_RUNTIME_DIR/fleetrun`, or `/tmp/fleetrun-UID` without that variable.

    The fallback also applies if the variable names a login directory that this node lacks, because sbatch and
    srun export the variable of another node.
    """
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base.startswith("/") and (not base.startswith("/run/user/") or Path(base).is_dir()):
        return Path(base) / "fleetrun"
    return Path("/tmp") / f"fleetrun-{os.getuid()}"


def control_socket(runtime: Path, pod: str) -> Path:
    """Return the path of the stream socket for requests to a launcher."""
    return runtime / f"{pod}.sock"


def progress_socket(runtime: Path, pod: str) -> Path:
    """Return the path of the datagram socket for the progress reports of a run."""
    return runtime / f"{pod}.progress"


def memory_socket(runtime: Path, pod: str) -> Path:
    """Return the path of the packet socket for memory that outlives a process of a run."""
    return runtime / f"{pod}.memory"


def probe_socket(runtime: Path, container: str) -> Path:
    """Return the path of the socket where the probe in a process answers.

    `container` is `pod.role.index`. A process keeps the path when its rank changes.
    """
    return runtime / f"{container}.probe"


def debug_socket(runtime: Path, container: str) -> Path:
    """Return the path of the socket where pdb in a process listens. `container` is `pod.role.rank`."""
    return runtime / f"{container}.probe.debug"


def remove_probe_sockets(runtime: Path, pod: str) -> None:
    """Remove the probe sockets of a run after all its processes have ended."""
    for path in runtime.glob(f"{pod}.*.probe*"):
        with suppress(OSError):
            path.unlink()


def only_ours(facts: os.stat_result) -> bool:
    """Return True for a directory into which no other user can write."""
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def make_run_folder(runtime: Path) -> None:
    """Create the run directory for this user only.

    Raises OSError, and PermissionError if the directory belongs to another user or is open to others. Its
    content could then not be trusted.
    """
    runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = runtime.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{runtime} is not a directory of this user")
    if found.st_mode & 0o077:
        raise PermissionError(f"{runtime} is open to other users")


@contextmanager
def short_socket_path(path: Path) -> Iterator[str]:
    """Yield a name of this path that fits into a socket address (107 bytes). Raises OSError."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def socket_at(path: Path, kind: int) -> socket.socket:
    """Make the run directory, and a non-blocking socket with this path. Raises OSError."""
    make_run_folder(path.parent)
    made = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    try:
        with short_socket_path(path) as name:
            made.bind(name)
    except OSError:
        made.close()
        raise
    return made


def peer(connected: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group of the peer at the time when it connected or listened. See
    unix(7).
    """
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", data)
    return pid, uid, gid


def ask_for_writes(directory: int) -> bool:
    """Request one SIGIO for this process at the next write to a file in the directory. Return False if the
    kernel refuses.
    """
    try:
        fcntl.fcntl(directory, fcntl.F_NOTIFY, fcntl.DN_MODIFY)
    except OSError:
        return False
    return True
