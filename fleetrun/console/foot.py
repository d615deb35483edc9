"""The foot of a terminal: a row that says how the job stands, below lines that scroll. Draws it itself: every
write takes it away, adds lines and puts it back. Leaves to others what the row says.

The cursor rests at the start of the foot, and from there to the end of the screen everything is ours. So
nothing has to be known of how a terminal breaks rows when its size changes, and nothing be restored when this
process is killed. No mode of the terminal is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from fleetrun.console.facts import Facts
from fleetrun.console.footer import footer
from fleetrun.console.sink import Sink
from fleetrun.console.tame import tame
from fleetrun.console.tape import Tape
from fleetrun.pod.loop import Loop, Timer

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
