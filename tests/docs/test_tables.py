"""Every table has a blank line before it. Without one, the site shows its pipes as text."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.blocks import PAGES


def glued_tables(text: str) -> Iterator[int]:
    """Yield the line of each table that follows a line of a paragraph. Code and comments of HTML may precede
    a table.
    """
    before, code = "", False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        is_row = re.match(r" {0,3}\|", line) is not None
        is_text = before.strip() != "" and not re.match(r" {0,3}\||<!--.*-->$", before)
        if is_row and is_text and not code:
            yield number
        code ^= fence
        before = "" if fence else line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_table_follows_a_blank_line(page: Path):
    assert [f"{page.name}:{line}" for line in glued_tables(page.read_text())] == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Set the limits:\n| a | b |\n|---|---|\n| 1 | 2 |\n", [2]),
        ("- a point\n| a | b |\n", [2]),
        ("Set the limits:\n\n| a | b |\n|---|---|\n| 1 | 2 |\n", []),
        ("<!-- written by a program -->\n| a | b |\n|---|---|\n", []),
        ("```\ntext\n| a | b |\n```\n", []),
    ],
)
def test_a_table_after_a_paragraph_is_found(text: str, lines: list[int]):
    assert list(glued_tables(text)) == lines
