"""Log files: who may read them, what they are called, how an old run makes room, how a long one stays
bounded.

Containers write straight into these files (their stdout and stderr), opened for append. Nobody stands in the
path: a log costs the launcher nothing, and is complete when the launcher is gone. That is also how `trim` can
bound a file that is being written to: the kernel takes whole blocks out of its head, and appends go on at its
end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from fleetrun.envs.contract import Role
from fleetrun.errors import LaunchError, UsageError
from fleetrun.files import open_plain
from fleetrun.pod import linux

LATEST = "latest"


def open_log(path: Path) -> int:
    """A descriptor that appends to `path`; the file is readable by its owner only (0600).

    It carries a shared lock as long as any process has it open, so that `remove_earlier` leaves running jobs
    alone.
    """
    try:
        fd = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    except OSError as error:
        raise LaunchError(
            f"cannot open the log file {path}: {error.strerror}", hint=_HINTS.get(error.errno or 0)
        ) from None
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


_HINTS = {
    errno.ENOSPC: "The disk (or its inodes) is full: free some room or choose another --log_dir.",
    errno.EACCES: "Choose another --log_dir.",
    errno.EROFS: "Choose another --log_dir.",
    errno.EMFILE: "The limit on open files is reached: raise it with `ulimit -n`.",
}


def mark(path: Path, text: str) -> None:
    """A line of fleetrun's own in a log, after what the last attempt left unfinished.

    A full disk must not stop a restart, so a failure to write is let go.
    """
    with contextlib.suppress(OSError), os.fdopen(open_plain(path, os.O_RDWR), "r+b") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - 1))
        begin = "" if log.read(1) in (b"", b"\n") else "\n"
        log.write(f"{begin}--- fleetrun: {text}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())


def make_log_dir(path: Path) -> None:
    """Create `path` and its parents. Raises UsageError when it is no directory or cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--log_dir {path} is not a directory") from None
    except OSError as error:
        raise UsageError(f"--log_dir {path} cannot be made: {error.strerror}") from None
    probe = path / f".probe-{os.getpid()}"
    try:
        probe.touch(mode=0o600)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # nothing is wrong with the directory
        raise UsageError(
            f"--log_dir {path} cannot be written to: {error.strerror}", hint=_HINTS.get(error.errno or 0)
        ) from None
    probe.unlink()


def is_full(path: Path) -> bool:
    """Whether the file system of `path` has no room left for this user."""
    with contextlib.suppress(OSError):
        room = os.statvfs(path)
        return room.f_bavail == 0 or (room.f_files > 0 and room.f_favail == 0)
    return False


def log_path(log_dir: Path, job: str, pod: str, role: str, index: int) -> Path:
    return log_dir / f"{job}.{pod}.{role}.{index}.log"


def remove_earlier(log_dir: Path, job: str) -> None:
    """`--log_overwrite`: delete the logs and records of earlier runs of this job that no process writes any
    more.
    """
    kinds = [*(f"{role}.*.log" for role in Role), "pre_hook.*.log", "gpu.log", "events.jsonl", "marks"]
    for path in (each for kind in kinds for each in log_dir.glob(f"{_literal(job)}.??????.{kind}")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                path.with_suffix(".error.json").unlink(missing_ok=True)
            finally:
                os.close(fd)


def _literal(text: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)


def point_latest(log_dir: Path, pod: str, logs: Sequence[tuple[str, Path]]) -> None:
    """Make `log_dir/latest` a link to a folder of links, one per container (`trainer.0.log`), in one step.

    A convenience: where links cannot be made it is left out.
    """
    latest = log_dir / LATEST
    folder = log_dir / f".{LATEST}.{pod}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
        for name, path in logs:
            (folder / f"{name}.log").symlink_to(Path("..") / path.name)
        before = latest.readlink() if latest.is_symlink() else None
        step = log_dir / f".{LATEST}.{pod}.new"
        step.symlink_to(folder.name)
        step.replace(latest)
        if before is not None and before.name.startswith(f".{LATEST}."):
            _remove_links(log_dir / before.name)


def _remove_links(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for link in folder.iterdir():
            link.unlink()
        folder.rmdir()


def rotated_away(count: int) -> str:
    """What is said instead of these bytes of a log."""
    amount = f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count:,} bytes"
    return f"{amount} were rotated away before they could be read"


class Trimmer:
    """Keeps a growing log between `keep` and twice `keep` bytes by taking blocks from its head, newest lines
    never.

    ext4 and xfs collapse the range, so that the file shrinks. Where the file system cannot (tmpfs, btrfs),
    the head is punched out: the blocks are freed, the size stays, and a reader finds zeros there. Elsewhere
    `supported` turns False. `start` is the first byte that has not been punched out.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self._path = path
        self._keep = keep
        self.start = 0
        self.supported = True
        self.trimmed = 0

    def trim(self) -> int:
        """How many bytes the file has become shorter by, for those who remember offsets into it."""
        try:
            fd = open_plain(self._path, os.O_RDWR)
        except OSError:
            return 0  # deleted under us, or no file any more: nothing to bound
        try:
            return self._trim(fd)
        except OSError as error:
            self.supported = error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
            return 0
        finally:
            os.close(fd)

    def _trim(self, fd: int) -> int:
        state = os.fstat(fd)
        if state.st_size < self.start:
            self.start = 0  # somebody emptied the file
        if state.st_size - self.start <= 2 * self._keep:
            return 0
        block = max(4096, state.st_blksize)
        excess = (state.st_size - self._keep) // block * block
        if excess <= self.start:
            return 0
        if not self.start:
            with contextlib.suppress(OSError):
                linux.collapse_range(fd, excess)
                self.trimmed += excess
                return excess
        linux.punch_hole(fd, excess)
        self.trimmed += excess - self.start
        self.start = excess
        return 0
