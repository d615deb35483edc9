"""The screen of a live view: what it shows, when it is drawn, what ends it, what it leaves behind."""

import contextlib
import os
import select
import signal
import termios
import threading

import pytest
from rich.text import Text

from fleetrun.commands.live import Screen, show
from tests.support.screen import Terminal
from tests.support.waiting import eventually

LEFT = b"\x1b[?7h\x1b[?25h\x1b[?1049l"


class Pty:
    """A terminal: what is typed and shown on one side, and the program's on the other."""

    def __init__(self):
        self.master, self.slave = os.openpty()
        self.resize(20, 5)
        os.set_blocking(self.master, False)

    def resize(self, columns, rows):
        termios.tcsetwinsize(self.slave, (rows, columns))

    @property
    def settings(self):
        return termios.tcgetattr(self.slave)

    def type_in(self, text):
        os.write(self.master, text)

    def until(self, end):
        """All that was shown, up to this end."""
        said = bytearray()

        def come():
            with contextlib.suppress(BlockingIOError):
                said.extend(os.read(self.master, 1 << 16))
            return said.endswith(end)

        eventually(come)
        return bytes(said)

    def go(self):
        os.close(self.master)

    def screen(self):
        return Screen(self.slave, self.slave)

    def show(self, draw, interval, keys=None):
        return show(draw, interval, self.slave, self.slave if keys is None else keys)


@pytest.fixture
def terminal():
    made = Pty()
    yield made
    for fd in (made.master, made.slave):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_a_picture_replaces_the_one_before(terminal):
    with terminal.screen() as screen:
        assert screen.size() == (20, 5)
        assert screen.paint([Text("first and long"), Text("second"), Text("third")], 5)
        assert screen.paint([Text("new"), Text("lines")], 5)
    assert Terminal(20, 5, raw=True).feed(terminal.until(LEFT)).rows == ["new", "lines"]


def test_what_does_not_fit_is_not_drawn(terminal):
    with terminal.screen() as screen:
        screen.paint([Text(str(number)) for number in range(9)], 5)
    assert Terminal(20, 5, raw=True).feed(terminal.until(LEFT)).rows == ["0", "1", "2", "3", "4"]


def test_a_line_may_be_as_wide_as_the_screen(terminal):
    full = ["x" * 19 + "y", "z" * 20]
    with terminal.screen() as screen:
        screen.paint([Text("longer" * 3)] * 5, 5)
        screen.paint([*map(Text, full), Text(""), Text("short"), Text(full[0])], 5)
    assert Terminal(20, 5, raw=True).feed(terminal.until(LEFT)).rows == [*full, "", "short", full[0]]


def test_the_terminal_is_as_before(terminal):
    before = terminal.settings
    with contextlib.suppress(ZeroDivisionError), terminal.screen():
        assert terminal.settings != before, "what is typed does not show"
        raise ZeroDivisionError
    assert terminal.settings == before
    assert terminal.until(LEFT).startswith(b"\x1b[?1049h\x1b[?25l\x1b[?7l")


def test_a_terminal_without_a_size_has_the_usual_one(terminal):
    terminal.resize(0, 0)
    with terminal.screen() as screen:
        assert screen.size() == (80, 24)


class Pictures:
    """Draws, and does something at each picture."""

    def __init__(self, *acts):
        self._acts = list(acts)
        self.sizes = []

    def __call__(self, columns, rows):
        self.sizes.append((columns, rows))
        if not self._acts:
            return None
        self._acts.pop(0)()
        return [Text(f"picture {len(self.sizes)}")]


def nothing():
    """Wait for the next."""


def pending(terminal):
    """Whether something is typed that nobody has read."""
    return bool(select.select([terminal.slave], [], [], 0)[0])


HOUR = 3600.0


def test_it_ends_when_there_is_nothing_more_to_show(terminal):
    draw = Pictures(nothing, nothing)
    assert terminal.show(draw, 0.0) == 0
    assert len(draw.sizes) == 3


@pytest.mark.parametrize("key", [b"q", b"Q", b"\x04"])
def test_a_key_ends_it_at_once(terminal, key):
    draw = Pictures(lambda: terminal.type_in(key), nothing)
    assert terminal.show(draw, HOUR) == 0
    assert len(draw.sizes) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_and_the_terminal_is_as_before(terminal, number):
    before = terminal.settings
    handler = signal.getsignal(number)
    assert terminal.show(Pictures(lambda: os.kill(os.getpid(), number), nothing), HOUR) == number
    assert terminal.settings == before
    assert terminal.until(LEFT)
    assert signal.getsignal(number) is handler


def test_ctrl_c_is_a_signal(terminal):
    """Typed, it is the terminal that sends it, to whom it belongs; a byte of it ends the picture too."""
    assert (
        terminal.show(Pictures(lambda: os.kill(os.getpid(), signal.SIGINT), nothing), HOUR) == signal.SIGINT
    )


class Slow:
    """Draws what somebody has to wait for, as a launcher that does not answer."""

    def __init__(self, act):
        self._act = act
        self.pictures = 0
        self.waited = False
        self.released = threading.Event()

    def __call__(self, columns, rows):
        self.pictures += 1
        if self.pictures > 1:
            return None
        self._act()
        self.waited = not self.released.wait(60)
        return [Text("late")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_while_a_picture_is_waited_for(terminal, number):
    before = terminal.settings
    draw = Slow(lambda: os.kill(os.getpid(), number))
    assert terminal.show(draw, HOUR) == number
    assert not draw.waited
    draw.released.set()
    assert terminal.settings == before


def test_a_key_is_heard_while_a_picture_is_waited_for(terminal):
    draw = Slow(lambda: terminal.type_in(b"q"))
    assert terminal.show(draw, HOUR) == 0
    assert (draw.waited, draw.pictures) == (False, 1)
    draw.released.set()


def test_what_comes_meanwhile_has_another_picture_drawn_at_once(terminal):
    def type_and_be_heard():
        terminal.type_in(b"x")
        eventually(lambda: not pending(terminal))
        draw.released.set()

    draw = Slow(type_and_be_heard)
    assert terminal.show(draw, HOUR) == 0
    assert (draw.waited, draw.pictures) == (False, 2)


def test_what_goes_wrong_in_a_picture_is_told(terminal):
    before = terminal.settings
    with pytest.raises(ZeroDivisionError):
        terminal.show(lambda columns, rows: 1 // 0, HOUR)
    assert terminal.settings == before


def test_another_size_is_drawn_at_once(terminal):
    def grow():
        terminal.resize(40, 9)
        os.kill(os.getpid(), signal.SIGWINCH)

    draw = Pictures(grow)
    assert terminal.show(draw, HOUR) == 0
    assert draw.sizes == [(20, 5), (40, 9)]


def test_other_keys_change_nothing(terminal):
    """It is drawn once more, and waits for the next time."""
    draw = Pictures(lambda: terminal.type_in(b"x"), lambda: terminal.type_in(b"q"), nothing)
    assert terminal.show(draw, HOUR) == 0
    assert len(draw.sizes) == 2


def test_without_a_keyboard_it_is_drawn_all_the_same(terminal):
    before = terminal.settings
    draw = Pictures(nothing, lambda: terminal.type_in(b"q"), nothing)
    assert terminal.show(draw, 0.0, keys=-1) == 0
    assert len(draw.sizes) == 4
    assert terminal.settings == before


def test_a_terminal_that_has_gone_ends_it(terminal):
    assert terminal.show(Pictures(lambda: terminal.go(), nothing, nothing), HOUR) == signal.SIGHUP
