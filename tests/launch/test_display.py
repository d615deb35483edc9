"""Which display a launch has."""

import os
import pty
import re

import pytest

from fleetrun.console.console import Console, QuietConsole
from fleetrun.console.jsonlines import JsonConsole
from fleetrun.console.status_line import LiveConsole
from fleetrun.launcher.local import NO_TERMINAL, choose_display, console_for
from tests.support.isolated import isolated

XTERM = {"TERM": "xterm"}


@pytest.mark.parametrize(
    ("wish", "environ", "terminal", "how"),
    [
        ("auto", XTERM, True, "live"),
        ("auto", XTERM, False, "plain"),
        ("auto", {}, True, "plain"),
        ("auto", {"TERM": ""}, True, "plain"),
        ("auto", {"TERM": "dumb"}, True, "plain"),
        ("auto", {**XTERM, "NO_COLOR": "1"}, True, "plain"),
        ("auto", {**XTERM, "NO_COLOR": ""}, True, "live"),
        ("auto", {**XTERM, "CI": "true"}, True, "plain"),
        ("auto", {**XTERM, "CI": ""}, True, "live"),
        ("auto", {**XTERM, "CI": "false"}, True, "live"),
        ("auto", {**XTERM, "JPY_PARENT_PID": "7"}, True, "plain"),
        ("live", {**XTERM, "CI": "true", "NO_COLOR": "1"}, True, "live"),
        ("live", {"TERM": "dumb"}, True, "plain"),
        ("live", XTERM, False, "plain"),
        ("plain", XTERM, True, "plain"),
        ("json", XTERM, True, "json"),
        ("json", {}, False, "json"),
        ("quiet", XTERM, True, "quiet"),
    ],
)
def test_which_display(wish, environ, terminal, how):
    assert choose_display(wish, environ, terminal=terminal) == how


def onto_a_terminal():
    _, terminal = pty.openpty()
    for fd in (1, 2):
        os.dup2(terminal, fd)


def two_terminals():
    for fd in (1, 2):
        os.dup2(pty.openpty()[1], fd)


def a_pipe():
    _, write = os.pipe()
    for fd in (1, 2):
        os.dup2(write, fd)


def at_a_terminal():
    onto_a_terminal()
    kinds = [type(console_for(wish, "INFO", XTERM)) for wish in ("auto", "live", "plain", "json", "quiet")]
    assert kinds == [LiveConsole, LiveConsole, Console, JsonConsole, QuietConsole]


def at_two_terminals():
    two_terminals()
    assert type(console_for("auto", "INFO", XTERM)) is Console


def in_a_pipe():
    a_pipe()
    kinds = [type(console_for(wish, "INFO", XTERM)) for wish in ("auto", "json")]
    assert kinds == [Console, JsonConsole]


def a_wish_that_cannot_be():
    read, write = os.pipe()
    for fd in (1, 2):
        os.dup2(write, fd)
    assert type(console_for("live", "INFO", XTERM)) is Console
    assert NO_TERMINAL in os.read(read, 4096).decode()


def nothing_runs():
    onto_a_terminal()
    assert type(console_for("auto", "INFO", XTERM, runs=False)) is Console
    assert type(console_for("json", "INFO", XTERM, runs=False)) is Console
    assert type(console_for("quiet", "INFO", XTERM, runs=False)) is QuietConsole


def quiet_says_errors_only():
    read, write = os.pipe()
    for fd in (1, 2):
        os.dup2(write, fd)
    console = console_for("quiet", "DEBUG", {})
    assert not console.shows_output
    console.warning("a warning")
    console.error("an error")
    assert re.fullmatch(rb"LAUNCH ERROR \S+ \S+ an error\n", os.read(read, 4096))
    assert not console_for("quiet", "CRITICAL", {}).enabled("ERROR")


CASES = [
    at_a_terminal,
    at_two_terminals,
    in_a_pipe,
    a_wish_that_cannot_be,
    nothing_runs,
    quiet_says_errors_only,
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_console(case):
    isolated(case)
