"""Which lines are finished, and what is still drawn: progress bars alone, nested, and between lines."""

import pytest

from fleetrun.console.status_line import Tape


def fed(*pieces):
    """All lines that were finished, and the rows that stand below them."""
    tape = Tape()
    lines = b"".join(tape.feed(piece) for piece in pieces)
    return lines, tape.rows(80), tape


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
def test_what_is_finished_and_what_stands(pieces, lines, rows):
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
    lines, _, tape = fed(*pieces)
    assert lines + tape.finish() == text
    assert tape.rows(80) == []
    assert tape.finish() == b""


def inner(percent):
    return b"\n\rinner %3d%%\x1b[A" % percent


def test_a_nested_bar_is_drawn_in_its_place():
    """As tqdm draws it: below, and a row up again. Pieces end where the follower ends them, after `\\r`."""
    whole = b"\router 0/3"
    for epoch in range(1, 4):
        whole += b"".join(map(inner, range(0, 101, 10))) + b"\n\r          \r\x1b[A\router %d/3" % epoch
    whole += b"\ndone\n"
    pieces = [piece + b"\r" for piece in whole.split(b"\r")[:-1]] + [whole.rpartition(b"\r")[2]]
    tape, lines, seen = Tape(), b"", set()
    for piece in pieces:
        lines += tape.feed(piece)
        seen.add(tuple(tape.rows(80)))
    assert (b"outer 1/3", b"inner  50%") in seen
    assert max(map(len, seen)) == 2
    assert lines + tape.finish() == b"outer 3/3\ndone\n"


def test_lines_after_bars_go_out_at_once_again():
    lines, rows, tape = fed(b"10%\r\n", *[b"line\n"] * 200)
    assert lines.count(b"line\n") == 200
    assert rows == []
    assert tape.feed(b"more\n") == b"more\n"


def test_a_long_line_is_not_held_back():
    assert fed(b"10%\r", b"\n" + b"x" * 80 + b"\n20%\r")[0].endswith(b"x" * 80 + b"\n")


def test_the_rows_that_stand_are_few():
    assert len(fed(b"\r".join(b"%d\n" % number for number in range(50)) + b"\x1b[7A\r")[1]) <= 8


@pytest.mark.parametrize("wild", [b"\x1b[7A" * 50, b"\n\x1b[3A" * 50, b"\x1b[A\n\n\x1b[2A\r" * 50])
def test_moves_that_make_no_sense_lose_no_line_that_follows(wild):
    lines, _, tape = fed(wild, b"\n" * 8, b"after\n")
    assert (lines + tape.finish()).endswith(b"after\n")


def test_a_bar_that_only_grows_is_bounded():
    tape = Tape()
    for _ in range(100):
        assert tape.feed(b"x" * 10_000) == b""
    assert len(tape.finish()) <= 16 * 1024 + 1


@pytest.mark.slow
def test_a_bar_that_shrinks_a_little_each_time_is_bounded():
    tape = Tape()
    for size in range(5000, 0, -1):
        tape.feed(b"x" * size + b"\r")
    assert len(tape.finish()) <= 16 * 1024 + 1
