"""The status line below the output, as a terminal shows it."""

import random

import pytest

from fleetrun.console.status_line import PendingLines, StatusLine
from fleetrun.console.status_text import StatusFields
from fleetrun.pod.loop import Timer
from tests.support.screen import Terminal


class Clock:
    """A loop whose time is moved by hand."""

    def __init__(self):
        self.now = 0.0
        self.timers = []

    def clock(self):
        return self.now

    def after(self, seconds, handler):
        timer = Timer(handler)
        self.timers.append((self.now + seconds, timer))
        return timer

    def pass_(self, seconds):
        self.now += seconds
        due = [timer for when, timer in self.timers if when <= self.now]
        self.timers = [(when, timer) for when, timer in self.timers if when > self.now]
        for timer in due:
            timer.fire()


class Shown:
    """A status_line at a terminal of its own. As a sink it counts what is written."""

    def __init__(self, columns=80, rows=24, *, colour=False, tmux=False):
        self.terminal = Terminal(columns, rows, tmux=tmux)
        self.size = (columns, rows)
        self.ours = True
        self.idle = True
        self.writes = 0
        self.loop = Clock()
        self.step = 0
        self.status_line = StatusLine(self, lambda: self.size, lambda: self.ours, colour=colour)

    def write(self, data):
        self.writes += 1
        self.terminal.feed(data)

    def begin(self):
        self.status_line.begin(self.loop, lambda: StatusFields(elapsed=self.loop.now, step=self.step))
        return self

    def resize(self, columns, rows):
        self.size = (columns, rows)
        self.terminal.resize(columns, rows)

    @property
    def rows(self):
        return self.terminal.rows


def shown(*arguments, **options):
    return Shown(*arguments, **options).begin()


FIRST = "0:00:00 | step 0"


def test_it_stands_below_the_lines():
    made = shown()
    made.status_line.write(b"one\n")
    made.status_line.write(b"two\nthree\n")
    assert made.rows == ["one", "two", "three", FIRST]


def test_the_cursor_rests_at_its_start():
    """So that whatever a terminal does to long rows when it gets narrower, all of it is behind the cursor."""
    made = shown()
    made.status_line.write(b"one\n")
    assert made.terminal.cursor == (1, 0)
    made.status_line.write_unfinished(b"10%\r")
    assert made.rows == ["one", "10%", FIRST]
    assert made.terminal.cursor == (1, 0)


def test_it_follows_the_facts_once_a_second():
    made = shown()
    made.step = 7
    made.loop.pass_(1.0)
    assert made.rows == ["0:00:01 | step 7"]
    before = made.writes
    made.loop.pass_(0.5)
    assert made.writes == before
    made.loop.pass_(0.5)
    assert made.rows == ["0:00:02 | step 7"]


def test_news_is_shown_at_once_but_not_too_often():
    made = shown()
    for step in range(1, 5):
        made.step = step
        made.status_line.refresh()
    before = made.writes
    made.loop.pass_(0.25)
    assert made.rows == ["0:00:00 | step 4"]
    assert made.writes == before + 1
    made.status_line.refresh()
    made.status_line.end()
    made.loop.pass_(5.0)
    assert made.rows == []


def test_it_leaves_nothing_in_the_scrollback_of_tmux():
    """After `clear` the line stands in the first row."""
    made = shown(tmux=True)
    for step in range(5):
        made.step = step
        made.loop.pass_(1.0)
    made.status_line.write_unfinished(b"10%\r")
    made.status_line.write_unfinished(b"20%\r")
    assert made.terminal.text == ["20%", "0:00:05 | step 4"]
    made.resize(30, 24)
    made.loop.pass_(1.0)
    made.status_line.end()
    assert made.terminal.text == ["20%"]


@pytest.mark.slow
def test_a_flood_looks_at_the_facts_four_times_a_second():
    made = Shown()
    looks = []
    made.status_line.begin(made.loop, lambda: looks.append(1) or StatusFields())
    for _ in range(1000):
        made.loop.now += 0.001
        made.status_line.write(b"line\n")
    assert 3 <= len(looks) <= 5
    assert made.rows[-1] == "0:00:00"


def test_before_it_begins_and_after_it_ends_there_are_lines_only():
    made = Shown()
    made.status_line.write(b"before\n")
    assert made.rows == ["before"]
    made.begin()
    made.status_line.write(b"in between\n")
    made.status_line.end()
    made.status_line.end()
    made.status_line.write(b"after\n")
    made.loop.pass_(5.0)
    assert made.rows == ["before", "in between", "after"]
    assert made.loop.timers == []


def test_nothing_is_drawn_while_the_terminal_is_stopped():
    """Ctrl-S: else one status_line would pile up behind the other."""
    made = shown()
    before, made.idle = made.writes, False
    for _ in range(10):
        made.loop.pass_(1.0)
    assert made.writes == before
    made.idle = True
    made.loop.pass_(1.0)
    assert made.rows == ["0:00:11 | step 0"]


def test_hidden_while_the_shell_has_the_terminal():
    made = shown()
    made.status_line.write(b"one\n")
    made.status_line.hide()
    assert made.rows == ["one"]
    made.loop.pass_(1.0)
    made.status_line.write(b"two\n")
    assert made.rows == ["one", "two"]
    made.status_line.unhide()
    assert made.rows == ["one", "two", "0:00:01 | step 0"]


def test_what_is_held_back_for_a_bar_is_shown_before_the_shell_has_the_terminal():
    made = shown()
    made.status_line.write_unfinished(b"10%\r\nline\n")
    made.status_line.hide()
    assert made.rows == ["10%", "line"]


def test_in_the_background_lines_only():
    made = shown()
    made.ours = False
    made.loop.pass_(1.0)
    made.status_line.write(b"one\n")
    made.status_line.write_unfinished(b"two\n10%\r")
    assert made.rows == ["one", "two"]
    made.ours = True
    made.loop.pass_(1.0)
    assert made.rows[-2:] == ["10%", "0:00:02 | step 0"]


@pytest.mark.parametrize(("columns", "rows"), [(19, 24), (80, 3), (0, 0), (1, 1)])
def test_no_room_no_status_line(columns, rows):
    made = shown()
    made.size = (columns, rows)
    made.status_line.write(b"one\n")
    assert made.rows == ["one"]


def test_it_fits_a_terminal_that_changes_its_size():
    made = shown(30, 10)
    made.step = 10**18
    made.loop.pass_(1.0)
    assert made.rows == ["0:00:01"], "the step does not fit"
    made.resize(80, 10)
    made.loop.pass_(1.0)
    assert made.rows == ["0:00:02 | step 1,000,000,000,000,000,000"]
    made.resize(20, 5)
    made.status_line.write(b"line\n")
    assert made.rows == ["line", "0:00:02"]


def test_colours_do_not_run_into_it():
    made = shown(colour=True)
    made.status_line.write_unfinished(b"\x1b[31mred\n")
    assert made.rows == ["red", FIRST]
    assert made.terminal.look(0) == ("red", False)
    assert made.terminal.look(1) == ("default", True)


def test_no_colours_unless_asked():
    made = shown()
    assert made.terminal.look(0) == ("default", False)


def test_a_bar_moves_in_its_place_and_stays_when_it_is_full():
    made = shown()
    made.status_line.write_unfinished(b"\r 10%|#         |\r")
    made.status_line.write(b"LAUNCH INFO news\n")
    made.status_line.write_unfinished(b" 50%|#####     |\r")
    assert made.rows == ["LAUNCH INFO news", " 50%|#####     |", FIRST]
    made.status_line.write_unfinished(b"100%|##########|\nnext\n")
    made.status_line.end()
    assert made.rows == ["LAUNCH INFO news", "100%|##########|", "next"]


def test_a_bar_that_was_never_finished_is_a_line_at_the_end():
    made = shown()
    made.status_line.write_unfinished(b"done\n 50%|#####     |\r")
    made.status_line.end()
    made.status_line.write(b"LAUNCH ERROR news\n")
    assert made.rows == ["done", " 50%|#####     |", "LAUNCH ERROR news"]


def test_bars_never_take_the_whole_screen():
    made = shown(80, 5)
    made.status_line.write_unfinished(b"\r".join(b"bar %d\n" % number for number in range(7)) + b"\x1b[7A\r")
    for _ in range(3):
        made.loop.pass_(1.0)
    assert made.rows[-1].startswith("0:00:03")
    text = made.terminal.text
    assert len(text) == len(set(text)), "nothing is there twice"


EVIL = (
    b"\x1b[2J", b"\x1b[H", b"\x1b[1;3r", b"\x1b[?1049h", b"\x1bc", b"\x1b[?7l", b"\x1b]0;x", b"\x1b[",
    b"\x1bP1", b"\x0e", b"\x1b(0", b"\x1b[99A", b"\xc2\x9b2J", b"\x1b[?6h", b"\x1bM", b"\x0b\x0c", b"\x1b[4h",
    b"\x1b7\x1b8", b"\x1b[5L", b"\x1b[3M", b"\x1b[9S", b"\x1b[3T", b"\x1b[5;5H", b"\x1b[20l",
)  # fmt: skip


@pytest.mark.parametrize("take", [StatusLine.write, StatusLine.write_unfinished])
def test_what_would_break_the_screen_does_not(take):
    made = shown()
    for number, evil in enumerate(EVIL):
        take(made.status_line, b"%d <%s\n" % (number, evil))
    made.loop.pass_(1.0)
    assert made.rows[-1] == "0:00:01 | step 0"
    made.status_line.end()
    text = made.terminal.text
    assert [line.partition(" <")[0] for line in text] == [str(number) for number in range(len(EVIL))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_what_is_left_equals_a_run_without_a_status_line(seed):
    """Lines of any length, colours and wide characters, at any moment, in any pieces."""
    chance = random.Random(seed)
    columns, rows = chance.choice([(80, 24), (40, 10), (200, 50), (21, 5)])
    made, plain = shown(columns, rows), Terminal(columns, rows)
    words = ["word", "\x1b[32mgreen\x1b[0m", "一二三", "", "x" * 90, "\t|", "é"]
    for _ in range(chance.randrange(50, 200)):
        some = [" ".join(chance.choices(words, k=chance.randrange(6))) for _ in range(chance.randrange(4))]
        lines = "".join(f"{line}\n" for line in some)
        if lines:
            chance.choice([made.status_line.write, made.status_line.write_unfinished])(lines.encode())
            plain.feed(lines.encode())
        made.loop.pass_(chance.choice([0.0, 0.1, 1.0]))
        if chance.random() < 0.05:
            made.status_line.hide()
            made.status_line.unhide()
    made.status_line.end()
    assert made.terminal.text == plain.text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_whatever_a_script_prints_there_is_one_status_line_and_none_of_it_stays(seed):
    chance = random.Random(seed)
    made = Shown(chance.choice([30, 80]), chance.choice([4, 10, 24]))
    made.status_line.begin(made.loop, lambda: StatusFields(state="FOOT"))
    words = [
        b"\r", b"\r", b"\n", b"bar 50% |##  |", b"\x1b[A", b"\x1b[3A", b"\x1b[K", b"x" * 100, b"\x1b[31m",
        b"\t", b"\x08", b" ", b"\x1b[2J", b"\x1b]0;", b"\xff",
    ]  # fmt: skip
    for _ in range(150):
        made.status_line.write_unfinished(
            b"".join(chance.choices(words, k=chance.randrange(1, 6))) + chance.choice([b"\r", b"\n"])
        )
        if chance.random() < 0.2:
            made.status_line.write(b"LAUNCH INFO news\n")
        if chance.random() < 0.1:
            made.resize(chance.choice([25, 40, 80]), made.size[1])
        made.loop.pass_(chance.choice([0.0, 1.0]))
        assert [number for number, row in enumerate(made.rows) if "FOOT" in row] == [len(made.rows) - 1]
        assert sum("FOOT" in row for row in made.terminal.text) == 1
    made.status_line.end()
    assert "FOOT" not in "".join(made.terminal.text)
    assert made.terminal.text.count("LAUNCH INFO news") >= 10


# ---- Which lines are final and which are still pending: progress bars alone, nested, and between lines.


def fed(*pieces):
    """All lines that were finished, and the rows that are pending below them."""
    pending = PendingLines()
    lines = b"".join(pending.feed(piece) for piece in pieces)
    return lines, pending.rows(80), pending


@pytest.mark.parametrize(
    ("pieces", "lines", "rows"),
    [
        ([b"a\nb\n"], b"a\nb\n", []),
        ([b"\x1b[31ma\n"], b"\x1b[31ma\n", []),
        ([b"10%\r"], b"", [b"10%"]),
        ([b"10%\r", b"20%\r", b"30%\r"], b"", [b"30%"]),
        ([b"\r", b"10%\r", b"20%\r"], b"", [b"20%"]),
        ([b"before\n10%\r"], b"", [b"before", b"10%"]),
        ([b"one\ntwo\n10%\r"], b"one\n", [b"two", b"10%"]),
        ([b"bar\r", b"   \r"], b"", []),
        ([b"a long state\r", b"short\r"], b"", [b"short"]),
        ([b"a long state\r", b"\x1b[Kshort\r"], b"", [b"short"]),
    ],
)
def test_final_and_pending_rows(pieces, lines, rows):
    assert fed(*pieces)[:2] == (lines, rows)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"10%\r", b"20%\n"], b"20%\n"),
        ([b"10%\r", b"20%\r"], b"20%\n"),
        ([b"10%\r\n", b"done\n"], b"10%\ndone\n"),
        ([b"dos\r\nlines\r\n"], b"dos\nlines\n"),
        ([b"long state\r", b"short\n"], b"long state\rshort\n"),
        ([b"bar\r", b"   \r", b"after\n"], b"after\n"),
        ([b"a\n\n\nb\r\n"], b"a\n\n\nb\n"),
        ([b"text\r", b"\n"], b"text\n"),
    ],
)
def test_what_is_left_at_the_end(pieces, text):
    lines, _, pending = fed(*pieces)
    assert lines + pending.finish() == text
    assert pending.rows(80) == []
    assert pending.finish() == b""


def inner(percent):
    return b"\n\rinner %3d%%\x1b[A" % percent


def test_a_nested_bar_is_drawn_in_its_place():
    """As tqdm draws it: below, and a row up again. Pieces end where the follower ends them, after `\\r`."""
    whole = b"\router 0/3"
    for epoch in range(1, 4):
        whole += b"".join(map(inner, range(0, 101, 10))) + b"\n\r          \r\x1b[A\router %d/3" % epoch
    whole += b"\ndone\n"
    pieces = [piece + b"\r" for piece in whole.split(b"\r")[:-1]] + [whole.rpartition(b"\r")[2]]
    pending, lines, seen = PendingLines(), b"", set()
    for piece in pieces:
        lines += pending.feed(piece)
        seen.add(tuple(pending.rows(80)))
    assert (b"outer 1/3", b"inner  50%") in seen
    assert max(map(len, seen)) == 2
    assert lines + pending.finish() == b"outer 3/3\ndone\n"


def test_lines_after_bars_go_out_at_once_again():
    lines, rows, pending = fed(b"10%\r\n", *[b"line\n"] * 200)
    assert lines.count(b"line\n") == 200
    assert rows == []
    assert pending.feed(b"more\n") == b"more\n"


def test_a_long_line_is_not_held_back():
    assert fed(b"10%\r", b"\n" + b"x" * 80 + b"\n20%\r")[0].endswith(b"x" * 80 + b"\n")


def test_few_rows_are_pending():
    assert len(fed(b"\r".join(b"%d\n" % number for number in range(50)) + b"\x1b[7A\r")[1]) <= 8


@pytest.mark.parametrize("wild", [b"\x1b[7A" * 50, b"\n\x1b[3A" * 50, b"\x1b[A\n\n\x1b[2A\r" * 50])
def test_moves_that_make_no_sense_lose_no_line_that_follows(wild):
    lines, _, pending = fed(wild, b"\n" * 8, b"after\n")
    assert (lines + pending.finish()).endswith(b"after\n")


def test_a_bar_that_only_grows_is_bounded():
    pending = PendingLines()
    for _ in range(100):
        assert pending.feed(b"x" * 10_000) == b""
    assert len(pending.finish()) <= 16 * 1024 + 1


@pytest.mark.slow
def test_a_bar_that_shrinks_a_little_each_time_is_bounded():
    pending = PendingLines()
    for size in range(5000, 0, -1):
        pending.feed(b"x" * size + b"\r")
    assert len(pending.finish()) <= 16 * 1024 + 1
