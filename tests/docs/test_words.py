"""One word for one thing: words that the pages do not use, because the glossary has another."""

import re
from pathlib import Path

import pytest

from tests.support.blocks import PAGES

INSTEAD = {
    r"at once": "immediately",
    r"beg[aiu]ns?|beginning of the job": "start",
    r"engines?": "scheduler",
    r"folders?": "directory",
    r"journals?": "write-ahead log",
    r"left out|leaves? out a node": "exclude",
    r"mends?|mended": "fix",
    r"signs? of life": "activity",
    r"standby nodes?": "spare",
    r"tells?|told": "report, show",
    r"(?:as|was|were|you) typed": "on the command line",
    r"verdicts?": "diagnosis",
    r"what is left": "the remaining",
}
READ = [page for page in PAGES if not page.name.startswith(("benchmarks", "architecture"))]


def prose(text: str) -> str:
    """Leave out what stands as code, in links, and in comments."""
    return re.sub(
        r"^```.*?^```|<!--.*?-->|`[^`]*`|\]\([^)]*\)|^ {4}.*?$", " ", text, flags=re.DOTALL | re.MULTILINE
    )


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_a_page_has_one_word_for_one_thing(page: Path):
    text = prose(page.read_text())
    found = [
        f"{match.group()}: write {word}"
        for pattern, word in INSTEAD.items()
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
    ]
    assert found == []


def test_a_forbidden_word_is_found_in_prose_only():
    text = prose("Use `folder`.\n\n    a folder\n\n```bash\nls folder\n```\n[x](folder.md) the folder\n")
    assert re.findall(r"folder", text) == ["folder"]
