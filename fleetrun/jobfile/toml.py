"""Values as TOML. Of the language it knows what job files need: texts, numbers, lists, tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def text(value: str) -> str:
    """A text in quotes. Raises UnicodeEncodeError for bytes of a command line that are no UTF-8."""
    value.encode()
    return (
        '"' + "".join(_ESCAPES.get(char, char if char.isprintable() else _code(char)) for char in value) + '"'
    )


def _code(char: str) -> str:
    return f"\\U{ord(char):08x}"


def key(name: str) -> str:
    return name if _BARE.fullmatch(name) else text(name)


def value(of: Any) -> str:
    """A text, a truth, a number or a list of them on one line. A float must be a number."""
    if isinstance(of, bool):
        return "true" if of else "false"
    if isinstance(of, int | float):
        return repr(of)
    if isinstance(of, list | tuple):
        return f"[{', '.join(map(value, of))}]"
    return text(of)


def table(path: tuple[str, ...], rows: Mapping[str, Any]) -> list[str]:
    """Lines of a table and those in it."""
    own = {name: each for name, each in rows.items() if not isinstance(each, Mapping)}
    inner = {name: each for name, each in rows.items() if isinstance(each, Mapping)}
    lines = []
    if own or not inner:
        lines = [
            "",
            f"[{'.'.join(map(key, path))}]",
            *(f"{key(name)} = {value(each)}" for name, each in own.items()),
        ]
    for name, each in inner.items():
        lines += table((*path, name), each)
    return lines
