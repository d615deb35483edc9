"""The live display: output that scrolls, and a status line below it.

`LiveConsole` is the console and `Foot` draws the line. `Tape` holds back the lines of progress bars that may
still change, and `tame` removes the control sequences that would disturb the line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial

from fleetrun.console.console import Console, Sink, terminal_columns
from fleetrun.console.status_text import Facts, cut, footer
from fleetrun.console.text import columns, wrapped
from fleetrun.pod.loop import Loop, Timer

# ---- What a script prints, without what a terminal would do of it: above a footer text may have colours and
# move within its row, and no more. Knows no terminal.

_SUSPECT = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")
_SEQUENCE = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]?"  # CSI: colours, moves, modes; cut off by the end of the line too
    rb"|\x1b[\]PX^_][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?"  # titles, links, and whatever else has a text
    rb"|\x1b[ -/]*[0-~]?"
    rb"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
    rb"|\xc2[\x80-\x9f]"  # the same by one character, in UTF-8
)
_KEPT = re.compile(rb"\x1b\[(?:[0-9;:]*m|[012]?K)")  # colours; erasing within the row
_UP = re.compile(rb"\x1b\[[1-7]?A")


def tame(data: bytes, *, up: bool = False) -> bytes:
    """Lines without everything but colours, and erasing within a row. With `up` moves to a row above stay
    too, a few: they are for whoever draws those rows.
    """
    if not _SUSPECT.search(data):
        return data

    def kept(found: re.Match[bytes]) -> bytes:
        sequence = found.group()
        return sequence if _KEPT.fullmatch(sequence) or (up and _UP.fullmatch(sequence)) else b""

    return _SEQUENCE.sub(kept, data)


_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_NO_TEXT = re.compile(r"\x1b\[[012]?K|[\x00-\x1f\x7f]")


def visible_row(data: bytes, width: int) -> bytes:
    """What one row of a terminal shows of an unfinished line of tame text: so many columns at most."""
    text = data.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace").replace("\t", "    ")
    made, left = "", width
    for number, piece in enumerate(_COLOUR.split(text)):
        if number % 2 == 0:
            piece = cut(_NO_TEXT.sub("", piece), left)
            left -= columns(piece)
        made += piece
    return (f"{made}\x1b[0m" if "\x1b" in made else made).encode()


# ---- The unfinished end of what a script prints: progress bars that redraw themselves with `\r`, and those
# that move up a row or two (nested ones). Says which lines are finished. Knows no terminal.

_MOVES = re.compile(rb"(\r|\n|\x1b\[[1-7]?A)")
_ESCAPES = re.compile(rb"\x1b\[[0-9;:]*[mK]")
_CLEARS = (b"\x1b[K", b"\x1b[0K", b"\x1b[2K")
_MOST_ROWS = 8
_LONGEST = 16 * 1024
_CALM = 100  # lines without a move, until none is expected any more
_BAR = 79  # columns: what is longer is no bar, and is not held back
_UNBOUNDED = 1 << 30


class Tape:
    """Rows that may still change, the cursor in one of them."""

    def __init__(self) -> None:
        self._rows = [b""]
        self._at = 0
        self._home = True
        self._reach = 0  # to so many rows above its own may the script go back
        self._calm = 0

    def feed(self, data: bytes) -> bytes:
        """Take tame output; returns lines that will not change any more."""
        moves = self._reach or b"\r" in data or b"\x1b" in data
        if self._rows == [b""] and not moves and data.endswith(b"\n"):
            return data
        for token in _MOVES.split(data):
            if token == b"\n":
                self._down()
            elif token == b"\r":
                self._home = True
                self._expect(1)  # the bar of an inner loop is drawn below, and then a move up comes
            elif _MOVES.fullmatch(token):
                self._up(int(token[2:-1] or 1))
            elif token:
                self._put(token)
        return self._finished()

    def settle(self) -> bytes:
        """The lines above the cursor: nobody sees what is held back of them."""
        done, self._rows, self._at = self._rows[: self._at], self._rows[self._at :], 0
        return b"".join(each + b"\n" for each in done)

    def finish(self) -> bytes:
        """All that is left, as lines."""
        rows, self._rows, self._at, self._home = self._rows, [b""], 0, True
        while rows and not visible_row(rows[-1], _UNBOUNDED).strip():
            rows.pop()
        return b"".join(each + b"\n" for each in rows)

    def rows(self, width: int) -> list[bytes]:
        """To be shown: each of at most `width` columns."""
        shown = [visible_row(each, width) for each in self._rows]
        while shown and not shown[-1].strip():
            shown.pop()
        return shown

    def _down(self) -> None:
        self._at += 1
        self._home = True
        if self._at == len(self._rows):
            self._rows.append(b"")
        self._calm += 1
        if self._calm > _CALM:
            self._reach = 0

    def _up(self, rows: int) -> None:
        self._expect(rows)
        self._at = max(0, self._at - rows)

    def _expect(self, rows: int) -> None:
        self._calm = 0
        self._reach = max(self._reach, rows)

    def _put(self, text: bytes) -> None:
        """At the start of the row what is as long as before replaces it; the terminal does the rest."""
        old = self._rows[self._at]
        hides = not old.strip() or text.startswith(_CLEARS) or _width(text) >= _width(old)
        if self._home and hides:
            old = b""
        made = old + (b"\r" if self._home and old else b"") + text
        self._rows[self._at] = made[-_LONGEST:]
        self._home = False

    def _finished(self) -> bytes:
        held = max(0, self._at - self._reach, len(self._rows) - _MOST_ROWS)
        long = [number + 1 for number, each in enumerate(self._rows) if _width(each) > _BAR]
        held = min(self._at, max([held, *long]))
        done, self._rows = self._rows[:held], self._rows[held:]
        self._at -= held
        return b"".join(each + b"\n" for each in done)


def _width(text: bytes) -> int:
    """At least as many columns as its longest state takes."""
    if b"\x1b" in text:
        text = _ESCAPES.sub(b"", text)
    return max(len(state) if state.isascii() else len(state.decode("utf-8", "replace"))
               for state in text.split(b"\r"))  # fmt: skip


# ---- The foot of a terminal: a row that says how the job stands, below lines that scroll. Draws it itself:
# every write takes it away, adds lines and puts it back. Leaves to others what the row says.
#
# The cursor rests at the start of the foot, and from there to the end of the screen everything is ours. So
# nothing has to be known of how a terminal breaks rows when its size changes, and nothing be restored when
# this process is killed. No mode of the terminal is changed.

_CLEAR = b"\r\x1b[J"
_PACE = 1.0  # seconds from one look at the facts to the next, while nothing is printed
_FRESH = 0.25  # the same in a flood
_SMALLEST = (20, 4)
_REVERSE, _RESET = b"\x1b[7m", b"\x1b[0m"

Size = Callable[[], tuple[int, int]]


class Foot:
    """An output like a `Sink`. `size` gives columns and rows, `ours` whether the terminal is in our hands: in
    the background the shell has it, and only lines go out.
    """

    def __init__(self, sink: Sink, size: Size, ours: Callable[[], bool], *, colour: bool) -> None:
        self._sink = sink
        self._size = size
        self._ours = ours
        self._colour = colour
        self._loop: Loop | None = None
        self._facts: Callable[[], Facts] | None = None
        self._timer: Timer | None = None
        self._tape = Tape()
        self._drawn = False
        self._hidden = False
        self._said = b""
        self._looked = -_PACE
        self._width = 0

    @property
    def room(self) -> bool:
        return self._sink.room

    def attach(self, loop: Loop, emptied: Callable[[], None]) -> None:
        self._sink.attach(loop, emptied)

    def drain(self, interrupted: int | None = None) -> None:
        self._sink.drain(interrupted)

    def write(self, data: bytes) -> None:
        """Whole lines."""
        self._paint(tame(data))

    def move(self, data: bytes) -> None:
        """The output of one script: whole lines, and states of lines that end in a carriage return."""
        lines = self._tape.feed(tame(data, up=True))
        if self._facts is None:
            lines += self._tape.finish()
        elif not self._fits():
            lines += self._tape.settle()
        self._paint(lines)

    def begin(self, loop: Loop, facts: Callable[[], Facts]) -> None:
        """The foot is there from now on, and stands for what `facts` says."""
        self._loop, self._facts = loop, facts
        self._tick()

    def end(self) -> None:
        """And now no more. May be called twice, and without `begin`."""
        if self._timer is not None:
            self._timer.cancel()
        self._facts = self._timer = None
        left = self._tape.finish()
        if left or self._drawn:
            self._paint(left)

    def hide(self) -> None:
        """Until `unhide`: the shell is about to have the terminal."""
        self._hidden = True
        self._paint(self._tape.settle())

    def unhide(self) -> None:
        self._hidden = False
        self._looked = -_PACE
        self._paint(b"")

    def _tick(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.after(_PACE, self._tick)
        if self._sink.idle:  # else one would pile up behind the other, at a terminal that was stopped
            self._paint(b"")

    def _paint(self, lines: bytes) -> None:
        rows = self._rows()
        if not lines and not rows and not self._drawn:
            return
        foot = b""
        if rows:
            colours = _RESET if b"\x1b" in lines else b""
            up = b"\x1b[%dA" % (len(rows) - 1) if len(rows) > 1 else b""
            foot = colours + b"\r\n".join(rows) + b"\r" + up
        self._sink.write((_CLEAR if self._drawn else b"") + lines + foot)
        self._drawn = bool(rows)

    def _fits(self) -> bool:
        """Whether there is a place to draw at."""
        large = all(have >= least for have, least in zip(self._size(), _SMALLEST, strict=True))
        return self._facts is not None and not self._hidden and large and self._ours()

    def _rows(self) -> list[bytes]:
        if not self._fits():
            return []
        columns, rows = self._size()
        unfinished = self._tape.rows(columns - 1)
        return [*unfinished[: rows - 2], self._row(columns - 1)]

    def _row(self, width: int) -> bytes:
        """The foot itself. Looks at the facts now and then only."""
        assert self._loop is not None
        assert self._facts is not None
        now = self._loop.clock()
        if now - self._looked >= _FRESH or width != self._width:
            self._looked, self._width = now, width
            text = footer(self._facts(), width).encode("utf-8", "replace")
            self._said = _REVERSE + text + _RESET if self._colour else text
        return self._said


def terminal_size(fd: int) -> tuple[int, int]:
    """Columns and rows. A terminal that does not know its size is an old one; one that is gone has none."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return 0, 0
    return columns or 80, rows or 24


def in_foreground(fd: int) -> bool:
    """Whether the command that the person typed, which is the guard, has the terminal."""
    try:
        return os.tcgetpgrp(fd) == os.getpgid(os.getppid())
    except OSError:  # it is not the terminal of this session
        return False


# ---- The console of a terminal that somebody looks at: lines, and a foot below them.

_FALLBACK_COLUMNS = 100


class LiveConsole(Console):
    stands = True

    def __init__(self, foot: Foot, level: str, *, colour: bool) -> None:
        super().__init__(foot, foot, level, colour=colour)
        self._foot = foot

    def drain(self, interrupted: int) -> None:
        self._foot.end()
        super().drain(interrupted)

    def begin(self, loop: Loop, facts: Callable[[], Facts]) -> None:
        self._foot.begin(loop, facts)

    def end(self) -> None:
        self._foot.end()

    def pause(self) -> None:
        self._foot.hide()

    def resume(self) -> None:
        self._foot.unhide()

    def follower(
        self, name: str, width: int, number: int, *, alone: bool
    ) -> tuple[Callable[[bytes], None], bool]:
        return (self._foot.move, True) if alone else super().follower(name, width, number, alone=alone)

    def _fitted(self, line: str) -> list[str]:
        """The terminal may have another width by now."""
        return wrapped(line, terminal_columns() or _FALLBACK_COLUMNS)


def live_console(sink: Sink, level: str, *, colour: bool) -> LiveConsole:
    """`sink` is stdout, which is stderr too, and a terminal."""
    foot = Foot(sink, partial(terminal_size, 1), partial(in_foreground, 1), colour=colour)
    return LiveConsole(foot, level, colour=colour)
