"""`${NAME}` in the texts of job files: out of the environment, else out of [variables]; `${here}` is the
folder of the file. `$${` stands for `${`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fleetrun.envs.values import closest, either
from fleetrun.jobfile.entries import Entry, Key

HERE = "here"
LONGEST = 100_000
"""Characters of one text, filled in: more cannot be one word of a command line."""

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def escaped(text: str) -> str:
    """As it has to stand in a job file to mean just this."""
    return text.replace("${", "$${")


class Filling:
    """Fills in the variables of one job."""

    def __init__(self, entries: Mapping[Key, Entry], environ: Mapping[str, str]) -> None:
        """Raises UsageError for a variable that cannot be one."""
        self._own = {key[1]: entry for key, entry in entries.items() if key[0] == "variable"}
        self._environ = environ
        for name, entry in self._own.items():
            if not _NAME.fullmatch(name) or name == HERE:
                raise entry.wrong("is no name for a variable", hint="Letters, digits and _, but not `here`.")
            if not isinstance(entry.value, str | int | float):
                raise entry.wrong("must be a text or a number")

    def filled(self, entry: Entry) -> Any:
        """The value of an entry, with all texts in it filled in. Raises UsageError."""
        return self._value(entry.value, entry, ())

    def _value(self, value: Any, entry: Entry, within: tuple[str, ...]) -> Any:
        if isinstance(value, str):
            return self._text(value, entry, within)
        if isinstance(value, list):
            return [self._value(each, entry, within) for each in value]
        if isinstance(value, dict):
            return {name: self._value(each, entry, within) for name, each in value.items()}
        return value

    def _text(self, text: str, entry: Entry, within: tuple[str, ...]) -> str:
        if "\0" in text:
            raise entry.wrong("has a NUL character, which no process can be given")

        def meant(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            name = match[1]
            if name is None or not _NAME.fullmatch(name):
                raise entry.wrong(
                    f"has {match[0]!r}; a variable is ${{NAME}}", hint="$${ stands for ${ itself."
                )
            return self._variable(name, entry, within)

        filled = _REFERENCE.sub(meant, text)
        if len(filled) > LONGEST:
            raise entry.wrong(f"is longer than {LONGEST} characters")
        return filled

    def _variable(self, name: str, entry: Entry, within: tuple[str, ...]) -> str:
        if name == HERE:
            return str(entry.page.folder)
        if name in self._environ:
            return self._environ[name]
        if name in within:
            raise self._own[name].wrong(f"goes round in a circle: {' -> '.join((*within, name))}")
        if name not in self._own:
            near = closest(name, (*self._own, HERE))
            meant = f"did you mean {either(near)}? " if near else ""
            hint = f"{meant}Set it in the environment, or write it under [variables]."
            raise entry.wrong(f"needs ${{{name}}}, which is not set", hint=hint)
        own = self._own[name]
        return plain(self._value(own.value, own, (*within, name)))


def plain(value: str | int | float) -> str:
    """A number or a text as a word."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
