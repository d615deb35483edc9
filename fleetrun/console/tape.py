r"""The unfinished end of what a script prints: progress bars that redraw themselves with `\r`, and those that
move up a row or two (nested ones). Says which lines are finished. Knows no terminal.
"""

from __future__ import annotations

import re

from fleetrun.console.tame import row

_MOVES = re.compile(rb"(\r|\n|\x1b\[[1-7]?A)")
_ESCAPES = re.compile(rb"\x1b\[[0-9;:]*[mK]")
_CLEARS = (b"\x1b[K", b"\x1b[0K", b"\x1b[2K")
_MOST_ROWS = 8
_LONGEST = 16 * 1024
_CALM = 100  # lines without a move, until none is expected any more
_BAR = 79  # columns: what is longer is no bar, and is not held back
_WIDE = 1 << 30


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
        while rows and not row(rows[-1], _WIDE).strip():
            rows.pop()
        return b"".join(each + b"\n" for each in rows)

    def rows(self, width: int) -> list[bytes]:
        """To be shown: each of at most `width` columns."""
        shown = [row(each, width) for each in self._rows]
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
