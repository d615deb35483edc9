"""What `tomllib` does not do: write TOML, as far as job files need it, and find the line of each key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from fleetrun.aliases import Fields, Strings

# ---- Writing: strings, booleans, numbers, lists and tables

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def text(value: str) -> str:
    """A quoted string. Raises UnicodeEncodeError for bytes of a command line that are not valid UTF-8."""
    value.encode()
    return (
        '"' + "".join(_ESCAPES.get(char, char if char.isprintable() else _code(char)) for char in value) + '"'
    )


def _code(char: str) -> str:
    return f"\\U{ord(char):08x}"


def key(name: str) -> str:
    return name if _BARE.fullmatch(name) else text(name)


def value(of: Any) -> str:
    """A string, boolean, number, or a list of these on one line. A float must be finite."""
    if isinstance(of, bool):
        return "true" if of else "false"
    if isinstance(of, int | float):
        return repr(of)
    if isinstance(of, list | tuple):
        return f"[{', '.join(map(value, of))}]"
    return text(of)


def table(path: Strings, rows: Fields) -> list[str]:
    """The lines of a table and of the tables in it."""
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


# ---- The line of each key, for documents that `tomllib` has read without an error

KeyPath = Strings

_DEEPEST = 8  # no key of a job file is deeper


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line, from 1, of every key and table header. Keys inside an inline table or an array are left out:
    their line is that of the key around them.
    """
    scan = _Scan(text)
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    while scan.next_statement():
        line = scan.line
        if scan.here == "[":
            path = table = _path(scan.header())
        else:
            path = (*table, *_path(scan.key()))
            scan.value()
        for length in range(1, min(len(path), _DEEPEST) + 1):
            found.setdefault(path[:length], line)
    return found


def nearest_line(found: dict[KeyPath, int], path: KeyPath) -> int:
    """The line of a key, or of the innermost key around it that has one."""
    return next((found[path[:end]] for end in range(len(path), 0, -1) if path[:end] in found), 1)


def _path(dotted: str) -> KeyPath:
    """`a."b.c"` -> ("a", "b.c")."""
    tree = tomllib.loads(f"{dotted} = 0")
    path: list[str] = []
    while isinstance(tree, dict):
        ((name, tree),) = tree.items()
        path.append(name)
    return tuple(path)


class _Scan:
    """Reads a document statement by statement."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self.line = 1

    @property
    def here(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, number: int = 1) -> str:
        skipped = self._text[self._at : self._at + number]
        self._at += number
        self.line += skipped.count("\n")
        return skipped

    def _comment(self) -> None:
        while self.here not in ("", "\n"):
            self._skip()

    def next_statement(self) -> bool:
        """Skip blank lines and comments; False at the end."""
        while self.here and self.here in " \t\n#":
            if self.here == "#":
                self._comment()
            else:
                self._skip()
        return bool(self.here)

    def header(self) -> str:
        """The text between the brackets."""
        while self.here == "[":
            self._skip()
        inside = self._until("]")
        self._rest_of_line()
        return inside

    def key(self) -> str:
        """The text before the `=`, which is skipped too."""
        text = self._until("=")
        self._skip()
        return text

    def value(self) -> None:
        """Skip to the end of its last line."""
        self._rest_of_line()

    def _until(self, end: str) -> str:
        start = self._at
        while self.here not in ("", end):
            if self.here in "\"'":
                self._string()
            else:
                self._skip()
        return self._text[start : self._at]

    def _rest_of_line(self) -> None:
        depth = 0
        while self.here and (depth > 0 or self.here != "\n"):
            if self.here in "\"'":
                self._string()
            elif self.here == "#":
                self._comment()
            else:
                depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(self.here, 0)
                self._skip()

    def _string(self) -> None:
        mark = self.here
        triple = self._text.startswith(mark * 3, self._at)
        end = mark * 3 if triple else mark
        self._skip(len(end))
        while self.here and not self._text.startswith(end, self._at):
            self._skip(2 if mark == '"' and self.here == "\\" else 1)
        self._skip(len(end))
        while triple and self.here == mark:  # up to two quotes may precede the closing three
            self._skip()
