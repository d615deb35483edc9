"""Write TOML for job files, and find the line of each key. `tomllib` does neither."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping

from fleetrun.aliases import Fields, Strings

# ---- Writing: strings, booleans, numbers, lists and tables

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def key(name: str) -> str:
    return name if _BARE.fullmatch(name) else value(name)


def value(of: object) -> str:
    """Return a string, a boolean, a number, or a list of these on one line. Floats must be finite.

    TOML has the escapes of JSON. Raises UnicodeEncodeError for command-line bytes that are not valid UTF-8.
    """
    text = json.dumps(of, ensure_ascii=False)
    text.encode()
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)


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

    Keys inside an array, or inside an inline table of several keys, are left out. Their line is the line of
    the surrounding key.
    """
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    start, statement = 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        statement += f"{line}\n"
        try:
            tree = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # its value has several lines
        is_header = statement.lstrip().startswith("[")
        path = () if is_header else table
        while isinstance(tree, dict) and len(tree) == 1 and len(path) < _DEEPEST:
            ((name, tree),) = tree.items()
            path = (*path, name)
        if is_header:
            table = path
        for length in range(1, len(path) + 1):
            found.setdefault(path[:length], start)
        start, statement = number + 1, ""
    return found


def nearest_line(found: dict[KeyPath, int], path: KeyPath) -> int:
    """Return the line of a key, or of the innermost surrounding key that has a line."""
    return next((found[path[:end]] for end in range(len(path), 0, -1) if path[:end] in found), 1)
