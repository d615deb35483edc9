"""The help fits its width, breaks no word and leaves out no option."""

import pytest

from fleetrun.envs.settings.options import ACTIONS, OPTIONS, PET, Group
from fleetrun.help import SHORT, help_text, wrapped
from fleetrun.verbs import VERBS


@pytest.mark.parametrize("columns", [60, 61, 72, 76, 80, 200])
def test_lines_fit(columns):
    lines = help_text(columns, VERBS).splitlines()
    assert max(map(len, lines)) < min(columns, 80) + 1
    assert all(line == line.rstrip() for line in lines)


def test_a_narrower_terminal_gets_the_narrowest_layout():
    assert help_text(20, VERBS) == help_text(60, VERBS)


@pytest.mark.parametrize("columns", [60, 80])
def test_no_word_is_broken(columns):
    words = set(help_text(columns, VERBS).split())
    for option in (*OPTIONS.values(), *ACTIONS.values()):
        assert set(option.help.split()) <= words | {f"{word}]" for word in words}
        names = [name for name in option.env if not name.startswith(PET)]  # one line for all
        assert all(any(name in word for word in words) for name in names)


def test_every_option_and_alias_is_there_under_its_group():
    text = help_text(80, VERBS)
    for option in (*OPTIONS.values(), *ACTIONS.values()):
        assert all(f"--{name}" in text for name in (option.name, *option.aliases))
    places = [text.index(f"\n{group}:\n") for group in Group]
    assert places == sorted(places)


@pytest.mark.parametrize("word", VERBS)
def test_every_command_is_there_with_what_it_does(word):
    (line,) = [line for line in help_text(200, VERBS).splitlines() if line.startswith(f"  {word} ")]
    assert line.split(maxsplit=1)[1][:30] == VERBS[word][:30]


def test_the_short_help_fits_too():
    assert max(map(len, SHORT.splitlines())) <= 80


def test_wrapping_leaves_a_long_word_whole():
    assert wrapped("see /a/very/long-path/to/something now", 12) == "see\n/a/very/long-path/to/something\nnow"
