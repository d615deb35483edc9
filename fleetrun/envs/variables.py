"""Typed look-ups in an environment, which name the variable when they fail. Knows none of the variables."""

from __future__ import annotations

from collections.abc import Mapping


class ContractError(ValueError):
    """A variable of the contract is missing or does not parse; the message names it and its value."""


class Variables:
    """Raises ContractError for what is missing or malformed."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def text(self, name: str) -> str:
        try:
            return self.environ[name]
        except KeyError:
            raise ContractError(f"{name} is not set; start this script with fleetrun") from None

    def integer(self, name: str, default: int | None = None) -> int:
        if default is not None and name not in self.environ:
            return default
        value = self.text(name)
        try:
            return int(value)
        except ValueError:
            raise ContractError(f"{name} is {value!r}; it must be a whole number") from None

    def fraction(self, name: str) -> tuple[int, int]:
        value = self.text(name)
        index, slash, total = value.partition("/")
        if not (slash and index.isdecimal() and total.isdecimal()):
            raise ContractError(f"{name} is {value!r}; it must look like 0/2")
        return int(index), int(total)

    def endpoints(self, name: str) -> tuple[str, ...]:
        return tuple(filter(None, self.environ.get(name, "").split(",")))

    def numbers(self, name: str) -> tuple[int, ...]:
        value = self.environ.get(name, "")
        try:
            return tuple(map(int, value.split(","))) if value else ()
        except ValueError:
            raise ContractError(f"{name} is {value!r}; it must be a list of device numbers") from None
