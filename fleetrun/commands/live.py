"""A full-screen display that is redrawn until the user quits, and leaves the terminal as it was before.

It uses the alternate screen of the terminal, so that what was on the screen before comes back.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from rich.text import Text

from fleetrun.commands.output import rendered
from fleetrun.pod.guard import Signals

Draw = Callable[[int, int], Sequence[Text] | None]
"""The lines for so many columns and rows; None if there is nothing more to show."""

_ENTER = "\033[?1049h\033[?25l\033[?7l"  # alternate screen, no cursor, no wrapping of long lines
_LEAVE = "\033[?7h\033[?25h\033[?1049l"
_HOME, _REST_OF_LINE, _BELOW = "\033[H", "\033[K", "\033[J"
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_QUIT, _OTHER_KEY = 0, -1
_DRAW_POLL = 0.05  # seconds of waiting for `draw` between two looks at keys and signals


class Screen:
    """The terminal `out` while it is in use. `keys` is the descriptor of the keyboard, -1 for none."""

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
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._write(_LEAVE)
        if self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.keys, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def size(self) -> tuple[int, int]:
        """Columns and rows, 80 and 24 if the terminal does not report them."""
        try:
            columns, rows = os.get_terminal_size(self._out)
        except OSError:
            columns, rows = 0, 0
        return columns or 80, rows or 24

    def paint(self, lines: Sequence[Text], rows: int) -> bool:
        """Overwrites the screen in one write, so that nothing flickers. False if the terminal is gone."""
        # Erase before writing: after a full line the cursor is still on its last column.
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
    """Show on the terminal `out` until `draw` returns None, q is typed, or a signal ends it. Returns the
    signal, or 0.
    """
    signals = Signals({*_ENDINGS, signal.SIGTSTP, signal.SIGWINCH, signal.SIGCONT})
    drawer = ThreadPoolExecutor(1)  # one drawing at a time, also if one was abandoned
    try:
        while True:
            with Screen(out, keys) as screen:
                number = _run(screen, lambda *size: drawer.submit(draw, *size), interval, signals)
            if number != signal.SIGTSTP:
                return number
            os.kill(os.getpid(), signal.SIGSTOP)  # Ctrl-Z: only after the terminal is restored
    finally:
        drawer.shutdown(wait=False, cancel_futures=True)
        signals.close()


def _run(
    screen: Screen, begin: Callable[[int, int], Future[Sequence[Text] | None]], interval: float,
    signals: Signals,
) -> int:  # fmt: skip
    """Returns the signal that ended it, or 0."""
    keys = [screen.keys] if screen.keys >= 0 else []
    due = time.monotonic()
    while True:
        columns, rows = screen.size()
        drawing = begin(columns, rows)
        came: list[int] = []
        while not wait([drawing], _DRAW_POLL).done:  # a launcher may take seconds to answer
            came += _input(0.0, signals, keys)
            if (end := _ending(came)) is not None:
                return end
        lines = drawing.result()
        if lines is None:
            return 0
        if not screen.paint(lines, rows):
            return signal.SIGHUP
        due = max(due + interval, time.monotonic())
        if not came and (end := _ending(_input(due, signals, keys))) is not None:
            return end


def _ending(came: Iterable[int]) -> int | None:
    """The first signal or key that ends the display."""
    return next((each for each in came if each in (*_ENDINGS, signal.SIGTSTP, _QUIT)), None)


def _input(due: float, signals: Signals, keys: list[int]) -> Iterator[int]:
    """Numbers of signals and codes of keys that arrive until `due`."""
    wait = max(0.0, due - time.monotonic())
    ready, _, _ = select.select([signals.fileno(), *keys], [], [], wait)
    if signals.fileno() in ready:
        yield from signals.read()
    for fd in ready:
        if fd in keys:
            typed = _typed(fd)
            if not typed:  # end of input
                keys.clear()
            yield _QUIT if set(typed) & set(b"qQ\x03\x04") else _OTHER_KEY


def _typed(fd: int) -> bytes:
    try:
        return os.read(fd, 1024)
    except OSError:
        return b""
