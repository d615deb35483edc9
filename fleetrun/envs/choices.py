"""One choice of the person's: an option, its value, and where it was made. Knows no rule between options."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from fleetrun.envs.options import Option, Takes
from fleetrun.envs.values import BadValue, either
from fleetrun.errors import UsageError
from fleetrun.frozen import dataclass


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
class Placed:
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
    except BadValue as error:
        hint = f"did you mean {either(error.meant)}?" if error.meant else None
        raise UsageError(f"{origin} is {_short(text)!r}; {error}", hint=hint) from None


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."
