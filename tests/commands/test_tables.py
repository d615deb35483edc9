"""Columns that fit, and numbers that are short."""

import pytest
from rich.text import Text

from fleetrun.commands.output import Cell, Column, filled, percent, size, table

COLUMNS = (
    Column("NAME"),
    Column("PID", 2, right=True),
    Column("STEP", 5, right=True),
    Column("LAST LINE", 1, rest=True),
)


def lines(rows, width=None):
    cells = [[Cell(each) for each in row] for row in rows]
    return [line.plain for line in table(COLUMNS, cells, width)]


ROWS = [("trainer.0", "7", "12", "x" * 50), ("ps.0", "4711", "", "short")]


def test_as_wide_as_it_takes():
    assert lines(ROWS) == [
        "NAME        PID  STEP  LAST LINE",
        "trainer.0     7    12  " + "x" * 50,
        "ps.0       4711        short",
    ]


@pytest.mark.parametrize(
    ("width", "title"),
    [
        (80, "NAME        PID  STEP  LAST LINE"),
        (47, "NAME        PID  STEP  LAST LINE"),
        (46, "NAME        PID  STEP"),
        (21, "NAME        PID  STEP"),
        (20, "NAME       STEP"),
        (14, "NAME"),
        (5, "NAME"),
    ],
)
def test_columns_go_when_there_is_no_room(width, title):
    shown = lines(ROWS, width)
    assert shown[0] == title
    assert all(len(line) <= width for line in shown)


def test_a_column_of_which_nothing_is_known_does_not_show():
    assert lines([("ps.0", "1", "", "")])[0] == "NAME  PID"


def test_what_is_cut_says_so():
    assert lines(ROWS, 50)[1].endswith("x…")
    assert lines([("a-very-long-name", "", "", "")], 10)[1] == "a-very-lo…"


def test_names_do_nothing_to_a_terminal_and_wide_ones_fit():
    shown = lines([("\x1b[2Ja\nb", "1", "", ""), ("训练", "22", "", "")])
    assert shown[1:] == ["a\\nb    1", "训练   22"]


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (None, ""),
        (0, "0B"),
        (999, "999B"),
        (1023, "1K"),
        (1 << 20, "1.0M"),
        (15 << 20, "15M"),
        (int(9.96 * 2**30), "10G"),
        (1000 << 20, "1.0G"),
        (5000 << 40, "5000T"),
    ],
)
def test_sizes(count, said):
    assert size(count) == said


def test_percent():
    assert (percent(None), percent(99.6)) == ("", "100%")


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, ["one, two, three"]),
        (16, ["one, two, three"]),
        (15, ["one, two,", "three"]),
        (10, ["one, two,", "three"]),
        (4, ["one,", "two,", "thr…"]),
    ],
)
def test_parts_fill_lines(width, lines):
    assert [line.plain for line in filled([Text("one"), Text("two"), Text("three")], width)] == lines
