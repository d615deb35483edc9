"""Which lines are final and which are still pending: progress bars alone, nested, and between lines."""

import pytest

from fleetrun.console.status_line import PendingLines


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
