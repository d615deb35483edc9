"""One word for one thing: words that pages, help and messages do not use, because the glossary has
another."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fleetrun import plugins
from fleetrun.envs.settings.options import OF_JOBS, OWN
from fleetrun.help import TOPICS, long_help, short_help, topic, topics
from fleetrun.verbs import VERBS, command
from tests.support.blocks import PAGES, ROOT

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


def forbidden(text: str) -> list[str]:
    return [
        f"{match.group()}: write {word}"
        for pattern, word in INSTEAD.items()
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_a_page_has_one_word_for_one_thing(page: Path):
    assert forbidden(prose(page.read_text())) == []


def test_a_forbidden_word_is_found_in_prose_only():
    text = prose("Use `folder`.\n\n    a folder\n\n```bash\nls folder\n```\n[x](folder.md) the folder\n")
    assert re.findall(r"folder", text) == ["folder"]


# ---- The help


def commands(name: str, each: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and its subcommands, with the words that a user types."""
    yield name, each
    for word, part in getattr(each, "commands", {}).items():
        yield from commands(f"{name} {word}", part)


def helps() -> Iterator[tuple[str, str]]:
    yield "-h", short_help()
    yield "--help", long_help(80)
    yield "help", topics(80)
    for option in (*OWN, *OF_JOBS):
        yield f"--{option.name}", f"{option.brief} {option.help} {option.shown_default}"
    for word, text in VERBS.items():
        yield word, text
    for word in plugins.IN_TREE["commands"]:
        for name, each in commands(word, command(word)):
            with click.Context(each, info_name=name) as context:
                yield name, each.get_help(context)


def test_the_help_has_one_word_for_one_thing():
    texts = list(helps())
    assert len(texts) > 150
    assert {f"{where}: {found}" for where, text in texts for found in forbidden(prose(text))} == set()


@pytest.mark.parametrize("page", TOPICS)
def test_a_topic_has_one_word_for_one_thing(page: str):
    """A topic has no marks of code, so the words of its page count only if the page has them in prose."""
    source = (ROOT / "docs" / f"{page.partition('#')[0]}.md").read_text()
    found = forbidden(topic(TOPICS[page].split()[0], 80, colours=False))
    assert [each for each in found if each not in forbidden(source)] == []


# ---- Messages

_SPOKEN = re.compile(r"(?:Error|Exception|Problem|warn\w*|info|error|debug|log|echo|print|note|wrong)$")
"""Names of the calls whose arguments a user reads."""
_PATTERN = re.compile(r"^\nimport |\(\?[:P!=i]|\\[bsdw]|\[\^|^@media|\{\s*\n")
"""What only a regular expression, a style sheet or a program in a string contains."""

KEPT = {"Began with: {} at {}", "Began with: {}, {} s before"}
"""Documented lines of a failure report, which scripts search for."""


def docstrings(tree: ast.AST) -> set[int]:
    """Return the ids of the strings that are statements, such as docstrings."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def text_of(node: ast.expr) -> str:
    """Return a string without its placeholders, or "" for any other expression."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"
        for part in parts
        if isinstance(part, (ast.Constant, ast.FormattedValue))
    )


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each message: a string of three words, or an argument of a call that
    raises or prints it. Docstrings, patterns and programs are none.
    """
    tree = ast.parse(source)
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
    spoken: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            hints = [word.value for word in node.keywords if word.arg == "hint"]
            spoken |= {id(each) for each in (*(node.args if _SPOKEN.search(name) else ()), *hints)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in skipped:
            text = text_of(node)
            if (id(node) in spoken or len(text.split()) > 2) and not _PATTERN.search(text):
                yield node.lineno, text


def spoken(root: Path) -> Iterator[str]:
    """Yield each forbidden word in the messages of a package, with its file and line."""
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(root.parent))
        for line, text in messages(path.read_text()):
            if text not in KEPT:
                yield from (f"{name}:{line}: {each}" for each in forbidden(prose(text)))


@pytest.mark.parametrize("package", ["fleetrun", "trainers"])
def test_a_message_has_one_word_for_one_thing(package: str):
    assert list(spoken(ROOT / package)) == []


@pytest.mark.parametrize(
    "source",
    [
        'raise JobError("told")',
        'raise JobError(f"{name} was told")',
        'raise JobError("it failed", hint="told")',
        'console.warning("told")',
        'self._warn("told")',
        'why = "the node was told"',
    ],
)
def test_a_forbidden_word_is_found_in_a_message(source: str, tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(f'"""What is told."""\ntold = x["told"]\n{source}\n')
    assert list(spoken(tmp_path / "package")) == ["package/module.py:3: told: write report, show"]
