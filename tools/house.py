"""The structure of the code in numbers: sizes, cycles, and how many files a path through it touches.

    python tools/house.py                      # a table
    python tools/house.py --files              # also the files of each path, in order
    python tools/house.py --size               # files, lines of code and tokens of each package
    python tools/house.py --picture FILE.svg   # packages by layers, for docs/architecture.md

`tests/test_architecture.py` asserts cycles, layers and the number of tokens.
"""

from __future__ import annotations

import ast
import functools
import html
import io
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fleetrun", "trainers")

Graph = Mapping[str, set[str]]


def module_name(path: Path) -> str:
    """`fleetrun/pod/loop.py` -> `fleetrun.pod.loop`; a package by its own name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def product_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(tree: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    """Modules that a file imports anywhere: at its top, inside functions, for type checkers, by
    `import_module`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError("relative imports hide the direction")
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules else str(node.module)
        elif isinstance(node, ast.Call) and called(node).endswith(("import_module", "__import__")):
            yield from (
                word.value
                for word in ast.walk(node)
                if isinstance(word, ast.Constant) and isinstance(word.value, str)
            )


def called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Module -> the product modules that it imports."""
    trees = {module_name(path): ast.parse(path.read_text()) for path in product_files()}
    return {name: {each for each in imports(tree, trees) if each in trees} for name, tree in trees.items()}


def folder_graph(graph: Graph) -> dict[str, set[str]]:
    """Folder -> folders that its modules import from. A folder and those inside it count as one place here:
    a package and its parts may know each other.
    """
    packages = {module_name(path) for path in product_files() if path.name == "__init__.py"}
    found: dict[str, set[str]] = {}
    for module, targets in graph.items():
        here = module.rpartition(".")[0]
        for target in targets:
            there = target.rpartition(".")[0]
            nested = f"{here}.".startswith(f"{there}.") or f"{there}.".startswith(f"{here}.")
            if not nested and not {module, target} & packages:
                found.setdefault(here, set()).add(there)
                found.setdefault(there, set())
    return found


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return groups


# Runs a launch in this interpreter and notes which of our files have a function called, per phase.
# The launcher is a fork of this process; the profile function is inherited, also by its threads.
_TRACER = """
import os, sys, threading
root, told = sys.argv[1:3]
ours = root + "/fleetrun/"
sys.argv[1:3] = []
phase, files = "start", {"start": {}, "run": {}, "exit": {}, "values": {}, "meet": {}}
meeting = False  # between the entry of open_meeting and that of Agent.start
guard, end = os.getpid(), os._exit
importing = 0  # depth of modules whose top level runs: what they call then is no step of the launch
main = threading.get_ident()

def notice(frame, event, argument):
    global phase, importing
    if frame.f_code.co_name == "<module>":
        importing += {"call": 1, "return": -1}.get(event, 0)
    elif importing:
        pass
    elif event == "c_call":
        name = argument.__name__
        if phase == "start" and name in ("fork_exec", "posix_spawn"):
            phase = "run"
        elif phase == "run" and name in ("waitid", "waitpid") and os.getpid() != guard:
            phase = "exit"
            note(frame)
    elif event == "call":
        note(frame)

def note(frame):
    global meeting
    path = frame.f_code.co_filename
    if path.startswith(ours):
        file = path[len(root) + 1:]
        files[phase].setdefault(file)
        if frame.f_code.co_name == "open_meeting":
            meeting = True
        elif frame.f_code.co_name == "start" and file.endswith("/elastic/agent.py"):
            meeting = False
        if meeting:
            files["meet"].setdefault(file)
    if phase == "start" and frame.f_code.co_name == "__init__":
        made = type(frame.f_locals.get("self"))
        if hasattr(made, "_setters") or "__dataclass_fields__" in vars(made):
            files["values"].setdefault(made.__name__)

def in_thread(frame, event, argument):
    path = frame.f_code.co_filename
    if meeting and event == "call" and path.startswith(ours):
        files["meet"].setdefault(path[len(root) + 1:])

def finish(code):
    sys.setprofile(None)
    if os.getpid() != guard:
        with open(told, "w") as file:
            for name, paths in files.items():
                print(name, *paths, file=file)
    end(code)

os._exit = finish
sys.path.insert(0, root)
import fleetrun.__main__
threading.setprofile(in_thread)
sys.setprofile(notice)
fleetrun.__main__.main()
"""


def traced(folder: str, node: int, *words: str) -> tuple[subprocess.Popen[str], Path]:
    """A launch of `true` that writes to the returned path which files it touched."""
    told = Path(folder) / f"files{node}"
    plain = {"PATH": os.environ["PATH"], "HOME": folder, "XDG_RUNTIME_DIR": folder}
    argv = [sys.executable, "-c", _TRACER, str(ROOT), str(told), *words]
    argv += [f"--log_dir={folder}/log{node}", "--no_python", "true"]
    launch = subprocess.Popen(argv, env=plain, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return launch, told


def touched_by(*launches: tuple[subprocess.Popen[str], Path]) -> list[dict[str, list[str]]]:
    """For each launch, what each phase of it touched."""
    for launch, _ in launches:
        _, errors = launch.communicate(timeout=120)
        if launch.returncode:
            raise RuntimeError(f"the launch ended with exit code {launch.returncode}:\n{errors}")
    lines = [[line.split() for line in told.read_text().splitlines()] for _, told in launches]
    return [{name: files for name, *files in each} for each in lines]


def walks() -> dict[str, list[str]]:
    """Files of which a function runs, in order, in a plain local launch of `true`: `start` (from argv to the
    first process) and `exit` (from the end of that process to the exit code). `values`: the types of frozen
    values that are made from argv to the first process. `meet`: in a launch on two nodes, from open_meeting
    to Agent.start, on the node that hosts the rendezvous store, in all its threads.
    """
    with tempfile.TemporaryDirectory() as folder:
        local = touched_by(traced(folder, 0))[0]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pair = ["--nnodes=2", f"--master=127.0.0.1:{port}", "--host=127.0.0.1"]
        nodes = touched_by(*(traced(folder, number, *pair) for number in (1, 2)))
    hosts = [each for each in nodes if "fleetrun/elastic/embedded/server.py" in each["meet"]]
    return {**local, "meet": hosts[0]["meet"]}


def figures() -> list[tuple[str, str, str]]:
    """(measure, value, goal)"""
    lengths = sorted(
        len(path.read_text().splitlines()) for path in product_files() if path.name != "__init__.py"
    )
    graph = import_graph()
    touched = walks()
    return [
        ("product modules (without `__init__`)", str(len(lengths)), "<= 260"),
        (
            "median / 90th percentile / longest file, lines",
            f"{statistics.median_low(lengths)} / {lengths[len(lengths) * 9 // 10]} / {lengths[-1]}",
            "~195 / ~440 / 750",
        ),
        ("lines in all", str(sum(lengths)), ""),
        ("import cycles of modules", str(len(cycles(graph))), "0"),
        ("import cycles of folders", str(len(cycles(folder_graph(graph)))), "0"),
        ("files from argv to the first process", str(len(touched["start"])), "<= 30"),
        ("value types from argv to the first process", str(len(touched["values"])), "<= 9"),
        ("files from a process's exit to the exit code", str(len(touched["exit"])), "<= 14"),
        ("files from open_meeting to agent.start, on the host", str(len(touched["meet"])), "<= 22"),
    ]


# ---- the size

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code(source: str) -> tuple[int, int]:
    """Count the lines of code and the tokens of a file, without comments, docstrings and blank lines."""
    lines: set[int] = set()
    tokens = 0
    statement_begins = True
    for word in tokenize.generate_tokens(io.StringIO(source).readline):
        if word.type in _NO_CODE:
            statement_begins |= word.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        elif word.type == tokenize.STRING and statement_begins:
            statement_begins = False
        else:
            statement_begins = False
            tokens += 1
            lines.update(range(word.start[0], word.end[0] + 1))
    return len(lines), tokens


def sizes() -> dict[str, tuple[int, int, int]]:
    """Return the files, lines of code and tokens of each package, and of each folder or module in it."""
    found: dict[str, tuple[int, int, int]] = {}
    for path in product_files():
        lines, tokens = code(path.read_text())
        package, part, *_ = path.relative_to(ROOT).parts
        for name in (package, f"{package}/{part}"):
            files, so_far, before = found.get(name, (0, 0, 0))
            found[name] = files + 1, so_far + lines, before + tokens
    return found


def tokens() -> int:
    """Return the tokens of the product. The limit is in `pyproject.toml`."""
    return sum(sizes()[package][2] for package in PACKAGES)


def print_sizes() -> None:
    print("|  | files | lines | tokens |\n|---|--:|--:|--:|")
    for name, (files, lines, words) in sorted(
        sizes().items(), key=lambda row: (row[0].split("/")[0], -row[1][2])
    ):
        print(f"| {name} | {files} | {lines:,} | {words:,} |")
    print(f"| in all |  |  | {tokens():,} |")


# ---- the picture


def layers(package: str) -> list[list[str]]:
    """The folders and top-level modules of a package, from the ground up: each imports only from rows below
    its own.
    """
    parts: dict[str, set[str]] = {}
    for module, targets in import_graph().items():
        if module.startswith(f"{package}."):
            found = parts.setdefault(module.split(".")[1], set())
            found |= {each.split(".")[1] for each in targets if each.startswith(f"{package}.")}
    rows: list[list[str]] = []
    placed: set[str] = set()
    while placed != parts.keys():
        row = sorted(name for name in parts.keys() - placed if parts[name] - {name} <= placed)
        if not row:  # a loop; the test of layers fails then
            row = sorted(parts.keys() - placed)
        rows.append(row)
        placed |= set(row)
    return rows


def purpose(package: str, part: str) -> str:
    """The first sentence of the docstring of a folder or module."""
    folder = ROOT / package / part
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0].rstrip(".").replace("`", "")


BOX, GAP, HEIGHT, TEXT = 206, 8, 66, 33  # pixels; TEXT: characters of a line in a box
ACROSS = 6  # boxes


def picture() -> str:
    """Both packages as SVG: a band for each layer, the ground at the bottom."""
    out: list[str] = []
    y = 0
    for package in PACKAGES:
        y += 30
        out.append(
            f'<text x="8" y="{y - 8}" font-size="16" font-weight="bold" fill="#3f51b5">{package}</text>'
        )
        for row in reversed(layers(package)):
            lines = [row[start : start + ACROSS] for start in range(0, len(row), ACROSS)]
            band = len(lines) * (HEIGHT + GAP) + GAP
            out.append(f'<rect x="0" y="{y}" width="100%" height="{band}" rx="6" fill="#f5f5fb"/>')
            for down, line in enumerate(lines):
                for across, part in enumerate(line):
                    x = GAP + across * (BOX + GAP)
                    out += box(x, y + GAP + down * (HEIGHT + GAP), part, purpose(package, part))
            y += band + GAP
    size = f"{ACROSS * (BOX + GAP) + GAP} {y}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        'font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, *out, "</svg>"]) + "\n"


def box(x: int, y: int, part: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, TEXT, max_lines=3, placeholder=" ...")
    return [
        f'<rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="5" fill="#fff" stroke="#7986cb"/>',
        f'<text x="{x + 7}" y="{y + 15}" font-weight="bold" fill="#1a237e">{html.escape(part)}</text>',
        *(
            f'<text x="{x + 7}" y="{y + 29 + 13 * number}" fill="#333">{html.escape(line)}</text>'
            for number, line in enumerate(lines)
        ),
    ]


def main() -> None:
    if "--picture" in sys.argv[1:]:
        Path(sys.argv[-1]).write_text(picture())
        return
    if "--size" in sys.argv[1:]:
        print_sizes()
        return
    print("| measure | value | goal |\n|---|---|---|")
    for row in figures():
        print("| " + " | ".join(row) + " |")
    if "--files" in sys.argv[1:]:
        for name, files in walks().items():
            print(f"\n{name}:", *files, sep="\n  ")


if __name__ == "__main__":
    main()
