"""The live display: output that scrolls, and a status line below it.

`LiveConsole` is the console, and `StatusLine` draws the line. `PendingLines` holds back the lines of progress
bars that may still change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial

from fleetrun.aliases import Callback
from fleetrun.console.console import Console, Follower, Sink, terminal_columns
from fleetrun.console.status_text import StatusFields, status_row
from fleetrun.console.text import sanitize, visible_row
from fleetrun.pod.loop import Loop, Timer

_FALLBACK_COLUMNS = 100


class LiveConsole(Console):
    """The console of a terminal, with a status line below the output."""

    shows_status = True

    def __init__(self, status_line: StatusLine, level: str, *, colour: bool) -> None:
        super().__init__(status_line, status_line, level, colour=colour)
        self._status_line = status_line

    def drain(self, interrupted: int) -> None:
        self._status_line.end()
        super().drain(interrupted)

    def begin(self, loop: Loop, status: Callable[[], StatusFields]) -> None:
        self._status_line.begin(loop, status)

    def refresh(self) -> None:
        self._status_line.refresh()

    def end(self) -> None:
        self._status_line.end()

    def pause(self) -> None:
        self._status_line.hide()

    def resume(self) -> None:
        self._status_line.unhide()

    def follower(self, name: str, width: int, number: int, *, alone: bool) -> Follower:
        if alone:
            return self._status_line.write_unfinished, True
        return super().follower(name, width, number, alone=alone)

    @property
    def columns(self) -> int:
        """The width of the terminal, read again for each line because the terminal may have been resized."""
        return terminal_columns() or _FALLBACK_COLUMNS


def live_console(sink: Sink, level: str, *, colour: bool) -> LiveConsole:
    """Build the live console. `sink` is both stdout and stderr, and a terminal."""
    status_line = StatusLine(sink, partial(terminal_size, 1), partial(in_foreground, 1), colour=colour)
    return LiveConsole(status_line, level, colour=colour)


def terminal_size(fd: int) -> tuple[int, int]:
    """Return columns and rows.

    They are 80 and 24 if the terminal does not report them, 0 and 0 if it has vanished.
    """
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return 0, 0
    return columns or 80, rows or 24


def in_foreground(fd: int) -> bool:
    """Return True if the user's command, whose process is the guard, is in the foreground of the terminal."""
    try:
        return os.tcgetpgrp(fd) == os.getpgid(os.getppid())
    except OSError:  # not the controlling terminal of this session
        return False


# ---- The line at the bottom of the terminal. Each write erases the line, adds output and draws the line
# again.
#
# The cursor rests at the start of the status line, and the status line owns everything from there to the end
# of the screen. A terminal may therefore rewrap rows when it is resized, and a killed process leaves nothing
# to restore. No mode of the terminal is changed.
#
# The row of the cursor is erased separately, and then the screen from the next row on. In the first row, tmux
# treats "erase to the end of the screen" like `clear`, and moves the old contents into its scrollback.

_ERASE_BELOW = b"\r\x1b[K" + b"\x1b7\x1b[B\x1b[J\x1b8"
_IDLE_INTERVAL = 1.0  # seconds between two updates while nothing is printed
_BUSY_INTERVAL = 0.25  # seconds between two updates while output arrives
_SMALLEST = (20, 4)
_REVERSE, _RESET = b"\x1b[7m", b"\x1b[0m"

Size = Callable[[], tuple[int, int]]


class StatusLine:
    """An output like a `Sink`, with a status line. `size` returns columns and rows.

    `foreground` returns True if fleetrun may draw on the terminal. In the background, the terminal belongs to
    the shell, and only lines are written.
    """

    def __init__(self, sink: Sink, size: Size, foreground: Callable[[], bool], *, colour: bool) -> None:
        self._sink = sink
        self._size = size
        self._foreground = foreground
        self._colour = colour
        self._loop: Loop | None = None
        self._status: Callable[[], StatusFields] | None = None
        self._timer = Timer()
        self._soon = Timer()
        self._pending = PendingLines()
        self._drawn = False
        self._hidden = False
        self._row = b""
        self._row_made = -_IDLE_INTERVAL  # on the loop's clock
        self._row_width = 0

    @property
    def room(self) -> bool:
        return self._sink.room

    def attach(self, loop: Loop, emptied: Callback) -> None:
        self._sink.attach(loop, emptied)

    def drain(self, interrupted: int) -> None:
        self._sink.drain(interrupted)

    def write(self, data: bytes) -> None:
        """Write whole lines."""
        self._paint(sanitize(data))

    def write_unfinished(self, data: bytes) -> None:
        """Write output of one script: whole lines, and states of lines that end in a carriage return."""
        lines = self._pending.feed(sanitize(data, cursor_up=True))
        if self._status is None:
            lines += self._pending.finish()
        elif not self._can_draw():
            lines += self._pending.settle()
        self._paint(lines)

    def begin(self, loop: Loop, status: Callable[[], StatusFields]) -> None:
        """Show the line from now on."""
        self._loop, self._status = loop, status
        self._tick()

    def refresh(self) -> None:
        """Show a changed state within `_BUSY_INTERVAL`."""
        if self._loop is not None and self._status is not None and not self._soon.pending:
            rest = self._row_made + _BUSY_INTERVAL - self._loop.clock()
            self._soon = self._loop.after(max(0.0, rest), self._refreshed)

    def _refreshed(self) -> None:
        self._row_made = -_IDLE_INTERVAL
        self._paint_if_idle()

    def end(self) -> None:
        """Remove the line. May be called twice, and without `begin`."""
        self._timer.cancel()
        self._soon.cancel()
        self._status = None
        left = self._pending.finish()
        if left or self._drawn:
            self._paint(left)

    def hide(self) -> None:
        """Remove the line until `unhide`, because the shell is about to take the terminal."""
        self._hidden = True
        self._paint(self._pending.settle())

    def unhide(self) -> None:
        self._hidden = False
        self._row_made = -_IDLE_INTERVAL
        self._paint(b"")

    def _tick(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.after(_IDLE_INTERVAL, self._tick)
        self._paint_if_idle()

    def _paint_if_idle(self) -> None:
        if self._sink.idle:  # otherwise updates would accumulate while a terminal is stopped (Ctrl-S)
            self._paint(b"")

    def _paint(self, lines: bytes) -> None:
        rows = self._rows()
        if not lines and not rows and not self._drawn:
            return
        below = b""
        if rows:
            reset = _RESET if b"\x1b" in lines else b""
            up = b"\x1b[%dA" % (len(rows) - 1) if len(rows) > 1 else b""
            below = reset + b"\r\n".join(rows) + b"\r" + up
        self._sink.write((_ERASE_BELOW if self._drawn else b"") + lines + below)
        self._drawn = bool(rows)

    def _can_draw(self) -> bool:
        large = all(have >= least for have, least in zip(self._size(), _SMALLEST, strict=True))
        return self._status is not None and not self._hidden and large and self._foreground()

    def _rows(self) -> list[bytes]:
        if not self._can_draw():
            return []
        columns, rows = self._size()
        unfinished = self._pending.rows(columns - 1)
        return [*unfinished[: rows - 2], self._status_row(columns - 1)]

    def _status_row(self, width: int) -> bytes:
        """Return the row, cached for a moment. A flood of output must not request the status for every
        line.
        """
        assert self._loop is not None
        assert self._status is not None
        now = self._loop.clock()
        if now - self._row_made >= _BUSY_INTERVAL or width != self._row_width:
            self._row_made, self._row_width = now, width
            text = status_row(self._status(), width).encode("utf-8", "replace")
            self._row = _REVERSE + text + _RESET if self._colour else text
        return self._row


# ---- Lines that are not final yet. A progress bar redraws itself after `\r`, and nested bars move the cursor
# up a row or two.

_MOVES = re.compile(rb"(\r|\n|\x1b\[[1-7]?A)")
_ESCAPES = re.compile(rb"\x1b\[[0-9;:]*[mK]")
_CLEARS = (b"\x1b[K", b"\x1b[0K", b"\x1b[2K")
_MOST_ROWS = 8
_MOST_BYTES = 16 * 1024  # kept of a row
_CALM_LINES = 100  # lines without a move, after which further moves are not expected
_LONGEST_BAR = 79  # in columns; a longer row is not a progress bar and is not held back
_UNBOUNDED = 1 << 30


class PendingLines:
    """The rows that a script may still change, and the position of its cursor."""

    def __init__(self) -> None:
        self._rows = [b""]
        self._at = 0  # row of the cursor
        self._at_start = True  # the cursor is in the first column
        self._reach = 0  # number of rows above the cursor that the script may still reach
        self._calm = 0  # lines since the last move

    def feed(self, data: bytes) -> bytes:
        """Take sanitized output and return the lines that are final."""
        moves = self._reach or b"\r" in data or b"\x1b" in data
        if self._rows == [b""] and not moves and data.endswith(b"\n"):
            return data
        for token in _MOVES.split(data):
            if token == b"\n":
                self._down()
            elif token == b"\r":
                self._at_start = True
                self._expect(1)  # a nested bar is drawn below this bar, and a move up follows
            elif _MOVES.fullmatch(token):
                rows = int(token[2:-1] or 1)
                self._expect(rows)
                self._at = max(0, self._at - rows)
            elif token:
                self._put(token)
        return self._finished()

    def settle(self) -> bytes:
        """Return the lines above the cursor, final or not, for a caller that cannot show them as pending."""
        done, self._rows, self._at = self._rows[: self._at], self._rows[self._at :], 0
        return b"".join(each + b"\n" for each in done)

    def finish(self) -> bytes:
        """Return all remaining rows, as lines."""
        rows, self._rows, self._at, self._at_start = self._rows, [b""], 0, True
        while rows and not visible_row(rows[-1], _UNBOUNDED).strip():
            rows.pop()
        return b"".join(each + b"\n" for each in rows)

    def rows(self, width: int) -> list[bytes]:
        """Return the pending rows as they look now, each at most `width` columns wide."""
        shown = [visible_row(each, width) for each in self._rows]
        while shown and not shown[-1].strip():
            shown.pop()
        return shown

    def _down(self) -> None:
        self._at += 1
        self._at_start = True
        if self._at == len(self._rows):
            self._rows.append(b"")
        self._calm += 1
        if self._calm > _CALM_LINES:
            self._reach = 0

    def _expect(self, rows: int) -> None:
        self._calm = 0
        self._reach = max(self._reach, rows)

    def _put(self, text: bytes) -> None:
        """Put text into the row of the cursor.

        At the start of a row, text that covers the old text replaces it. Otherwise the row keeps both, and
        the terminal overwrites one with the other.
        """
        old = self._rows[self._at]
        covers = not old.strip() or text.startswith(_CLEARS) or _width(text) >= _width(old)
        if self._at_start and covers:
            old = b""
        row = old + (b"\r" if self._at_start and old else b"") + text
        self._rows[self._at] = row[-_MOST_BYTES:]
        self._at_start = False

    def _finished(self) -> bytes:
        final = max(0, self._at - self._reach, len(self._rows) - _MOST_ROWS)
        long = [number + 1 for number, each in enumerate(self._rows) if _width(each) > _LONGEST_BAR]
        final = min(self._at, max([final, *long]))
        done, self._rows = self._rows[:final], self._rows[final:]
        self._at -= final
        return b"".join(each + b"\n" for each in done)


def _width(text: bytes) -> int:
    """Return an upper bound for the columns of the longest state of the row."""
    if b"\x1b" in text:
        text = _ESCAPES.sub(b"", text)
    return max(
        len(state) if state.isascii() else len(state.decode("utf-8", "replace"))
        for state in text.split(b"\r")
    )
