"""Rows of a terminal: between words, by columns rather than characters."""

import pytest

from fleetrun.console.text import columns, wrapped


@pytest.mark.parametrize(
    ("text", "expected"),
    [("abc", 3), ("中文", 4), ("caf\u0065\u0301", 4), ("カナ", 4), ("ﾊﾝ", 2), ("", 0), ("a中b", 4)],
)
def test_columns(text, expected):
    assert columns(text) == expected


@pytest.mark.parametrize(
    ("text", "width", "rows"),
    [
        ("fits as it is", 20, ["fits as it is"]),
        ("one two three", 8, ["one two", "    three"]),
        ("第三批 坏的 输入", 12, ["第三批 坏的", "    输入"]),
        ("a-very-long-word-that-is-a/path and", 10, ["a-very-long-word-that-is-a/path", "    and"]),
        ("    indented code = 1 + 2", 16, ["    indented", "    code = 1 + 2"]),
        ("two  spaces  fit", 20, ["two  spaces  fit"]),
        ("two  spaces  stay", 12, ["two  spaces", "    stay"]),
    ],
)
def test_rows(text, width, rows):
    assert wrapped(text, width) == rows


@pytest.mark.parametrize("width", range(5, 60, 7))
def test_no_word_is_broken_and_none_is_lost(width):
    text = "LAUNCH ERROR 第三批 failed: bad 数据 in /a/path/that/is/long, restart 1 of 3 now"
    rows = wrapped(text, width)
    assert " ".join(" ".join(rows).split()) == text
    assert all(columns(row) <= width or len(row.split()) == 1 for row in rows)
