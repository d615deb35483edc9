"""Manage log files: names, permissions, earlier runs, size limits, and following them on the console.

Processes write their stdout and stderr directly into these files, opened for append. Logs therefore do not
load the launcher, and are complete even if the launcher is killed. `Trimmer` can limit a file during writes,
because the kernel removes whole blocks from its head while appends continue at its end.

`Watch` follows whole lines as soon as they are written. The kernel wakes it, or a timer on file systems
without notifications. It rests for a moment between two looks, so that a flood of lines causes few wake-ups.
It reads only while the reader has room, so the file serves as the buffer.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fleetrun.aliases import Callback
from fleetrun.envs.contract import Role
from fleetrun.errors import LaunchError, UsageError
from fleetrun.files import ask_for_writes, open_plain
from fleetrun.pod import linux
from fleetrun.pod.loop import Loop, Timer

# ---- Names, permissions, earlier runs, rotation

LATEST = "latest"


def open_log(path: Path) -> int:
    """Return a descriptor that appends to `path`, with mode 0600, readable only by the owner.

    The file carries a shared lock while any process has it open. `remove_earlier` therefore skips running
    jobs.
    """
    try:
        fd = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    except OSError as error:
        raise LaunchError(
            f"cannot open the log file {path}: {error.strerror}", hint=_HINTS.get(error.errno or 0)
        ) from None
    with suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


_HINTS = {
    errno.ENOSPC: "The disk, or its number of inodes, is full. Free some room, or choose another --log_dir.",
    errno.EACCES: "Choose another --log_dir.",
    errno.EROFS: "Choose another --log_dir.",
    errno.EMFILE: "The limit on open files is reached. Raise the limit with `ulimit -n`.",
}


def mark(path: Path, text: str) -> None:
    """Write a line of fleetrun into a log, after the unfinished output of the last attempt.

    A failure to write is ignored, because a full disk must not stop a restart.
    """
    with suppress(OSError), os.fdopen(open_plain(path, os.O_RDWR), "r+b") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - 1))
        begin = "" if log.read(1) in (b"", b"\n") else "\n"
        log.write(f"{begin}--- fleetrun: {text}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())


def make_log_dir(path: Path) -> None:
    """Create `path` and its parents. Raises UsageError if it is not a directory or not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--log_dir {path} is not a directory") from None
    except OSError as error:
        raise UsageError(f"--log_dir {path} cannot be created: {error.strerror}") from None
    probe = path / f".probe-{os.getpid()}"
    try:
        probe.touch(mode=0o600)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # the directory itself is fine
        raise UsageError(
            f"--log_dir {path} cannot be written to: {error.strerror}", hint=_HINTS.get(error.errno or 0)
        ) from None
    probe.unlink()


def is_full(path: Path) -> bool:
    """Return True if the file system of `path` is full for this user."""
    with suppress(OSError):
        room = os.statvfs(path)
        return room.f_bavail == 0 or (room.f_files > 0 and room.f_favail == 0)
    return False


def remove_earlier(log_dir: Path, job: str) -> None:
    """Delete the logs and event logs of earlier runs of this job, for `--log_overwrite`.

    Files that a process still writes are kept.
    """
    from glob import escape  # late, because few runs need it

    kinds = [*(f"{role}.*.log" for role in Role), "pre_hook.*.log", "gpu.log", "events.jsonl", "marks"]
    for path in (each for kind in kinds for each in log_dir.glob(f"{escape(job)}.??????.{kind}")):
        with suppress(OSError), os.fdopen(open_plain(path, os.O_NOFOLLOW)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            path.with_suffix(".error.json").unlink(missing_ok=True)


def point_latest(log_dir: Path, pod: str, logs: Sequence[tuple[str, Path]]) -> None:
    """Make `log_dir/latest` a link to a directory of links, one per process (`trainer.0.log`), in one step.

    The links are a convenience, and are left out where the file system lacks links.
    """
    latest = log_dir / LATEST
    folder = log_dir / f".{LATEST}.{pod}"
    with suppress(OSError):
        folder.mkdir(mode=0o700)
        for name, path in logs:
            (folder / f"{name}.log").symlink_to(Path("..") / path.name)
        before = latest.readlink() if latest.is_symlink() else None
        step = log_dir / f".{LATEST}.{pod}.new"
        step.symlink_to(folder.name)
        step.replace(latest)
        if before is not None and before.name.startswith(f".{LATEST}."):
            folder = log_dir / before.name
            with suppress(OSError):
                for link in folder.iterdir():
                    link.unlink()
                folder.rmdir()


def rotated_away(count: int) -> str:
    """Return the text that replaces these bytes of a log."""
    amount = f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count:,} bytes"
    return f"{amount} were rotated away before they could be read"


class Trimmer:
    """Keeps a growing log between `keep` and twice `keep` bytes by removing blocks from its head.

    ext4 and xfs collapse the range, so the file shrinks. On file systems without collapse (tmpfs, btrfs), the
    head is punched out. This frees the blocks, keeps the size, and leaves zeros for readers. Elsewhere
    `supported` becomes False. `start` is the first byte that has not been punched out.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self._path = path
        self._keep = keep
        self.start = 0
        self.supported = True
        self.trimmed = 0

    def trim(self) -> int:
        """Trim the log. Return by how many bytes the file became shorter, for readers that keep
        offsets into it.
        """
        try:
            fd = open_plain(self._path, os.O_RDWR)
        except OSError:
            return 0  # deleted or replaced meanwhile
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
            self.start = 0  # another program emptied the file
        if state.st_size - self.start <= 2 * self._keep:
            return 0
        block = max(4096, state.st_blksize)
        excess = (state.st_size - self._keep) // block * block
        if excess <= self.start:
            return 0
        if not self.start:
            with suppress(OSError):
                linux.collapse_range(fd, excess)
                self.trimmed += excess
                return excess
        linux.punch_hole(fd, excess)
        self.trimmed += excess - self.start
        self.start = excess
        return 0


# ---- Following a log

_PIECE = 256 * 1024
_REST = 0.01  # seconds between two looks at a file in a flood
_LONGEST_REST = 0.2  # the same while only other files are written
_FALLBACK = 0.1  # the same without notifications from the kernel
_LONGEST_LINE = 64 * 1024

Emit = Callable[[bytes], None]


class Follower:
    """Follows one file. `emit` receives whole lines, newline included.

    With `live` it also receives text that ends in a carriage return, so progress bars move. Do not use `live`
    for lines with a label in front.
    """

    def __init__(self, path: Path, emit: Emit, *, live: bool = False) -> None:
        self.path = path
        self._emit = emit
        self._live = live
        self._fd: int | None = None
        self.offset = 0
        self._partial = b""
        self._lost = 0

    def pump(self) -> bool:
        """Pass on a piece. Return True if there may be more."""
        data = self._read()
        if not data:
            return False
        lines, newline, rest = (self._partial + data).rpartition(b"\n")
        if self._live and b"\r" in rest:
            moved, end, rest = rest.rpartition(b"\r")
            lines, newline = lines + newline + moved, end
        if len(rest) > _LONGEST_LINE:  # not a line, but it must be shown in time
            lines, newline, rest = lines + newline + rest, b"\n", b""
        self._partial = rest
        if self._lost:
            self._emit(f"... {rotated_away(self._lost)}\n".encode())
            self._lost = 0
        if newline:
            self._emit(lines + newline)
        return len(data) == _PIECE

    def finish(self) -> None:
        """Emit the text after the last newline as a line, because the writer has ended."""
        if self._partial:
            self._emit(self._partial + b"\n")
            self._partial = b""

    def shortened(self, by: int, start: int) -> None:
        """Adjust the offset after the file lost `by` bytes at its head. It now starts at `start`."""
        self.offset -= by
        if self.offset < start:  # the unread bytes are lost, and the line that started before them
            self._lost += start - self.offset + len(self._partial)
            self.offset, self._partial = start, b""

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _read(self) -> bytes:
        try:
            if self._fd is None:
                self._fd = open_plain(self.path)
            data = os.pread(self._fd, _PIECE, self.offset)
            if not data and os.fstat(self._fd).st_size < self.offset:
                # another program emptied the file (logrotate's copytruncate), and appends start over
                self.offset = 0
                data = os.pread(self._fd, _PIECE, 0)
        except OSError:
            return b""
        self.offset += len(data)
        return data


class Watch:
    """All files of a pod that are followed to the console, trimmed to a size, or both.

    The kernel signals the next write into the log directory (fcntl F_NOTIFY), with one SIGIO per request.
    Pass this signal to `handle_write`. The watch does not use inotify, because closing its descriptor delays
    the exit of a process by 8 to 20 ms (a grace period of the kernel).
    """

    def __init__(
        self,
        loop: Loop,
        log_dir: Path,
        has_room: Callable[[], bool],
        ask: Callable[[int], bool] = ask_for_writes,
        cut: Callable[[Path, int], None] = lambda path, by: None,
    ) -> None:
        """Make a watch. `cut` receives the path and the number of bytes when a file lost bytes at its
        head.
        """
        self._loop = loop
        self._has_room = has_room
        self._log_dir = log_dir
        self._ask_kernel = ask
        self._cut = cut
        self._fd: int | None = None
        self._followers: dict[Path, Follower] = {}
        self._trimmers: dict[Path, Trimmer] = {}
        self._rest = _REST
        self._timer = Timer()

    def follow(self, path: Path, emit: Emit, *, live: bool = False) -> None:
        self._followers[path] = Follower(path, emit, live=live)

    def bound(self, path: Path, keep: int) -> None:
        self._trimmers[path] = Trimmer(path, keep)

    @property
    def unbounded(self) -> list[Path]:
        """Files whose size the file system cannot limit."""
        return [path for path, trimmer in self._trimmers.items() if not trimmer.supported]

    def start(self) -> None:
        """Start following, after the files exist."""
        if self._followers or self._trimmers:
            self._fd = os.open(self._log_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._look()

    def handle_write(self) -> None:
        """Handle a write into the log directory."""
        if self._fd is not None and not self._timer.pending:
            self._rest = _REST if self._serve() else min(2 * self._rest, _LONGEST_REST)
            self._timer = self._loop.after(self._rest, self._look)

    def go_on(self) -> None:
        """Continue, because the reader has room again."""
        if self._fd is not None and not self._timer.pending:
            self._look()

    def catch_up(self) -> None:
        """Read all output written so far, without waiting."""
        for follower in self._followers.values():
            while self._has_room() and follower.pump():
                pass

    def drain(self, flush: Callback) -> None:
        """Read all remaining output after the writers have ended. `flush` waits until there is room again.

        If room is still missing, the wait was interrupted, and the remaining output stays in the files.
        """
        for follower in self._followers.values():
            while follower.pump():
                if not self._has_room():
                    flush()
                if not self._has_room():
                    return
            follower.finish()

    def _look(self) -> None:
        """Request a notification, then look at the files. In this order, every write is noticed.

        Without room and without files to trim, skip the request. `go_on` then continues the watch.
        """
        if not self._has_room() and not self._trimmers:
            return
        will_notify = self._ask_kernel(self._fd or 0)
        found = self._serve()
        if found or not will_notify:
            self._rest = _REST if will_notify else _FALLBACK
            self._timer = self._loop.after(self._rest, self._look)

    def _serve(self) -> bool:
        """Read and trim the files. Return True if there was anything to do."""
        found = False
        for follower in self._followers.values():
            before = follower.offset
            if self._has_room():
                follower.pump()
            found |= follower.offset != before
        for path, trimmer in self._trimmers.items():
            before = trimmer.trimmed
            shorter = trimmer.trim() if trimmer.supported else 0
            found |= trimmer.trimmed != before
            if path in self._followers:
                self._followers[path].shortened(shorter, trimmer.start)
            if shorter:
                self._cut(path, shorter)
        return found
