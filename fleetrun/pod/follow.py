"""Follows log files that others write: whole lines, as soon as they are there, however many there are.

Woken by the kernel, or where it does not tell (an odd file system) by a timer. Rests for a moment between two
looks, so that a flood costs few wake-ups and not one per line. Reads only as long as the reader has room: the
file is the buffer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fleetrun.files import ask_for_writes, open_plain
from fleetrun.pod.logfiles import Trimmer, rotated_away
from fleetrun.pod.loop import Loop, Timer

_PIECE = 256 * 1024
_REST = 0.01  # seconds between two looks at a file in a flood
_LONGEST_REST = 0.2  # the same while only others write
_FALLBACK = 0.1  # the same where the kernel does not tell
_LONGEST_LINE = 64 * 1024

Emit = Callable[[bytes], None]


class Follower:
    """One file. `emit` gets whole lines, newline included.

    With `live`, also what ends in a carriage return: progress bars move, where no label stands before them.
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
        """Hand on a piece; True when there may be more."""
        data = self._read()
        if not data:
            return False
        lines, newline, rest = (self._partial + data).rpartition(b"\n")
        if self._live and b"\r" in rest:
            moved, end, rest = rest.rpartition(b"\r")
            lines, newline = lines + newline + moved, end
        if len(rest) > _LONGEST_LINE:  # no line, but what else should a reader be shown
            lines, newline, rest = lines + newline + rest, b"\n", b""
        self._partial = rest
        if self._lost:
            self._emit(f"... {rotated_away(self._lost)}\n".encode())
            self._lost = 0
        if newline:
            self._emit(lines + newline)
        return len(data) == _PIECE

    def finish(self) -> None:
        """The writer is gone: what stands after the last newline is a line too."""
        if self._partial:
            self._emit(self._partial + b"\n")
            self._partial = b""

    def shortened(self, by: int, start: int) -> None:
        """The file lost so many bytes at its head, and has nothing before `start` any more."""
        self.offset -= by
        if self.offset < start:  # what was not read yet is gone, and the line that had begun with it
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
                self.offset = 0  # somebody emptied the file (logrotate's copytruncate); appends start over
                data = os.pread(self._fd, _PIECE, 0)
        except OSError:
            return b""
        self.offset += len(data)
        return data


class Watch:
    """All files of a pod that somebody looks at: followed to the console, trimmed to a size, or both.

    The kernel is asked to tell of the next write into the log directory (fcntl F_NOTIFY: one SIGIO, then no
    more until asked again). Hand that to `told`. Not inotify: closing its descriptor delays a process by 8 to
    20 ms at its exit (a grace period of the kernel).
    """

    def __init__(
        self,
        loop: Loop,
        log_dir: Path,
        has_room: Callable[[], bool],
        ask: Callable[[int], None] = ask_for_writes,
        cut: Callable[[Path, int], None] = lambda path, by: None,
    ) -> None:
        """`cut` is told of files that became shorter at their head, and by how many bytes."""
        self._loop = loop
        self._has_room = has_room
        self._log_dir = log_dir
        self._ask_kernel = ask
        self._cut = cut
        self._fd: int | None = None
        self._followers: dict[Path, Follower] = {}
        self._trimmers: dict[Path, Trimmer] = {}
        self._rest = _REST
        self._timer: Timer | None = None

    def follow(self, path: Path, emit: Emit, *, live: bool = False) -> None:
        self._followers[path] = Follower(path, emit, live=live)

    def bound(self, path: Path, keep: int) -> None:
        self._trimmers[path] = Trimmer(path, keep)

    @property
    def unbounded(self) -> list[Path]:
        """Files whose size the file system cannot bound."""
        return [path for path, trimmer in self._trimmers.items() if not trimmer.supported]

    def start(self) -> None:
        """After the files exist."""
        if self._followers or self._trimmers:
            self._fd = os.open(self._log_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._look()

    def told(self) -> None:
        """Something in the log directory was written to."""
        if self._fd is not None and self._timer is None:
            self._rest = _REST if self._serve() else min(2 * self._rest, _LONGEST_REST)
            self._timer = self._loop.after(self._rest, self._look)

    def go_on(self) -> None:
        """The reader has room again."""
        if self._fd is not None and self._timer is None:
            self._look()

    def catch_up(self) -> None:
        """Everything that has been written so far, at once."""
        for follower in self._followers.values():
            while self._has_room() and follower.pump():
                pass

    def drain(self, flush: Callable[[], None]) -> None:
        """After the writers are gone: all that is left; `flush` waits until there is room again. If there is
        none even then, it was interrupted, and the rest stays in the files.
        """
        for follower in self._followers.values():
            while follower.pump():
                if not self._has_room():
                    flush()
                if not self._has_room():
                    return
            follower.finish()

    def _look(self) -> None:
        """Ask for news, then see what is there already: in this order, so that no write falls between.

        Without room, and without files to bound, nothing is asked: `go_on` comes when there is room.
        """
        self._timer = None
        if not self._has_room() and not self._trimmers:
            return
        will_tell = self._ask()
        found = self._serve()
        if found or not will_tell:
            self._rest = _REST if will_tell else _FALLBACK
            self._timer = self._loop.after(self._rest, self._look)

    def _ask(self) -> bool:
        """Whether the kernel will tell."""
        try:
            self._ask_kernel(self._fd or 0)
        except OSError:
            return False
        return True

    def _serve(self) -> bool:
        """Whether there was anything to do."""
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
