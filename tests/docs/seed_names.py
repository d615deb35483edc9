"""Lists the names of Paddle's API, its launcher's options and its variables that documents use.

python -m tests.docs.seed_names DOCUMENT... > tests/docs/seed_names.txt

The documents are text with Python in it, some of it broken: names are found by the look of them. What a
name stands for is followed through imports and assignments: after `exe = paddle.static.Executor(place)`,
`exe.run` is `paddle.static.Executor.run`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

FLEET = "paddle.distributed.fleet"
ALIASES = {"paddle": "paddle", "fluid": "paddle.fluid", "fleet": FLEET}
CLASSES = ("UserDefinedRoleMaker", "MPISymetricRoleMaker", "DistributeTranspilerConfig", "Role")
"""Names that the documents use without saying where they come from."""

_NAME = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*"
_IMPORT = re.compile(rf"^\s*import ({_NAME})(?: as (\w+))?\s*$")
_FROM = re.compile(rf"^\s*from ({_NAME}) (import|as) (\w+(?: *, *\w+)*)\s*$")  # `as`: so says one of them
_ASSIGNED = re.compile(rf"^\s*(\w+) *= *({_NAME})\(")
_DEF = re.compile(r"^\s*(?:def|class) (\w+)")
_RETURN = re.compile(r"^\s*return (\w+)\s*$")
_TABLE_ROW = re.compile(r'^\s+"(\w+)", "')
_DOTTED = re.compile(rf"(?<![A-Za-z0-9_./\-]){_NAME}")
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z_]+)")
_VARIABLE = re.compile(r"\b(?:PADDLE_[A-Z_]+|FLAGS_\w+|TRAINING_ROLE|POD_IP|(?:CUDA|XPU)_VISIBLE_DEVICES)\b")
_SHOWN_OPTION = re.compile(r"^\s*(?:LAUNCH INFO [\d: ,-]+)?(\w+):(?:\s.*)?$")


class Document:
    """What is known at one line of a document: names and what they stand for."""

    def __init__(self) -> None:
        self.known = dict(ALIASES) | {name: f"{FLEET}.{name}" for name in CLASSES}
        self.table = ""
        self.defined = ""

    def names(self, line: str) -> Iterator[str]:
        """Names of the API on this line, in full."""
        code = line.split("#")[0]
        yield from self._imported(code)
        if not re.match(r"\s*(?:import|from) ", code):
            for found in _DOTTED.findall(code):
                yield from self._full(found)
        self._learn(code)
        yield from self._listed(line)

    def _full(self, name: str) -> Iterator[str]:
        root, _, rest = name.partition(".")
        if root in self.known and (rest or root in CLASSES) and not name.endswith("__"):
            yield ".".join(filter(None, [self.known[root], rest]))

    def _imported(self, code: str) -> Iterator[str]:
        if found := _IMPORT.match(code):
            self.known.pop(found[2] or found[1], None)
            if found[1].startswith("paddle"):
                self.known[found[2] or found[1]] = found[1]
                yield found[1]
        elif (found := _FROM.match(code)) and found[1].startswith("paddle"):
            for name in found[3].split(","):
                full = found[1] if found[2] == "as" else f"{found[1]}.{name.strip()}"
                self.known[name.strip()] = full if not full.endswith(".fleet") else FLEET
                yield full

    def _learn(self, code: str) -> None:
        if found := _DEF.match(code):
            self.defined = found[1]
            self.known.pop(found[1], None)  # the document's own
        elif (found := _RETURN.match(code)) and found[1] in self.known:
            self.known[self.defined] = self.known[found[1]]
        elif (found := _ASSIGNED.match(code)) and found[1] not in ALIASES:
            full = next(self._full(found[2]), None) or self.known.get(found[2])
            self.known.pop(found[1], None)
            if full:
                self.known[found[1]] = full

    def _listed(self, line: str) -> Iterator[str]:
        """The rows of tables of an interface, under a title that names it."""
        if "FleetAPI 接口" in line:
            self.table = FLEET
        elif "DistributeTranspilerConfig" in line:
            self.table = f"{FLEET}.DistributeTranspilerConfig"
        if (found := _TABLE_ROW.match(line)) and self.table:
            yield f"{self.table}.{found[1]}"


def api(text: str) -> Iterator[str]:
    document = Document()
    for line in text.splitlines():
        yield from document.names(line)


def options(text: str) -> Iterator[str]:
    """Options of the launcher: on command lines, and in the list that it prints of its settings."""
    shown = False
    for line in text.splitlines():
        if "Configuration" in line and "-----" in line:
            shown = True
        elif shown and "------" in line:
            shown = False
        elif shown and (found := _SHOWN_OPTION.match(line.replace("1811:", "18 11:"))):
            if found[1] not in ("training_script", "training_script_args"):
                yield f"--{found[1]}"
        elif "fleetrun" in line or "distributed.launch" in line:
            yield from (f"--{name}" for name in _OPTION.findall(line.partition(".py")[0]))


def listed(texts: Iterable[str]) -> list[str]:
    """All of them, each once, in order: options, variables, names of the API."""
    found: set[str] = set()
    for text in texts:
        found |= {*api(text), *options(text), *_VARIABLE.findall(text)}
    return sorted(found)


if __name__ == "__main__":
    sys.stdout.write("".join(f"{name}\n" for name in listed(Path(name).read_text() for name in sys.argv[1:])))
