"""The words after `fleetrun` (options, the script, and the script's own arguments), and the choices that are
made with them: an option, its value, and where it was given. Knows no rule between options.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from fleetrun.envs.settings.options import (
    ACTIONS,
    OPTIONS,
    RETIRED,
    RETIRED_SCRIPTS,
    Option,
    Takes,
    by_spelling,
    normal,
)
from fleetrun.envs.settings.parsing import FALSE_WORDS, TRUE_WORDS, InvalidValue, closest, either
from fleetrun.errors import UsageError
from fleetrun.values import dataclass

# ---- The words after `fleetrun`: options, the script, and what is the script's own. Parses no value.

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


# ---- One choice of the person's: an option, its value, and where it was made. Knows no rule between options.


class Source(IntEnum):
    """Where a choice was made, the weakest first."""

    ENGINE = 0
    FILE = 1
    VARIABLE = 2
    TYPED = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """`origin` is `--worker_num` as it was typed, `PADDLE_TRAINER_NUM` or `job.toml:7`, `alias` its normal
    spelling.
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
    def filed(self) -> bool:
        return self.source is Source.FILE

    def __str__(self) -> str:
        """As the person wrote it, to quote in a message."""
        if self.filed:
            return f"{self.alias} = {_short(self.text)} ({self.origin})"
        if not self.typed:
            return f"{self.origin}={_short(self.text)}"
        bare = self.option.takes is not Takes.VALUE and self.value is True
        return self.origin if bare else f"{self.origin} {_short(self.text)}"

    @property
    def word(self) -> str:
        """The same as one word of a command line, wherever it came from."""
        if self.option.takes is not Takes.VALUE:
            return self.option.flag if self.value is True else f"{self.option.flag}=0"
        if self.option.name == "devices" or not isinstance(self.value, str):
            return f"--{self.alias}={self.text}"
        return f"{self.option.flag}={self.value}"


@dataclass(frozen=True, slots=True)
class EngineValue:
    """What an engine that started this process says of an option: a text as it would be typed, and the
    variable it comes from.
    """

    text: str
    origin: str


Choices = dict[str, Choice]
"""What was chosen, by the option's name; an option at its default is absent."""


def parsed(option: Option, origin: str, text: str, prefix: str = "") -> Any:
    """The value of a text, with `prefix` put before it if it is not there.

    Raises UsageError, which names `origin`: the spelling or the variable.
    """
    try:
        return option.parse(prefix + text.strip().removeprefix(prefix))
    except InvalidValue as error:
        hint = f"did you mean {either(error.meant)}?" if error.meant else None
        raise UsageError(f"{origin} is {_short(text)!r}; {error}", hint=hint) from None


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."
