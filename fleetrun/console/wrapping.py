"""Text into rows of a terminal, broken between words. Some characters take two columns, and some none."""

from __future__ import annotations

import re
import unicodedata

_INDENT = "    "


def columns(text: str) -> int:
    """How many columns of a terminal `text` takes (Unicode's East Asian Width; marks take none)."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def wrapped(text: str, width: int) -> list[str]:
    """Rows of at most `width` columns, after the first indented; a longer word has a row of its own."""
    if columns(text) <= width:
        return [text]
    rows: list[str] = []
    row = text[: len(text) - len(text.lstrip(" "))]
    for gap, word in re.findall(r"(\s*)(\S+)", text):
        joint = "" if not row or row.isspace() else gap
        if joint and columns(row + joint + word) > width:
            rows.append(row)
            row, joint = _INDENT, ""
        row += joint + word
    return [*rows, row]
