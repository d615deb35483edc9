"""The help fits its width, breaks no word and leaves out no option; topics are what the documents say."""

import re
import subprocess
from pathlib import Path

import pytest

from fleetrun import plugins
from fleetrun.envs.settings.options import ACTIONS, OPTIONS, PET, SHORTHANDS, TORCHRUN, Group
from fleetrun.errors import UsageError
from fleetrun.help import TOPICS, Style, long_help, short_help, topic, topics, wrapped
from fleetrun.verbs import FAMILIES, VERBS
from tests.support.command import FLEETRUN, Fleetrun

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = [*OPTIONS.values(), *SHORTHANDS.values(), *ACTIONS.values()]


@pytest.mark.parametrize("columns", [60, 61, 72, 76, 80, 200])
def test_lines_fit(columns):
    lines = long_help(columns).splitlines()
    assert max(map(len, lines)) < min(columns, 80) + 1
    assert all(line == line.rstrip() for line in lines)


def test_a_narrower_terminal_gets_the_narrowest_layout():
    assert long_help(20) == long_help(60)


@pytest.mark.parametrize("columns", [60, 80])
def test_no_word_is_broken(columns):
    words = set(long_help(columns).split())
    for option in EVERYTHING:
        if option.group not in (Group.PADDLE, Group.TORCHRUN):
            assert set(option.help.split()) <= words | {f"{word}]" for word in words}


def test_every_option_is_under_its_group():
    text = long_help(80)
    for option in EVERYTHING:
        if option.group not in (Group.PADDLE, Group.TORCHRUN):
            assert all(f"--{name}" in text for name in (option.name, *option.aliases))
    places = [text.index(f"\n{group}:\n") for group in Group if group not in (Group.PADDLE, Group.TORCHRUN)]
    assert places == sorted(places)


def test_every_command_is_there_once_with_what_it_does():
    assert sorted(word for words in FAMILIES.values() for word in words) == sorted(VERBS)
    lines = long_help(200).splitlines()
    for word, text in VERBS.items():
        assert [line for line in lines if line.startswith(f"  {word} ") and text[:30] in line]


def test_the_short_help_fits_a_terminal():
    lines = short_help().splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) < 80
    assert sum(line.startswith("  --") for line in lines) == 10
    assert len([word for word in VERBS if re.search(rf"\b{word}\b", short_help())]) == len(VERBS)


def test_colours_change_nothing_else():
    for plain, coloured in (
        (short_help(), short_help(Style(True))),
        (long_help(80), long_help(80, Style(True))),
    ):
        assert coloured.count("\x1b[") > 40
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_wrapping_leaves_a_long_word_whole():
    assert wrapped("see /a/very/long-path/to/something now", 12) == "see\n/a/very/long-path/to/something\nnow"


@pytest.mark.parametrize("word", TOPICS)
def test_a_topic_is_its_page_without_marks(word):
    _, page, heading = TOPICS[word]
    text = topic(word, 80, colours=False)
    source = (ROOT / "docs" / page).read_text()
    assert [line for line in text.splitlines() if len(line) > 80 and line.strip() not in source] == []
    assert "\x1b" not in text
    assert "](" not in text
    assert "<!--" not in text
    title = heading or source.partition("\n")[0].removeprefix("# ")
    assert title in text[:400]


def test_a_command_can_be_copied_from_a_narrow_terminal():
    command = "fleetrun --nnodes=2:4 --master=10.0.0.1,10.0.0.2,10.0.0.3 --gpus 0,1 train.py"
    assert command in topic("machines", 40, colours=False).splitlines()


def test_each_topic_is_a_word_of_its_own():
    listed = [line.split()[0] for line in topics(200).splitlines()[1:]]
    assert listed == list(TOPICS)


def test_topics_have_what_the_help_leaves_out():
    said = {word: " ".join(topic(word, 100, colours=False).split()) for word in ("env", "paddle", "torchrun")}
    variables = {name for option in EVERYTHING for name in option.env if not name.startswith(PET)}
    assert [name for name in variables if name not in said["env"]] == []
    older = {f"--{name}" for option in EVERYTHING for name in option.paddle}
    paddle = {option.flag for option in EVERYTHING if option.group is Group.PADDLE}
    assert [name for name in older | paddle if name not in said["paddle"]] == []
    torchrun = [option.flag for option in EVERYTHING if option.group is Group.TORCHRUN]
    assert [
        name for name in (*torchrun, *(f"--{each}" for each in TORCHRUN)) if name not in said["torchrun"]
    ] == []


def test_exit_codes_are_a_section_and_a_link_to_a_page_is_its_topic():
    assert "SIGKILL, often out of memory" in " ".join(topic("exit-codes", 80, colours=False).split())
    assert "Restarts" not in topic("exit-codes", 80, colours=False)
    assert "fleetrun help machines" in topic("failures", 80, colours=False)


def test_a_bar_in_a_table_is_a_bar():
    assert "--with_gloo 0|1|2 " in topic("paddle", 80, colours=False)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("fialures", "help failures"), ("exit", "help exit-codes"), ("xyzzy", "There are: tutorial, ")],
)
def test_an_unknown_topic_comes_with_those_there_are(word, hint):
    with pytest.raises(UsageError) as raised:
        topic(word, 80, colours=False)
    assert hint in str(raised.value.hint)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["help", "run"]])
def test_a_long_text_on_a_terminal_is_paged(tmp_path, words):
    pager = tmp_path / "pager"
    pager.write_text('#!/bin/sh\nsed -n "1p;\\$p"\n')
    pager.chmod(0o755)
    with Fleetrun(tmp_path) as fleetrun:
        launch, _ = fleetrun.at_terminal(*words, env={"PAGER": str(pager)})
        assert launch.wait() == 0
        assert "usage:" in launch.out
        assert "fleetrun.fish" in launch.out
        assert "Failures:" not in launch.out


def test_a_page_in_a_pipe_is_plain_text():
    done = subprocess.run([*FLEETRUN, "help", "exit-codes"], capture_output=True, text=True, check=True)
    assert done.stdout == topic("exit-codes", 80, colours=False)


def test_every_command_of_the_help_is_one_that_can_be_loaded():
    for name in plugins.IN_TREE["commands"]:
        assert plugins.load("commands", name, has="main")
    assert {name for names in FAMILIES.values() for name in names} == {*VERBS}
