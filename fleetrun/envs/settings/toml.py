"""Write TOML for job files, and find the line of each key. `tomllib` does neither."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from fleetrun.aliases import Fields, Strings

# ---- Writing: strings, booleans, numbers, lists and tables

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def text(value: str) -> str:
    """Return a quoted string. Raises UnicodeEncodeError for command-line bytes that are not valid UTF-8."""
    value.encode()
    return (
        '"' + "".join(_ESCAPES.get(char, char if char.isprintable() else _code(char)) for char in value) + '"'
    )


def _code(char: str) -> str:
    return f"\\U{ord(char):08x}"


def key(name: str) -> str:
    return name if _BARE.fullmatch(name) else text(name)


def value(of: Any) -> str:
    """Return a string, a boolean, a number, or a list of these on one line. Floats must be finite."""
    if isinstance(of, bool):
        return "true" if of else "false"
    if isinstance(of, int | float):
        return repr(of)
    if isinstance(of, list | tuple):
        return f"[{', '.join(map(value, of))}]"
    return text(of)


def table(path: Strings, rows: Fields) -> list[str]:
    """Return the lines of a table and of its nested tables."""
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

_DEEPEST = 8  # keys of a job file have at most this depth


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, from 1, of every key and table header.

    Keys inside an inline table or an array are left out. Their line is the line of the surrounding key.
    """
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for line, head in _statements(text):
        if head[0] == "[":
            path = table = _path(head.strip("[]"))
        else:
            path = (*table, *_path(head))
        for length in range(1, min(len(path), _DEEPEST) + 1):
            found.setdefault(path[:length], line)
    return found


def nearest_line(found: dict[KeyPath, int], path: KeyPath) -> int:
    """Return the line of a key, or of the innermost surrounding key that has a line."""
    return next((found[path[:end]] for end in range(len(path), 0, -1) if path[:end] in found), 1)


def _path(dotted: str) -> KeyPath:
    """Split `a."b.c"` into ("a", "b.c")."""
    tree = tomllib.loads(f"{dotted} = 0")
    path: list[str] = []
    while isinstance(tree, dict):
        ((name, tree),) = tree.items()
        path.append(name)
    return tuple(path)


_PIECE = re.compile(
    r'''
      """(?:\\.|[^"\\]|"{1,2}(?!"))*"{3,5}  # up to two quotes may precede the closing three
    | '{3}(?:[^']|'{1,2}(?!'))*'{3,5}
    | "(?:\\.|[^"\\])*"
    | '[^']*'
    | \#[^\n]*
    | [^"'\#\n=\[\]{}]+
    | .
    ''',
    re.DOTALL | re.VERBOSE,
)
"""A string, a comment, text without meaning here, or a single character with a meaning."""

_DEEPER = {"[": 1, "{": 1, "]": -1, "}": -1}


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each statement, and its key. A table header comes in brackets."""
    line = begun = 1
    head, depth, in_value = "", 0, False
    for match in _PIECE.finditer(text.replace("\r\n", "\n") + "\n"):
        piece = match[0]
        if piece == "\n" and not depth:
            if head:
                yield begun, head.strip()
            head, in_value = "", False
        elif in_value:
            depth += _DEEPER.get(piece, 0)
        elif piece == "=":
            in_value = True
        elif piece[0] != "#" and (head or piece.strip()):
            begun = begun if head else line
            head += piece
        line += piece.count("\n")
