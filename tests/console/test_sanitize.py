"""Sanitized output keeps its colours and moves nothing on the screen."""

import pytest

from fleetrun.console.text import sanitize, visible_row


@pytest.mark.parametrize(
    ("printed", "left"),
    [
        (b"plain\tline\n", b"plain\tline\n"),
        ("一 ü\n".encode(), "一 ü\n".encode()),
        (b"\xff\xfe no text\n", b"\xff\xfe no text\n"),
        (b"\x1b[31;1mred\x1b[0m\n", b"\x1b[31;1mred\x1b[0m\n"),
        (b"\x1b[38:2:1:2:3mx\x1b[m\n", b"\x1b[38:2:1:2:3mx\x1b[m\n"),
        (b"50%\r\x1b[K60%\r\x1b[2K\n", b"50%\r\x1b[K60%\r\x1b[2K\n"),
        (b"\x1b[2Jcleared\x1b[H\n", b"cleared\n"),
        (b"\x1b[?1049h\x1b[?25lx\n", b"x\n"),
        (b"\x1b[5;10Hthere\x1b[1;3r\n", b"there\n"),
        (b"\x1b[>4;1mx\n", b"x\n"),
        (b"\x1b[3Kx\x1b[6n\x1b[c\n", b"x\n"),
        (b"\x1b]0;a title\x07x\n", b"x\n"),
        (b"\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\\n", b"link\n"),
        (b"\x1b]0;no end\nnext\n", b"\nnext\n"),
        (b"\x1bP1$r\x1b\\x\n", b"x\n"),
        (b"\x1b[31\nnext\n", b"\nnext\n"),
        (b"\x1b\nnext\n", b"\nnext\n"),
        (b"\x1bc\x1b(0\x1b7x\x1b8\x1bM\n", b"x\n"),
        (b"a\x0eb\x0fc\x0bd\x0ce\x07f\x00g\x7f\n", b"abcdefg\n"),
        ("a\u009b2Jb\n".encode(), b"a2Jb\n"),
        (b"\x1b\x1b[31mx\n", b"\x1b[31mx\n"),
        (b"up\x1b[A\x1b[2A\n", b"up\n"),
    ],
)
def test_what_is_left(printed, left):
    assert sanitize(printed) == left


@pytest.mark.parametrize(
    ("printed", "left"),
    [
        (b"\x1b[A", b"\x1b[A"),
        (b"\x1b[7A", b"\x1b[7A"),
        (b"\x1b[8A", b""),
        (b"\x1b[99A", b""),
        (b"\x1b[B", b""),
    ],
)
def test_a_few_rows_up_for_who_draws_them(printed, left):
    assert sanitize(printed, cursor_up=True) == left


@pytest.mark.parametrize(
    ("line", "width", "shown"),
    [
        (b"50%|#####     |", 80, b"50%|#####     |"),
        (b"50%|#####     |", 5, b"50%|#"),
        (b"10%\r20%", 80, b"20%"),
        (b"10%\r", 80, b"10%"),
        (b"\x1b[31mabc\x1b[0mdef", 4, b"\x1b[31mabc\x1b[0md\x1b[0m"),
        ("一二三".encode(), 5, "一二".encode()),
        (b"a\tb\x08c", 80, b"a    bc"),
        (b"\x1b[Kx", 80, b"x"),
        (b"\xffx", 80, "\ufffdx".encode()),
        (b"", 80, b""),
    ],
)
def test_a_row_of_an_unfinished_line(line, width, shown):
    assert visible_row(line, width) == shown
