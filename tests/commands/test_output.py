"""Lines and JSON on the standard output."""

import io
import json
import sys

import pytest
from rich.text import Text

from fleetrun.commands.output import (
    Column,
    filled,
    output_width,
    percent,
    print_json,
    print_lines,
    rendered,
    size,
    table,
    write,
)
from fleetrun.errors import LaunchError

RED = Text.assemble(("bad", "red"), " line")


def test_a_pipe_gets_no_colour(capsys):
    print_lines([RED, Text("x" * 500)])
    assert capsys.readouterr().out == "bad line\n" + "x" * 500 + "\n"
    assert output_width() is None


@pytest.mark.parametrize(
    ("environ", "coloured"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_a_terminal_gets_the_colours_that_it_has(monkeypatch, environ, coloured):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (line,) = rendered([RED], terminal=True)
    assert ("\x1b[31m" in line) is coloured


def test_a_long_line_stays_one(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert rendered([Text("word " * 50)], terminal=False) == ["word " * 50]


def test_json_is_one_strict_line(capsys):
    print_json({"loss": float("nan"), "name": "naïve\n\ud800"})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out, parse_constant=pytest.fail)["loss"] == "nan"


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("shown", [lambda: print_lines([RED]), lambda: print_json(1), lambda: write("x")])
def test_a_full_disk_is_told_and_a_closed_stream_is_not(monkeypatch, shown):
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(LaunchError, match="No space left"):
        shown()
    monkeypatch.setattr(sys, "stdout", Broken())
    with pytest.raises(BrokenPipeError):
        shown()
    monkeypatch.setattr(sys, "stdout", None)
    shown()


def test_what_the_stream_cannot_encode_is_escaped(monkeypatch):
    plain = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    print_lines([Text("naïve…")])
    assert plain.buffer.getvalue() == b"na\\xefve\\u2026\n"


# ---- Columns that fit, and numbers that are short.

COLUMNS = (
    Column("NAME"),
    Column("PID", 2, right=True),
    Column("STEP", 5, right=True),
    Column("LAST LINE", 1, rest=True),
)


def lines(rows, width=None):
    return [line.plain for line in table(COLUMNS, rows, width)]


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
