"""A terminal that can be asked what it shows."""

import pyte


class Terminal:
    """Like xterm: lines break at the edge, and what scrolls away is kept."""

    def __init__(self, columns=80, rows=24, *, raw=False, tmux=False):
        """`raw`: a newline is followed by a carriage return already, as behind a pty. `tmux`: a screen
        that is erased as a whole scrolls away.
        """
        screen = _Tmux if tmux else pyte.HistoryScreen
        self._screen = screen(columns, rows, history=100_000, ratio=0.5)
        if not raw:
            self._screen.set_mode(pyte.modes.LNM)
        self._stream = pyte.ByteStream(self._screen)

    def feed(self, data):
        self._stream.feed(data)
        return self

    def resize(self, columns, rows):
        self._screen.resize(rows, columns)

    @property
    def rows(self):
        """What is on the screen, down to the last row that has text."""
        return _stripped([line.rstrip() for line in self._screen.display])

    @property
    def text(self):
        """With all that has scrolled away."""
        width = self._screen.columns
        above = ["".join(line[x].data for x in range(width)).rstrip() for line in self._screen.history.top]
        return _stripped([*above, *(line.rstrip() for line in self._screen.display)])

    @property
    def cursor(self):
        """Row and column, from 0."""
        return self._screen.cursor.y, self._screen.cursor.x

    def look(self, row):
        """The colour of a row's first character, and whether it is in reverse video."""
        first = self._screen.buffer[row][0]
        return first.fg, first.reverse


class _Tmux(pyte.HistoryScreen):
    def erase_in_display(self, how=0, *arguments, **options):
        if how == 0 and (self.cursor.x, self.cursor.y) == (0, 0):
            used = len(_stripped([line.rstrip() for line in self.display]))
            for y in range(used):
                self.history.top.append(self.buffer[y])
                del self.buffer[y]
        super().erase_in_display(how, *arguments, **options)


def _stripped(rows):
    while rows and not rows[-1]:
        rows.pop()
    return rows
