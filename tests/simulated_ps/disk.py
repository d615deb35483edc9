"""What simulated processes do to files: each call may be the last one before a kill, may fail, and counts as
lost in a power failure until it was synced.

Files are real, in memory. The calls of `os` are replaced while a simulation runs, and affect only simulated
processes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.simulated_ps.world import Process, World, current, patched

_WRITES = (
    "write",
    "writev",
    "pwrite",
    "ftruncate",
    "fsync",
    "fdatasync",
    "replace",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
)

_SYNCS = ("fsync", "fdatasync")


class Disk:
    """`errors`: how often a call fails, by errno. A call that fails may have done its work."""

    _AWAY = 5
    """The most calls that fail after a call that has worked and failed."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self.errors: dict[int, float] = {}
        self.late_errors = 0.0
        """How often a call that has worked fails."""
        self.bad_syncs: frozenset[int] = frozenset()
        """The numbers of the calls of fdatasync that fail."""
        self.loses_power = True
        """False if `lose_power` is never called."""
        self.at_bad_sync: Callable[[Process], None] = lambda process: None
        self.late_at = ""
        """Which files calls fail late for: the beginning of their path in the folder."""
        self.goes_away = False
        """True if the disk may be away for some calls after a call that has worked and failed."""
        self._syncs = 0
        self._away: dict[Process, int] = {}
        """How many calls of each process fail next."""
        self._open: dict[int, Process] = {}
        self._temporary: set[int] = set()
        self._synced: dict[int, bytes] = {}
        """Contents by inode, as of the last sync of the file."""
        self._damaged: set[int] = set()
        """Files of which a sync has failed. The kernel dropped what was not on the disk, whatever follows."""

    @contextmanager
    def used(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in _WRITES:
                stack.enter_context(patched((os, name, self._replaced(name, getattr(os, name)))))
            real_open, real_close, real_fdopen, real_dup = os.open, os.close, os.fdopen, os.dup

            def fake_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
                task = current()
                ours = "dir_fd" in options or str(path).startswith(str(self.folder))
                if task is None or not ours:
                    return real_open(path, flags, *args, **options)
                if flags & os.O_CREAT:
                    self.world.step()
                task.process.check()
                self._fail_if_away(task.process, "open", path)
                return self._opened(task.process, real_open(path, flags, *args, **options), flags)

            def fake_dup(descriptor: int) -> int:
                task = current()
                found = real_dup(descriptor)
                return found if task is None else self._opened(task.process, found)

            def fake_close(descriptor: int) -> None:
                task = current()
                if task is not None:
                    task.process.check()
                    self._open.pop(descriptor, None)
                real_close(descriptor)

            def fake_fdopen(descriptor: int, *args: Any, **options: Any) -> Any:
                self._open.pop(descriptor, None)
                return real_fdopen(descriptor, *args, **options)

            stack.enter_context(
                patched(
                    (os, "open", fake_open), (os, "close", fake_close), (os, "fdopen", fake_fdopen),
                    (os, "dup", fake_dup), (os, "setpriority", lambda *args: None),
                )
            )  # fmt: skip
            self._real_close = real_close
            try:
                yield
            finally:
                for descriptor in list(self._open):
                    real_close(descriptor)

    def _is_ours(self, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        if options.get("dir_fd") is not None or options.get("src_dir_fd") is not None:
            return True
        if isinstance(args[0], int):
            return args[0] in self._open or args[0] in self._temporary
        return str(args[0]).startswith(str(self.folder))

    def _opened(self, process: Process, descriptor: int, flags: int = 0) -> int:
        self._temporary.discard(descriptor)
        if flags & os.O_TMPFILE == os.O_TMPFILE:  # its file object closes it
            self._temporary.add(descriptor)
            return descriptor
        if self._close_all not in process.at_end:
            process.at_end.append(lambda: self._close_all(process))
        self._open[descriptor] = process
        return descriptor

    def _close_all(self, process: Process) -> None:
        for descriptor in [each for each, owner in self._open.items() if owner is process]:
            del self._open[descriptor]
            self._real_close(descriptor)

    def _replaced(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            task = current()
            # The files of the follower are a cache. Other files belong to compiled kernels.
            if task is None or task.process.name == "follower" or not self._is_ours(args, options):
                return real(*args, **options)
            self.world.step()
            task.process.check()
            self._fail_before(task.process, name, real, args)
            result = real(*args, **options)
            if self.loses_power and name in _SYNCS:
                self._note_sync(args[0])
            self._fail_after(task.process, name, args[0])
            return result

        return call

    def _fail_before(
        self, process: Process, name: str, real: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self._fail_if_away(process, name, args[0])
        self._syncs += name == "fdatasync"
        if name == "fdatasync" and self._syncs in self.bad_syncs:
            self._damaged.add(os.fstat(args[0]).st_ino)
            self.at_bad_sync(process)
            raise self._error(process, f"sync {self._syncs} fails", errno.EIO)
        for number, often in self.errors.items():
            if self.world.random.random() < often:
                if name in ("write", "writev") and number == errno.ENOSPC:
                    self._write_some(name, real, args)
                if name in _SYNCS:
                    self._damaged.add(os.fstat(args[0]).st_ino)
                raise self._error(process, f"{name} fails with {errno.errorcode[number]}", number)

    def _fail_after(self, process: Process, name: str, path: Any) -> None:
        late = self.late_errors and self.world.random.random() < self.late_errors
        if late and name != "fdatasync" and self._is_at(self.late_at, path):
            if self.goes_away:
                self._away[process] = self.world.random.randrange(self._AWAY + 1)
            raise self._error(process, f"{name} works and fails", errno.EIO)

    def _error(self, process: Process, what: str, number: int) -> OSError:
        self.world.note(f"{process.name}: {what}")
        return OSError(number, os.strerror(number))

    def _is_at(self, place: str, path: Any) -> bool:
        """Return True if the path, or that of the descriptor, begins with `place` in the folder."""
        if not place:
            return True
        where = str(Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else path)
        return where.startswith(f"{self.folder}/{place}")

    def _fail_if_away(self, process: Process, name: str, path: Any) -> None:
        if (left := self._away.get(process)) and self._is_at(self.late_at.partition("/")[0], path):
            self._away[process] = left - 1
            raise self._error(process, f"{name} fails, because the disk is away", errno.EIO)

    def _write_some(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Write a part, as on a disk that becomes full."""
        descriptor, content = args
        pieces = b"".join(bytes(each) for each in content) if name == "writev" else bytes(content)
        some = pieces[: self.world.random.randrange(len(pieces) + 1)]
        if some:
            real(descriptor, [some] if name == "writev" else some)

    def bring_back(self) -> None:
        """End the time in which the disk is away."""
        self._away.clear()

    # ---- Power failures

    def _note_sync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_dir() and found.st_ino not in self._damaged:
            self._synced[found.st_ino] = path.read_bytes()

    def forget_failures(self) -> None:
        """Let later syncs work for all files, when a server has ended. What a sync has failed for may be lost
        by a power failure before the first snapshot of the next process. This is not simulated.
        """
        self._damaged.clear()

    def lose_power(self, folder: Path) -> None:
        """Cut the files below a folder off at a place that is not before what was synced. Names survive."""
        for path in sorted(folder.rglob("*")):
            if not path.is_file():
                continue
            synced = self._synced.get(path.stat().st_ino, b"")
            content = path.read_bytes()
            if len(content) > len(synced) and content.startswith(synced):
                keep = self.world.random.randint(len(synced), len(content))
                self.world.note(f"{path.name}: {len(content) - keep} bytes are lost")
                os.truncate(path, keep)
