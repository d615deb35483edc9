"""Read the command line: options, the script, and the script's own arguments.

Each option becomes a `Choice` with its value and its origin. `resolve` checks the rules between options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

from fleetrun.aliases import Strings
from fleetrun.envs.settings.options import (
    ACTIONS,
    OF_JOBS,
    OPTIONS,
    PREFIXES,
    RETIRED,
    RETIRED_SCRIPTS,
    SHORT_FOR,
    SHORTHANDS,
    Option,
    Takes,
    by_spelling,
    normal,
)
from fleetrun.envs.settings.parsing import FALSE_WORDS, TRUE_WORDS, InvalidValue, closest, either
from fleetrun.errors import UsageError
from fleetrun.values import frozen

_DASHES = ("\N{EN DASH}", "\N{EM DASH}", "\N{MINUS SIGN}")

_ALL = (*OF_JOBS, *SHORTHANDS.values(), *ACTIONS.values())
_SPELLINGS = by_spelling(_ALL)
_SUGGESTED = tuple(word for option in _ALL for word in (option.name, *option.aliases))


# ---- Choices: options, their values, and where they were set


class Source(IntEnum):
    """Where an option was set, weakest source first."""

    ENGINE = 0
    FILE = 1
    VARIABLE = 2
    TYPED = 3


@frozen
class Choice:
    """An option with its value and its origin.

    `origin` is `--worker_num` as on the command line, `PADDLE_TRAINER_NUM`, or `job.toml:7`. `alias` is the
    spelling without dashes.
    """

    option: Option
    value: Any
    origin: str
    text: str
    alias: str
    source: Source

    @property
    def typed(self) -> bool:
        return self.source is Source.TYPED

    @property
    def from_file(self) -> bool:
        return self.source is Source.FILE

    def __str__(self) -> str:
        """Return the option as the user wrote it, to quote in a message."""
        if self.option.secret:
            return f"{self.alias} ({self.origin})" if self.from_file else self.origin
        if self.from_file:
            return f"{self.alias} = {_short(self.text)} ({self.origin})"
        if not self.typed:
            return f"{self.origin}={_short(self.text)}"
        bare = self.option.takes is not Takes.VALUE and self.value is True
        return self.origin if bare else f"{self.origin} {_short(self.text)}"

    @property
    def word(self) -> str:
        """The option as one word of a command line, for every source."""
        if self.option.takes is not Takes.VALUE:
            return self.option.flag if self.value is True else f"{self.option.flag}=0"
        if self.option.name == "devices" or not isinstance(self.value, str):
            return f"--{self.alias}={self.text}"
        return f"{self.option.flag}={self.value}"


@frozen
class EngineValue:
    """The value that a scheduler gives to an option: its text, and the environment variable that holds it."""

    text: str
    origin: str


Choices = dict[str, Choice]
"""Maps the option's name to its choice. Options that were not set are absent."""


def parsed(option: Option, origin: str, text: str, prefix: str = "") -> object:
    """Parse a text, after adding `prefix` in front if it is missing.

    Raises UsageError, which names `origin`, the spelling or the environment variable.
    """
    try:
        return option.parse(prefix + text.strip().removeprefix(prefix))
    except InvalidValue as error:
        hint = f"Did you mean {either(error.meant)}?" if error.meant else None
        problem = f"{origin} is not valid" if option.secret else f"{origin} is {_short(text)!r}"
        raise UsageError(f"{problem}; {error}", hint=hint) from None


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


# ---- The command line


@frozen
class CommandLine:
    """The parts of a command line. `action` is the first of `options.ACTIONS`. If it is set, the rest is
    ignored.
    """

    options: tuple[Choice, ...] = ()
    script: str | None = None
    script_args: Strings = ()
    action: Choice | None = None

    def last(self, name: str) -> Choice | None:
        """Return the last option with this name."""
        return next((each for each in reversed(self.options) if each.option.name == name), None)


def read(argv: Sequence[str]) -> CommandLine:
    """Split a command line. Options end at the first other word, and the rest belongs to the script.

    Raises UsageError for an unknown option, and for a missing, surplus or invalid value.
    """
    words = list(argv)
    found: list[tuple[str, Option, str]] = []
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        found.append(_take(words))
        if found[-1][1].name in ACTIONS:
            return CommandLine(action=_typed(*found[-1]))
    if words and words[0] == "--":
        del words[0]
    if words:
        script = words[0]
        if script in RETIRED_SCRIPTS:
            raise UsageError(RETIRED_SCRIPTS[script])
        if script.startswith(_DASHES):
            raise UsageError(
                f"{script!r} starts with a typographic dash",
                hint="Options start with two hyphens, as in --gpus.",
            )
    short = [choice for each in found for choice in _written_out(*each)]
    options = [_typed(*each) for each in found if each[1].name not in SHORTHANDS]
    return CommandLine((*short, *options), words[0] if words else None, tuple(words[1:]))


def _written_out(spelling: str, short: Option, given: str) -> Iterator[Choice]:
    """Yield the options that a shorthand such as `-q` stands for."""
    if short.name in SHORTHANDS and parsed(short, spelling, given):
        for name, text in SHORT_FOR[short.name].items():
            option = OPTIONS[name]
            yield Choice(option, parsed(option, spelling, text), spelling, text, name, Source.TYPED)


def _typed(spelling: str, option: Option, text: str) -> Choice:
    alias = normal(spelling)
    value = parsed(option, spelling, text, PREFIXES.get(alias, ""))
    return Choice(option, value, spelling, text, alias, Source.TYPED)


def _take(words: list[str]) -> tuple[str, Option, str]:
    """Remove the first option and its value from `words`. Return its spelling, the option, and the value's
    text.
    """
    spelling, equals, text = words.pop(0).partition("=")
    if spelling[:2] in ("-r", "-t") and spelling[2:3].isdigit():  # as torchrun accepts it: -t3
        spelling, equals, text = spelling[:2], "=", spelling[2:]
    option = _find(spelling)
    if not equals:
        text = _value(spelling, option, words)
    elif option.takes is Takes.NOTHING and text.lower() not in TRUE_WORDS | FALSE_WORDS:
        raise UsageError(f"{spelling} takes no value, but has {text!r}")
    return spelling, option, text


def without_secret_options(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line with the values of secret options hidden, wherever they are."""
    words: list[str] = []
    hides = False
    for word in argv:
        spelling, equals, _ = word.partition("=")
        option = _SPELLINGS.get(normal(spelling)) if spelling.startswith("--") else None
        secret = option is not None and option.secret
        words.append("..." if hides else f"{spelling}=..." if secret and equals else word)
        hides = secret and not equals
    return words


def _find(spelling: str) -> Option:
    long = spelling.startswith("--")
    found = _SPELLINGS.get(normal(spelling) if long else spelling)
    if found is not None:
        return found
    name = normal(spelling.lower() if long else f"-{spelling.lower()}")
    retired = RETIRED.get(name if long else spelling)
    if retired is not None:
        raise UsageError(f"{spelling} {retired}")
    meant = closest(name, _SUGGESTED)
    hint = "`fleetrun --help` lists the options. Put the options of your script after the script."
    if meant:
        hint = f"Did you mean {either(tuple(f'--{word}' for word in meant))}?"
    raise UsageError(f"unknown option {spelling}", hint=hint)


def _value(spelling: str, option: Option, words: list[str]) -> str:
    if option.takes is Takes.VALUE:
        if not words or (words[0].startswith("-") and words[0][1:2] not in set("0123456789")):
            raise UsageError(f"{spelling} needs a value: {spelling} {option.metavar}")
        return words.pop(0)
    if option.takes is Takes.BOOLEAN and words and words[0].lower() in TRUE_WORDS | FALSE_WORDS:
        return words.pop(0)
    return "true"
