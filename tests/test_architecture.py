"""The shape of the code: who imports whom, what is in no file, how long files and functions are."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fleetrun", "trainers")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

LONGEST_FILE = 300
LONGEST_FUNCTION = 40
ALLOWED_LONG: dict[str, str] = {}
"""`path` or `path:function` -> why it may be longer."""

# What each part of the launcher may import of it, and nothing else.
PARTS = {
    "errors": set(),
    "frozen": set(),
    "plainfile": set(),
    "envs": {"frozen", "errors"},
    "pod": {"frozen", "plainfile", "envs", "errors"},
    "console": {"frozen", "plainfile", "pod", "envs"},
    "elastic": {"pod", "envs", "errors"},
    "schedulers": {"pod", "envs", "errors"},
    "record": {"plainfile", "pod", "envs", "errors"},
    "progress": {"frozen", "pod", "envs"},
    "exporters": {"progress", "pod", "envs", "errors"},
    "plots": {"record", "envs", "errors"},
    "stacks": {"plainfile", "pod", "envs", "errors"},
    "control": {"frozen", "record", "progress", "pod", "envs", "errors"},
    "doctor": {"prepare", "console", "elastic", "schedulers", "pod", "envs", "errors"},
    "jobfile": {"envs", "errors", "usage"},
    "commands": {
        "control",
        "record",
        "stacks",
        "plots",
        "doctor",
        "jobfile",
        "console",
        "elastic",
        "prepare",
        "pod",
        "envs",
        "errors",
        "usage",
    },
    "verbs": {"commands", "errors"},
    "scene": {
        "control",
        "record",
        "progress",
        "exporters",
        "stacks",
        "console",
        "elastic",
        "pod",
        "envs",
        "errors",
    },
    "prepare": {"console", "pod", "envs", "errors"},
    "stage": {"scene", "console", "pod", "envs"},
    "together": {"prepare", "stage", "scene", "control", "console", "elastic", "pod", "envs"},
    "launch": {"together", "prepare", "stage", "scene", "schedulers", "jobfile", "console", "pod", "envs"},
    "usage": {"envs"},
    "completion": {"verbs", "envs"},
    "cli": {"jobfile", "usage", "completion", "verbs", "console", "envs", "errors"},
    "__main__": {"cli", "launch", "verbs", "schedulers", "pod", "envs"},
}

# Of what is below it the console takes values, and the loop; nothing that acts.
CONSOLE_TAKES = {
    "fleetrun.envs.contract", "fleetrun.pod.container", "fleetrun.pod.loop", "fleetrun.pod.restarts",
    "fleetrun.pod.result", "fleetrun.pod.spec", "fleetrun.pod.status",
}  # fmt: skip


def name_of(path: Path) -> str:
    """`fleetrun/pod/loop.py` -> `fleetrun.pod.loop`; a package by its own name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): ast.parse(path.read_text()) for path in FILES}


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports anywhere in it: inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else str(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (
                word.value
                for word in ast.walk(node)
                if isinstance(word, ast.Constant) and isinstance(word.value, str)
            )


IMPORTS = {name: set(imports(tree)) for name, tree in MODULES.items()}


def package_of(module: str) -> str:
    return module.partition(".")[0]


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def edges() -> Iterator[tuple[str, str]]:
    for module, targets in IMPORTS.items():
        for target in targets:
            yield module, target


def test_there_is_something_to_look_at():
    assert {"fleetrun.cli", "fleetrun.pod.supervisor", "trainers.roles.environment"} <= MODULES.keys()
    assert "fleetrun.pod.loop" in IMPORTS["fleetrun.pod.supervisor"]
    assert "fleetrun.launch" in IMPORTS["fleetrun.__main__"], "imports inside functions count"


def test_every_part_of_the_launcher_has_its_place():
    parts = {part_of(name) for name in MODULES if package_of(name) == "fleetrun"} - {""}
    assert parts == set(PARTS)


def test_the_launcher_imports_downwards():
    wrong = [
        f"{module} -> {target}"
        for module, target in edges()
        if package_of(module) == package_of(target) == "fleetrun" and part_of(module) in PARTS
        if part_of(target) not in {part_of(module), *PARTS[part_of(module)]}
    ]
    assert not wrong


def test_the_console_takes_values_only():
    taken = {
        target
        for module, target in edges()
        if part_of(module) == "console" and part_of(target) in ("pod", "envs")
    }
    assert taken <= CONSOLE_TAKES


def test_the_launcher_knows_neither_the_runtime_nor_what_is_slow_to_import():
    banned = {"trainers", "torch", "numpy", "scipy", "pandas", "sklearn"}
    wrong = [
        f"{module} -> {target}"
        for module, target in edges()
        if package_of(module) == "fleetrun" and package_of(target) in banned
    ]
    assert not wrong


def test_the_contract_is_the_only_bridge_between_the_packages():
    bridges = {
        (module, target)
        for module, target in edges()
        if package_of(module) == "trainers" and package_of(target) == "fleetrun"
    }
    assert bridges == {
        ("trainers.roles.environment", "fleetrun.envs.contract"),
        ("trainers.roles.environment", "fleetrun.envs.mpi"),  # the same question, asked of mpirun's variables
        ("trainers.ps.net.keys", "fleetrun.envs.contract"),
    }


def test_the_contract_stands_on_the_standard_library():
    seen: set[str] = set()
    waiting = ["fleetrun.envs.contract", "fleetrun.envs.mpi"]
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting += [target for target in IMPORTS[module] if target in MODULES and target not in seen]
    outside = {package_of(target) for module in seen for target in IMPORTS[module] - seen}
    assert seen - {"fleetrun.frozen"} == {
        f"fleetrun.envs.{name}"
        for name in (
            "agreed",
            "contract",
            "inherited",
            "members",
            "mpi",
            "names",
            "reading",
            "secret",
            "variables",
        )
    }
    assert outside <= set(sys.stdlib_module_names)


def test_the_servers_know_nothing_of_the_face():
    wrong = [
        f"{module} -> {target}"
        for module, target in edges()
        if module.startswith("trainers.ps") and target in ("trainers", "trainers.fleet")
    ]
    assert not wrong


def test_no_import_goes_in_circles():
    state: dict[str, str] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        if state.get(module) == "open":
            raise AssertionError(" -> ".join([*path[path.index(module) :], module]))
        if module in state or module not in MODULES:
            return
        state[module] = "open"
        for target in sorted(IMPORTS[module]):
            visit(target, (*path, module))
        state[module] = "done"

    for module in MODULES:
        visit(module, ())


def test_the_launcher_starts_without_what_is_slow():
    code = (
        "import sys, fleetrun.__main__, fleetrun.cli, fleetrun.launch\n"
        "slow = {'torch', 'numpy', 'rich', 'psutil', 'zmq', 'click', 'asyncio', 'pynvml', 'trainers'}\n"
        "print(*sorted(slow & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []


# What a launch that asks for nothing but processes imports of these parts, from its first line to its last.
# All else (a live display, exporters, stacks, job files, engines, several machines) comes when asked for.
LAUNCHED = {
    "console": {
        "banner", "console", "display", "figures", "hangs", "narrator", "report", "secrets", "sink", "tail",
        "wrapping",
    },
    "control": {"board", "server", "service"},
    "progress": {"desk", "observing"},
    "record": {"appending", "journal", "launched", "marks", "recorder"},
    "schedulers": {"placing"},
}  # fmt: skip
WHOLE = {
    "__main__", "cli", "envs", "errors", "frozen", "launch", "plainfile", "pod", "prepare", "scene", "stage",
    "usage", "verbs",
}  # fmt: skip
DEAR = {
    "ast", "asyncio", "click", "dataclasses", "difflib", "dis", "encodings.idna", "hashlib",
    "importlib.metadata", "inspect", "logging", "numpy", "psutil", "random", "rich", "shlex", "ssl", "string",
    "tempfile", "textwrap", "tokenize", "tomllib", "torch", "traceback", "trainers", "uuid", "zmq",
}  # fmt: skip
"""What takes a millisecond and more, or memory, and can wait until something needs it."""

LAUNCH = """
import os, sys
sys.modules["pynvml"] = None  # which needs some of what is not wanted, where there are GPUs

def told(code, end=os._exit):
    with open(sys.argv[-1], "a") as file:
        print(*sys.modules, sep="\\n", file=file)
    end(code)

os._exit = told  # the end of the guard, and of the launcher
import fleetrun.__main__
fleetrun.__main__.main()
"""


def test_a_launch_imports_only_what_it_needs(tmp_path):
    told = tmp_path / "modules"
    words = [
        "--nproc_per_node=2",
        "--max_restart=0",
        f"--log_dir={tmp_path}/log",
        "--no_python",
        "true",
        str(told),
    ]
    plain = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-c", LAUNCH, *words]
    subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, timeout=120, check=True)
    modules = set(told.read_text().split())
    assert modules & DEAR == set()
    ours = {name.partition(".")[2] for name in modules if name.startswith("fleetrun.")}
    more = {name for name in ours if name.partition(".")[0] not in WHOLE}
    assert more == LAUNCHED.keys() | {f"{part}.{name}" for part, names in LAUNCHED.items() for name in names}


# ---- what no file has

DANGEROUS_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
DANGEROUS_CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load"}


def test_nothing_is_unpickled():
    assert not [
        f"{module} -> {target}" for module, target in edges() if package_of(target) in DANGEROUS_MODULES
    ]


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in DANGEROUS_CALLS:
                yield f"line {node.lineno}: {ast.unparse(node.func)}"
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield f"line {node.lineno}: shell={ast.unparse(keyword.value)}"
                if keyword.arg == "preexec_fn":
                    yield f"line {node.lineno}: preexec_fn"


def test_nothing_runs_text_as_a_program():
    found = [f"{module}, {danger}" for module, tree in MODULES.items() for danger in dangers(tree)]
    assert not found


@pytest.mark.parametrize(
    "text", ["eval('1')", "os.system('x')", "run(['x'], shell=True)", "run(['x'], shell=want)"]
)
def test_the_guard_against_that_sees_it(text):
    assert list(dangers(ast.parse(text)))


# ---- the tail


def lengths(module: str, tree: ast.AST, lines: int) -> Iterator[str]:
    """What is too long in a file."""
    if lines > LONGEST_FILE and module not in ALLOWED_LONG:
        yield f"{module}: {lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > LONGEST_FUNCTION and f"{module}:{node.name}" not in ALLOWED_LONG:
                yield f"{module}:{node.name}: {length} lines"


def test_files_and_functions_are_short():
    found = [
        long
        for path in FILES
        for long in lengths(name_of(path), MODULES[name_of(path)], len(path.read_text().splitlines()))
    ]
    assert not found


def test_every_module_says_what_it_knows():
    silent = [
        name
        for path in FILES
        for name in [name_of(path)]
        if path.name != "__init__.py" and not ast.get_docstring(MODULES[name])
    ]
    assert not silent
