"""Lines and JSON on the standard output."""

import io
import json
import sys

import pytest
from rich.text import Text

from fleetrun.commands.output import output_width, print_json, print_lines, rendered, write
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
