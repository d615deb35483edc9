"""The command blocks of README and docs: every ```bash block, and how it is run here.

A comment of HTML before a block says how, if not simply with `bash -e`:

    <!-- run: plan ADDRESS -->             each fleetrun with --dry_run; this machine is ADDRESS in --ips
    <!-- run: together -->                 all lines at once, each in a shell of its own
    <!-- run: while COMMAND -->            as it is, while COMMAND runs
    <!-- run: short WORDS -->              each fleetrun with these words at its end
    <!-- run: fails N -->                  as it is; the exit code is N
    <!-- run: bench -->                    each program of bench/ is compiled only: it takes minutes
                                           (tests/docs/test_parameter_server.py checks its options)
    <!-- run: elsewhere WHY -->            not here: it needs what a test has not, or may not do
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md")))

_BLOCK = re.compile(
    r"(?:<!-- run: (?P<how>[^\n]*?) -->\n)?^```bash\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """`how` is the first word of the comment (`run` without one), `rest` what follows it."""

    page: str
    line: int
    text: str
    how: str = "run"
    rest: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        how, _, rest = (match["how"] or "run").partition(" ")
        line = text.count("\n", 0, match.start("text"))
        found.append(Block(str(page.relative_to(ROOT)), line, match["text"], how, rest))
    return found


@dataclass(frozen=True)
class File:
    name: str
    line: int
    text: str


def files(page: Path) -> list[File]:
    """Its ```python blocks whose first line is a comment with the name of a file."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(# (\w+\.py)\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [File(match[2], text.count("\n", 0, match.start()), match[1]) for match in found]


def script(block: Block) -> str:
    """What bash runs."""
    if block.how == "plan":
        plan = 'command fleetrun --dry_run "$@" > plan.out'
        listed = f"POD_IP={(block.rest.split() or ['-'])[0]} {plan}"
        return f'fleetrun() {{ if [[ "$*" == *--ips=* ]]; then {listed}; else {plan}; fi; }}\n{block.text}'
    if block.how == "short":
        return f'fleetrun() {{ command fleetrun "$@" {block.rest}; }}\n{block.text}'
    if block.how == "together":
        lines = re.sub(r"\\\n\s*", " ", block.text).splitlines()
        started = "".join(f"({line}) & all+=($!)\n" for line in lines if line and not line.startswith("#"))
        return f"{started}for one in ${{all[@]}}; do wait $one; done\n"
    if block.how == "bench":
        return re.sub(r"(?:\w+=\S+ )?python (bench/\w+\.py).*", r"python -m py_compile \1", block.text)
    return block.text
