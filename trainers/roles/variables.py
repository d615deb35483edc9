"""Typed look-ups in an environment, whose errors name the variable. Knows none of the variables."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.errors import UsageError


class Variables:
    """Raises UsageError for what is missing or malformed. `why` ends the sentence `X is not set, but ...`."""

    def __init__(self, environ: Mapping[str, str], why: str) -> None:
        self.environ = environ
        self._why = why

    def text(self, name: str) -> str:
        value = self.environ.get(name, "")
        if not value:
            raise UsageError(f"{name} is not set, but {self._why}")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number from 0 on. With a default the variable need not be set."""
        if default is not None and name not in self.environ:
            return default
        return _whole(name, self.text(name))

    def listed(self, name: str) -> list[str]:
        """What stands between commas; empty when the variable is not set."""
        return [each for each in self.environ.get(name, "").replace(" ", "").split(",") if each]

    def first(self, name: str) -> int | None:
        """The first of whole numbers between commas; None when the variable is not set."""
        listed = self.listed(name)
        return _whole(name, listed[0]) if listed else None


def _whole(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise UsageError(f"{name} is {value!r}; it must be a whole number")
    return int(value)
