"""The help fits its width, breaks no word and leaves out no option; topics are what the documents say."""

import re
import subprocess
from pathlib import Path

import pytest

from fleetrun import plugins
from fleetrun.envs.settings.options import ACTIONS, OPTIONS, PET, SHORTHANDS, TORCHRUN, Group
from fleetrun.errors import UsageError
from fleetrun.help import TOPICS, WORDS, Style, long_help, short_help, topic, topics, wrapped
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


NAMES = {row.split()[0]: page for page, row in TOPICS.items()}
TRIED = re.findall(
    r"\S+",
    """
    hang resume slurm kubernetes checkpoint install python metrics ports gpu nccl events monitoring
    spare secret notebook docker timeout oom restart debug export save exit-codes env files jobs ps
    elastic progress serving mpi ssh sync notify slack paddle torchrun glossary tutorial machines
    failures memory huggingface deepspeed jax pytest prometheus tensorboard loss straggler warm toml
    stream publish etcd firewall shm traceback
    """,
)
"""Words that users look for."""
CODE = re.compile(r"^```(?!mermaid)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", TOPICS)
def test_a_topic_is_its_page_or_section_without_marks(page):
    word = TOPICS[page].split()[0]
    path, _, anchor = page.partition("#")
    text = topic(word, 80, colours=False)
    source = (ROOT / "docs" / f"{path}.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 80 and line.strip() not in source] == []
    assert "\x1b" not in text
    assert "](" not in text
    assert "<!--" not in text
    headings = re.findall(r"^##+ (.*)$" if anchor else r"^# (.*)$", source, re.MULTILINE)
    title = next(each for each in headings if not anchor or slug(each) == anchor)
    assert title.replace("`", "") in text[:400]


def slug(heading: str) -> str:
    return re.sub(r"\W+", "-", heading.lower()).strip("-")


def test_each_word_leads_to_one_topic():
    words = [word for row in TOPICS.values() for word in row.partition(" | ")[0].split()]
    assert sorted(words) == sorted(WORDS)
    assert [word for word in TRIED if word not in WORDS and word not in VERBS] == []
    assert {"logs", "serve", "tables", "doctor", "token", "report", "stop"} <= VERBS.keys() - WORDS.keys()


@pytest.mark.parametrize("page", sorted({page.partition("#")[0] for page in TOPICS}))
def test_all_of_a_page_can_be_printed_and_no_code_is_broken(page):
    """By the commands that end each text of more than 120 lines."""
    source, printed, left = (ROOT / "docs" / f"{page}.md").read_text(), [], [page]
    while left:
        text = topic(left.pop(), 80, colours=False)
        assert len(text.splitlines()) <= 120
        text, _, more = text.partition("\nMore:\n")
        printed += text.splitlines()
        left += [line.split()[-1] for line in more.splitlines()]
    lines = {line.strip() for line in printed}
    code = [line.strip() for block in CODE.findall(source) for line in block.splitlines()]
    whole = "The rest is in" not in "\n".join(printed)
    assert [line for line in code if whole and line and line not in lines] == []


def test_a_command_can_be_copied_from_a_narrow_terminal():
    command = "fleetrun --gpus 0,1,2,3 train.py --deepspeed --deepspeed_config ds_config.json"
    assert command in topic("frameworks#deepspeed", 40, colours=False).splitlines()


def test_each_topic_is_listed_by_its_name():
    assert [line.split()[0] for line in topics(200).splitlines()[1:]] == list(NAMES)


def everything(word: str) -> str:
    """All that a topic prints, with what it refers to at its end."""
    text, _, more = topic(word, 100, colours=False).partition("\nMore:\n")
    return " ".join([*text.split(), *(everything(line.split()[-1]) for line in more.splitlines())])


def test_topics_have_what_the_help_leaves_out():
    env, paddles, torchruns = map(everything, ("env", "paddle", "torchrun"))
    variables = {name for option in EVERYTHING for name in option.env if not name.startswith(PET)}
    assert [name for name in variables if name not in env] == []
    older = {f"--{name}" for option in EVERYTHING for name in option.paddle}
    paddle = {option.flag for option in EVERYTHING if option.group is Group.PADDLE}
    assert [name for name in older | paddle if name not in paddles] == []
    torchrun = [option.flag for option in EVERYTHING if option.group is Group.TORCHRUN]
    assert [name for name in (*torchrun, *(f"--{each}" for each in TORCHRUN)) if name not in torchruns] == []


def test_a_link_to_a_page_is_the_command_that_prints_it():
    assert "SIGKILL, often out of memory" in " ".join(topic("exit-codes", 80, colours=False).split())
    assert "(fleetrun help failures)" in topic("exit-codes", 200, colours=False)
    assert "fleetrun help many-machines" in everything("failures")
    assert "fleetrun help reference/commands" not in everything("glossary") + everything("faq")


def test_a_bar_in_a_table_is_a_bar():
    assert "--with_gloo 0|1|2 " in everything("paddle")


@pytest.mark.parametrize(
    ("word", "hint"),
    [("fialures", "help failures"), ("exit-cods", "help exit-code"), ("xyzzy", "`fleetrun help` lists")],
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
