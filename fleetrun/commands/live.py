"""A picture that is drawn again and again on a terminal, which is afterwards as it was before. Knows no job.

The picture has the terminal's other screen to itself, so that nothing of it is left and nothing is lost of
what stood there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from rich.text import Text

from fleetrun.commands.output import rendered
from fleetrun.pod.signals import Signals

Draw = Callable[[int, int], Sequence[Text] | None]
"""The lines for so many columns and rows; None when there is nothing more to show."""

_ENTER = "\033[?1049h\033[?25l\033[?7l"  # the other screen, no cursor, no wrapping of long lines
_LEAVE = "\033[?7h\033[?25h\033[?1049l"
_HOME, _REST_OF_LINE, _BELOW = "\033[H", "\033[K", "\033[J"
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Screen:
    """The terminal `out` while it shows a picture. `keys` is the descriptor of what is typed, -1 for none."""

    def __init__(self, out: int, keys: int) -> None:
        self.keys = keys
        self._out = out
        self._before: list[object] | None = None

    def __enter__(self) -> Screen:
        if self.keys >= 0:
            self._before = termios.tcgetattr(self.keys)
            tty.setcbreak(self.keys)
        self._write(_ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a terminal that has gone needs nothing
            self._write(_LEAVE)
        if self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.keys, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def size(self) -> tuple[int, int]:
        """Columns and rows, at least one of each; of a terminal that does not know, 80 and 24."""
        try:
            columns, rows = os.get_terminal_size(self._out)
        except OSError:
            columns, rows = 0, 0
        return columns or 80, rows or 24

    def paint(self, lines: Sequence[Text], rows: int) -> bool:
        """In one piece, over what is there: nothing flickers. False when the terminal has gone."""
        # Erased first: behind a full line the cursor stands on its last column.
        shown = "\r\n".join(f"{_REST_OF_LINE}{line}" for line in rendered(lines[:rows], terminal=True))
        below = f"\r\n{_BELOW}" if len(lines) < rows else ""
        try:
            self._write(f"{_HOME}{shown}{below}")
        except OSError:
            return False
        return True

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(self._out, data) :]


def show(draw: Draw, interval: float, out: int, keys: int) -> int:
    """On the terminal `out`, until `draw` has nothing more, q is typed, or a signal means: end. Returns the
    signal, or 0.
    """
    signals = Signals({*_ENDINGS, signal.SIGTSTP, signal.SIGWINCH, signal.SIGCONT})
    try:
        while True:
            with Screen(out, keys) as screen:
                number = _play(screen, draw, interval, signals)
            if number != signal.SIGTSTP:
                return number
            os.kill(os.getpid(), signal.SIGSTOP)  # Ctrl-Z: with the terminal as the shell knows it
    finally:
        signals.close()


def _play(screen: Screen, draw: Draw, interval: float, signals: Signals) -> int:
    """Returns the signal that ends it, 0 for none."""
    keys = [screen.keys] if screen.keys >= 0 else []
    due = time.monotonic()
    while True:
        columns, rows = screen.size()
        lines = draw(columns, rows)
        if lines is None:
            return 0
        if not screen.paint(lines, rows):
            return signal.SIGHUP
        due = max(due + interval, time.monotonic())
        for number in _news(due, signals, keys):
            if number in (*_ENDINGS, signal.SIGTSTP):
                return number
            if number == 0:
                return 0


def _news(due: float, signals: Signals, keys: list[int]) -> Iterator[int]:
    """Signals that came, and 0 for a q; nothing when it is time for the next picture."""
    wait = max(0.0, due - time.monotonic())
    ready, _, _ = select.select([signals.fileno(), *keys], [], [], wait)
    if signals.fileno() in ready:
        yield from signals.read()
    for fd in ready:
        if fd in keys:
            typed = _typed(fd)
            if not typed:  # nobody types any more
                keys.clear()
            if set(typed) & set(b"qQ\x03\x04"):
                yield 0


def _typed(fd: int) -> bytes:
    try:
        return os.read(fd, 1024)
    except OSError:
        return b""
