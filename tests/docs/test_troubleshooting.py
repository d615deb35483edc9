"""docs/troubleshooting.md: each message in a heading is one that fleetrun prints, or has a hint on."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fleetrun.console.causes import known_cause

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
OTHERS = {
    "was killed by SIGKILL",  # the name of the signal is put into it
    "… has not come to …",  # its middle is put into it
}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """What stands in the source: each text, with … for what is put into it."""
    found = []
    for package in ("fleetrun", "trainers"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_bytes())
            docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if id(node) in docstrings:
                    continue
                if isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


@pytest.mark.slow
def test_each_message_is_real(texts):
    assert len(MESSAGES) > 60
    strange = {each for each in MESSAGES if not _real(each, texts)}
    assert strange == OTHERS


def _real(message: str, texts: list[str]) -> bool:
    if known_cause([message.replace("…", "1")], None):
        return True
    wanted = re.compile(".*".join(map(re.escape, re.split(r" ?… ?", message))), re.DOTALL)
    return any(wanted.search(text) for text in texts)
