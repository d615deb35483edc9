"""The words after `fleetrun`: options, the script, and what is the script's own. Parses no value."""

from __future__ import annotations

from collections.abc import Sequence

from fleetrun.envs.options import ACTIONS, RETIRED, RETIRED_SCRIPTS, Option, Takes, by_spelling, normal
from fleetrun.envs.settings import OPTIONS
from fleetrun.envs.values import FALSE_WORDS, TRUE_WORDS, closest, either
from fleetrun.errors import UsageError
from fleetrun.frozen import dataclass

_DASHES = ("\N{EN DASH}", "\N{EM DASH}", "\N{MINUS SIGN}")

_SPELLINGS = by_spelling((*OPTIONS.values(), *ACTIONS.values()))


@dataclass(frozen=True, slots=True)
class Given:
    """One option as typed: `spelling` --worker-num, `alias` worker_num, `option` trainer_num, `text` 2."""

    spelling: str
    alias: str
    option: Option
    text: str


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What was typed. `action` is the first of `options.ACTIONS` on the line: then nothing else matters."""

    given: tuple[Given, ...] = ()
    script: str | None = None
    script_args: tuple[str, ...] = ()
    action: Given | None = None


def read(argv: Sequence[str]) -> CommandLine:
    """Split a command line. Options end at the first word that is none; the rest is the script's.

    Raises UsageError for a word that looks like an option and is none, and for a missing or surplus value.
    """
    words = list(argv)
    given: list[Given] = []
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        found = _take(words)
        if found.option.name in ACTIONS:
            return CommandLine(action=found)
        given.append(found)
    if words and words[0] == "--":
        del words[0]
    if not words:
        return CommandLine(given=tuple(given))
    _check_script(words[0])
    return CommandLine(given=tuple(given), script=words[0], script_args=tuple(words[1:]))


def _take(words: list[str]) -> Given:
    """The option at the head of `words`, which loses it and its value."""
    spelling, equals, text = words.pop(0).partition("=")
    option = _find(spelling)
    if not equals:
        text = _value(spelling, option, words)
    elif option.takes is Takes.NOTHING and text.lower() not in TRUE_WORDS | FALSE_WORDS:
        raise UsageError(f"{spelling} takes no value, and was given {text!r}")
    return Given(spelling, normal(spelling), option, text)


def _find(spelling: str) -> Option:
    long = spelling.startswith("--")
    found = _SPELLINGS.get(normal(spelling) if long else spelling)
    if found is not None:
        return found
    name = normal(spelling.lower() if long else f"-{spelling.lower()}")
    retired = RETIRED.get(name if long else spelling)
    if retired is not None:
        raise UsageError(f"{spelling} {retired}")
    meant = closest(name, (word for word in _SPELLINGS if not word.startswith("-")))
    hint = "fleetrun --help lists the options; those of a script go after it"
    if meant:
        hint = f"did you mean {either(tuple(f'--{word}' for word in meant))}?"
    raise UsageError(f"there is no option {spelling}", hint=hint)


def _value(spelling: str, option: Option, words: list[str]) -> str:
    if option.takes is Takes.VALUE:
        if not words or (words[0].startswith("-") and words[0][1:2] not in set("0123456789")):
            raise UsageError(f"{spelling} needs a value: {spelling} {option.metavar}")
        return words.pop(0)
    if option.takes is Takes.BOOLEAN and words and words[0].lower() in TRUE_WORDS | FALSE_WORDS:
        return words.pop(0)
    return "true"


def _check_script(script: str) -> None:
    if script in RETIRED_SCRIPTS:
        raise UsageError(RETIRED_SCRIPTS[script])
    if script.startswith(_DASHES):
        raise UsageError(
            f"{script!r} begins with a typographic dash", hint="Options begin with two hyphens, as in --gpus."
        )
