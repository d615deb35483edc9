"""What fleetrun says: which of it, in which form, in which colour."""

import re

import pytest

from fleetrun.console.console import LEVELS, wants_colour

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def test_a_line_has_the_stamp_of_the_documents(said):
    """`LAUNCH INFO 2022-05-18 11:27:17,761 text`"""
    made = said()
    made.console.info("Job: default")
    assert re.fullmatch(rf"LAUNCH INFO {STAMP} Job: default\n", made.err)
    assert made.out == b""


def test_each_line_of_a_text_has_it(said):
    made = said()
    made.console.warning("one\ntwo")
    assert re.fullmatch(rf"LAUNCH WARNING {STAMP} one\nLAUNCH WARNING {STAMP} two\n", made.err)


def test_an_empty_text_is_a_line(said):
    made = said()
    made.console.info("")
    assert re.fullmatch(rf"LAUNCH INFO {STAMP} \n", made.err)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_below_the_level_is_not_said(said, level):
    made = said(level)
    for name in ("debug", "info", "warning", "error"):
        getattr(made.console, name)(name)
    words = [line.split()[-1] for line in made.err.splitlines()]
    order = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    assert words == ["debug", "info", "warning", "error"][order.index(level) :]


@pytest.mark.parametrize(("level", "shown"), [("INFO", True), ("ERROR", True), ("CRITICAL", False)])
def test_blocks_have_a_level_and_no_stamp(said, level, shown):
    made = said(level)
    made.console.block(["a", "b"], level="ERROR")
    assert made.err == ("a\nb\n" if shown else "")


def test_colour_is_for_the_head_of_warnings_and_errors(said):
    made = said(colour=True)
    made.console.info("x")
    made.console.warning("x")
    made.console.error("x")
    first, second, third = made.err.splitlines()
    assert first.startswith("LAUNCH INFO ")
    assert second.startswith("\033[33mLAUNCH WARNING\033[0m ")
    assert third.startswith("\033[31mLAUNCH ERROR\033[0m ")


def test_no_colour_unless_asked(said):
    made = said()
    made.console.error("x")
    assert "\033" not in made.err
    assert made.console.label("trainer.0", 9, 0) == b"trainer.0 | "


def test_containers_print_what_they_print(said):
    made = said()
    made.console.show(b"", b"\xff any bytes\n")
    assert made.out == b"\xff any bytes\n"
    assert made.err == ""


def test_each_line_has_its_label(said):
    made = said()
    made.console.show(b"trainer.0 | ", "一\n\n二\n".encode())
    assert made.out.decode() == "trainer.0 | 一\ntrainer.0 | \ntrainer.0 | 二\n"


def test_labels_are_as_wide_as_the_widest_and_differ_in_colour(said):
    console = said(colour=True).console
    labels = [console.label(name, 11, number) for number, name in enumerate(("ps.0", "trainer.10"))]
    assert b"ps.0        |" in labels[0]
    assert b"trainer.10  |" in labels[1]
    assert labels[0][:5] != labels[1][:5]


def test_on_a_terminal_long_lines_are_broken_between_words(said):
    made = said(columns=60)
    made.console.error(f"trainer 0 exited {'and so on ' * 20}see /a/path/that/is/longer/than/{'x' * 60}")
    lines = made.err.splitlines()
    assert len(lines) > 3
    assert all(len(line) <= 60 or " " not in line.strip() for line in lines)
    assert all(line.startswith("    ") for line in lines[1:])


def test_elsewhere_they_stay_whole(said):
    made = said()
    made.console.error("word " * 100)
    assert len(made.err.splitlines()) == 1


def test_names_of_files_that_are_no_text(said):
    made = said()
    made.console.info("log \udcff.log")
    assert made.err.endswith("log \udcff.log\n")


# ---- who wants colour: nobody here is a terminal


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": ""}, True),
        ({"FORCE_COLOR": ""}, False),
    ],
)
def test_who_wants_colour(environ, wanted):
    assert wants_colour(environ) is wanted
