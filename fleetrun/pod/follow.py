"""Follows log files that others write: whole lines, as soon as they are there, however many there are.

Woken by inotify; where there is none (a limit, an odd file system) by a timer. After a burst it rests for a
moment, so that a flood costs few wake-ups and not one per line. Reads only as long as the reader has room:
the file is the buffer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fleetrun.pod.linux import Inotify
from fleetrun.pod.logfiles import Trimmer
from fleetrun.pod.loop import Loop

_PIECE = 256 * 1024
_REST = 0.01  # seconds between two looks at a file in a flood
_FALLBACK = 0.1  # seconds between two looks where the kernel does not tell
_LONGEST_LINE = 64 * 1024

Emit = Callable[[bytes], None]


class Follower:
    """One file. `emit` gets whole lines, newline included."""

    def __init__(self, path: Path, emit: Emit) -> None:
        self.path = path
        self._emit = emit
        self._fd: int | None = None
        self._offset = 0
        self._partial = b""

    def pump(self) -> bool:
        """Hand on a piece; True when there may be more."""
        data = self._read()
        if not data:
            return False
        lines, newline, rest = (self._partial + data).rpartition(b"\n")
        if len(rest) > _LONGEST_LINE:  # no line, but what else should a reader be shown
            lines, newline, rest = lines + newline + rest, b"\n", b""
        self._partial = rest
        if newline:
            self._emit(lines + newline)
        return len(data) == _PIECE

    def finish(self) -> None:
        """The writer is gone: what stands after the last newline is a line too."""
        if self._partial:
            self._emit(self._partial + b"\n")
            self._partial = b""

    def shortened(self, by: int) -> None:
        """The file lost so many bytes at its head."""
        self._offset = max(0, self._offset - by)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _read(self) -> bytes:
        try:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._fd, _PIECE, self._offset)
            if not data and os.fstat(self._fd).st_size < self._offset:
                self._offset = 0  # somebody emptied the file (logrotate's copytruncate); appends start over
                data = os.pread(self._fd, _PIECE, 0)
        except OSError:
            return b""
        self._offset += len(data)
        return data


class Watch:
    """All files of a pod that somebody looks at: followed to the console, trimmed to a size, or both."""

    def __init__(self, loop: Loop, has_room: Callable[[], bool]) -> None:
        self._loop = loop
        self._has_room = has_room
        self._followers: dict[Path, Follower] = {}
        self._trimmers: dict[Path, Trimmer] = {}
        self._paths: dict[int, Path] = {}
        self._inotify: Inotify | None = None
        self._changed: set[Path] = set()
        self._held_back: set[Path] = set()
        self._resting = False

    def follow(self, path: Path, emit: Emit) -> None:
        self._followers[path] = Follower(path, emit)

    def bound(self, path: Path, keep: int) -> None:
        self._trimmers[path] = Trimmer(path, keep)

    @property
    def unbounded(self) -> list[Path]:
        """Files whose size the file system cannot bound."""
        return [path for path, trimmer in self._trimmers.items() if not trimmer.supported]

    def start(self) -> None:
        """After the files exist."""
        paths = [*dict.fromkeys([*self._followers, *self._trimmers])]
        if not paths:
            return
        try:
            self._inotify = Inotify()
            self._paths = {self._inotify.watch(path): path for path in paths}
        except OSError:
            self._close_inotify()
            self._look_again()
            return
        self._loop.add(self._inotify.fileno(), self._told)

    def go_on(self) -> None:
        """There is room again."""
        self._changed |= self._held_back
        self._held_back.clear()
        if not self._resting:
            self._look()

    def catch_up(self) -> None:
        """Everything that has been written so far, at once."""
        for follower in self._followers.values():
            while self._has_room() and follower.pump():
                pass

    def drain(self, flush: Callable[[], None]) -> None:
        """After the writers are gone: everything that is left; `flush` waits until there is room again."""
        for follower in self._followers.values():
            while follower.pump():
                if not self._has_room():
                    flush()
            follower.finish()

    def close(self) -> None:
        self._close_inotify()
        for follower in self._followers.values():
            follower.close()

    def _close_inotify(self) -> None:
        if self._inotify is not None:
            self._loop.remove(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def _told(self) -> None:
        assert self._inotify is not None, "told by a closed inotify"
        self._changed |= {self._paths[number] for number in self._inotify.read() if number in self._paths}
        if not self._resting:
            self._look()

    def _look(self) -> None:
        """Serve what changed, then rest; while resting, news only gathers."""
        self._resting = False
        if not self._changed:
            return
        changed, self._changed = self._changed, set()
        for path in changed:
            if self._serve(path):
                self._changed.add(path)
        self._resting = True
        self._loop.after(_REST, self._look)

    def _look_again(self) -> None:
        for path in [*self._followers, *self._trimmers]:
            self._serve(path)
        self._loop.after(_FALLBACK, self._look_again)

    def _serve(self, path: Path) -> bool:
        """True when there is more to do soon."""
        follower = self._followers.get(path)
        more = False
        if follower is not None and self._has_room():
            more = follower.pump()
        elif follower is not None:
            self._held_back.add(path)
        trimmer = self._trimmers.get(path)
        if trimmer is not None and trimmer.supported:
            shorter = trimmer.trim()
            if follower is not None:
                follower.shortened(shorter)
        return more
