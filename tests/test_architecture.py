"""The structure of the code: layers, cycles, what a launch may not import, and calls that no file has."""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions

import pytest
from packaging.specifiers import SpecifierSet

from tools.house import ROOT, code, cycles, folder_graph, imports, module_name, picture, product_files, tokens

FILES = product_files()

ALARM = 750  # lines of a file that is probably two

# What each part of the launcher may import of it, and nothing else. From the ground up.
PARTS = {
    "aliases": set(),  # every part may import these
    "decoding": set(),
    "frozen": set(),
    "errors": set(),
    "values": set(),
    "files": set(),
    "proc": {"values"},
    "shadow": {"values"},
    "plugins": {"values", "errors"},
    "envs": {"plugins", "values", "files", "errors", "proc"},
    "host": {"values", "files", "envs", "errors"},
    "plan": {"values", "host", "pod", "files", "envs", "errors"},
    "pod": {"host", "values", "files", "proc", "envs", "errors"},
    "console": {"values", "files", "pod", "envs"},
    "record": {"files", "pod"},
    "progress": {"values", "files", "pod", "envs"},
    "control": {"values", "files", "proc", "record", "progress", "host", "pod", "envs"},
    "probe": {"pod", "envs"},
    "stacks": {"probe", "files", "proc", "host", "pod", "envs", "errors"},
    "exporters": {"plugins", "files", "progress", "record", "proc", "host", "pod", "envs", "errors"},
    "notifiers": {"plugins", "pod", "errors"},
    "plots": {"record", "files", "errors"},
    "elastic": {"record", "plan", "host", "pod", "envs", "errors"},
    "schedulers": {"values", "files", "console", "record", "pod", "plugins", "envs", "errors"},
    "launcher": {
        "schedulers", "elastic", "exporters", "stacks", "control", "progress", "record", "console", "pod",
        "plan", "host", "files", "proc", "shadow", "values", "envs", "errors",
    },
    "doctor": {
        "launcher", "schedulers", "elastic", "console", "pod", "plan", "host", "files", "shadow", "values",
        "envs", "errors",
    },
    "verbs": {"commands", "plugins", "errors"},
    "help": {"verbs", "plugins", "envs", "errors"},
    "commands": {
        "help", "verbs", "doctor", "plots", "stacks", "control", "elastic", "record", "console", "pod",
        "host", "plugins", "envs", "files", "errors",
    },
    "completion": {"verbs", "plugins", "envs", "errors"},
    "display": {"console", "errors"},
    "function": {"envs", "errors"},
    "job": {"function", "control", "record", "console", "pod", "files", "errors"},
    "api": {"job", "display", "function", "record", "envs", "errors"},
    "testing": {"api", "job"},
    "relay": {"cli"},
    "cli": {"help", "completion", "verbs", "console", "envs", "errors"},
    "__main__": {"cli", "launcher", "verbs", "schedulers", "pod", "envs"},
}  # fmt: skip

# What each part of the training runtime may import of it, and nothing else. The runtimes are above the
# folders that they are in: they take a strategy, and `trainers.fleet` calls them.
RUNTIME_PARTS = {
    "errors": set(),
    "checks": {"errors"},
    "shapes": set(),
    "process": set(),
    "metrics": {"process", "errors"},
    "notice": {"errors"},
    "zoo": {"errors"},
    "roles": {"checks", "errors"},
    "storage": {"process", "errors"},
    "kernels": {"process"},
    "progress": {"process"},
    "optimizer": {"progress", "errors"},
    "checkpoints": {"checks", "storage", "progress", "process", "errors"},
    "serving": {"checkpoints", "storage", "errors"},
    "inference": {"serving", "storage", "shapes", "errors"},
    "data": {"checks", "kernels", "metrics", "progress", "process", "roles", "storage", "errors"},
    "collective": {
        "checks", "checkpoints", "data", "notice", "optimizer", "process", "progress", "roles", "errors",
    },
    "static": {"checks", "collective", "data", "optimizer", "progress", "shapes", "errors"},
    "ps": {
        "checks", "collective", "data", "kernels", "notice", "optimizer", "process", "progress", "roles",
        "serving", "storage", "errors",
    },
    "export": {"inference", "ps", "serving", "storage", "checkpoints", "errors"},
    "inference_server": {"checks", "inference", "ps", "serving", "shapes", "storage", "process", "errors"},
    "strategy": {"collective", "ps", "checks", "storage", "errors"},
    "runtime": {"strategy", "roles", "errors"},
    "util": {"data", "roles", "storage", "errors"},
    "collective.runtime": {
        "collective", "runtime", "strategy", "serving", "storage", "data", "notice", "optimizer",
        "progress", "roles", "errors",
    },
    "ps.runtime": {
        "ps", "runtime", "strategy", "collective", "serving", "storage", "data", "notice", "optimizer",
        "process", "progress", "roles", "errors",
    },
    "ps.server_runtime": {
        "ps", "runtime", "strategy", "optimizer", "process", "progress", "roles", "errors",
    },
    "fleet": {
        "collective.runtime", "ps.runtime", "ps.server_runtime", "ps", "runtime", "strategy", "util",
        "export", "checkpoints", "serving", "storage", "data", "metrics", "notice", "optimizer", "process",
        "progress", "roles", "errors",
    },
    "": {"fleet", "static", "collective", "data", "process", "progress"},
    "examples": {
        "", "fleet", "static", "collective", "ps", "data", "metrics", "roles", "zoo", "errors", "progress",
    },
}  # fmt: skip

# Of what is below it the console takes values, and the loop; nothing that acts.
CONSOLE_TAKES = {
    "fleetrun.envs.channels",
    "fleetrun.envs.contract", "fleetrun.envs.settings.parsing", "fleetrun.envs.variables",
    "fleetrun.pod.container", "fleetrun.pod.loop", "fleetrun.pod.policy", "fleetrun.pod.events",
    "fleetrun.pod.spec",
}  # fmt: skip


@functools.cache
def modules() -> dict[str, ast.Module]:
    """By name. Not read on import, which each worker of the tests does."""
    return {module_name(path): ast.parse(path.read_text()) for path in FILES}


@functools.cache
def imports_of() -> dict[str, set[str]]:
    return {name: set(imports(tree, modules())) for name, tree in modules().items()}


def package_of(module: str) -> str:
    return module.partition(".")[0]


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def edges() -> Iterator[tuple[str, str]]:
    for module, targets in imports_of().items():
        for target in targets:
            yield module, target


def test_there_is_something_to_look_at():
    assert {"fleetrun.cli", "fleetrun.pod.supervisor", "trainers.roles.environment"} <= modules().keys()
    assert "fleetrun.pod.loop" in imports_of()["fleetrun.pod.supervisor"]
    assert "fleetrun.launcher.local" in imports_of()["fleetrun.__main__"], "imports inside functions count"


def test_every_part_of_the_launcher_has_its_place():
    parts = {part_of(name) for name in modules() if package_of(name) == "fleetrun"} - {""}
    assert parts == set(PARTS)


def test_the_launcher_imports_downwards():
    wrong = [
        f"{module} -> {target}"
        for module, target in edges()
        if package_of(module) == package_of(target) == "fleetrun" and part_of(module) in PARTS
        if part_of(target) not in {part_of(module), "aliases", "decoding", "frozen", *PARTS[part_of(module)]}
        and target != "fleetrun"  # its version
    ]
    assert not wrong


def runtime_part_of(module: str) -> str:
    inside = module.removeprefix("trainers").removeprefix(".")
    return inside if inside in RUNTIME_PARTS else inside.partition(".")[0]


def test_every_part_of_the_runtime_has_its_layer():
    assert {runtime_part_of(name) for name in modules() if package_of(name) == "trainers"} == set(
        RUNTIME_PARTS
    )


def test_the_runtime_imports_downwards():
    wrong = [
        f"{module} -> {target}"
        for module, target in edges()
        if package_of(module) == package_of(target) == "trainers"
        if target != "trainers"  # `from trainers import fleet`
        if runtime_part_of(target)
        not in {runtime_part_of(module), *RUNTIME_PARTS.get(runtime_part_of(module), ())}
    ]
    assert not wrong


def test_no_layer_of_the_runtime_is_above_itself():
    assert not cycles(RUNTIME_PARTS)


def test_no_folders_import_each_other():
    graph = {name: {each for each in found if each in modules()} for name, found in imports_of().items()}
    assert not cycles(folder_graph({name: found for name, found in graph.items() if "trainers" in name}))


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
    assert wrong == [
        "fleetrun.doctor.check -> torch",  # in a process of its own
        "fleetrun.plots.figure -> numpy",  # only `fleetrun plot` imports it, and matplotlib needs numpy
        "fleetrun.shadow -> trainers.fleet",  # for `from fleetrun import fleet`
    ]


CHANNEL_USERS = (
    "process.hooks", "notice", "progress", "progress.channel", "progress.meter", "roles.environment",
    "data.sources", "ps.trainer.worker", "checkpoints.memory", "checkpoints.slots",
)  # fmt: skip

# Of the contract's variables they need no more than how an endpoint is written.
ENDPOINT_READERS = (
    "collective.group", "data.exchange", "ps.transport", "roles.environment", "roles.makers", "roles.parsing",
)  # fmt: skip


def test_the_contract_is_the_only_bridge_between_the_packages():
    bridges = {
        (module, target)
        for module, target in edges()
        if package_of(module) == "trainers"
        and package_of(target) == "fleetrun"
        and part_of(target) not in ("aliases", "frozen")
    }
    assert bridges == {
        *((f"trainers.{module}", "fleetrun.envs.contract") for module in ENDPOINT_READERS),
        ("trainers.roles.environment", "fleetrun.envs.mpi"),  # the same question, asked of mpirun's variables
        ("trainers.ps.transport", "fleetrun.envs.curve"),  # the same CURVE sockets as the embedded store's
        ("trainers.progress.meter", "fleetrun.envs.progress_report"),
        *((f"trainers.{module}", "fleetrun.envs.channels") for module in CHANNEL_USERS),
    }


def test_the_contract_stands_on_the_standard_library():
    seen: set[str] = set()
    waiting = [
        "fleetrun.envs.contract", "fleetrun.envs.channels", "fleetrun.envs.mpi",
        "fleetrun.envs.progress_report",
    ]  # fmt: skip
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting += [target for target in imports_of()[module] if target in modules() and target not in seen]
    outside = {package_of(target) for module in seen for target in imports_of()[module] - seen}
    assert seen == {
        "fleetrun.aliases", "fleetrun.envs.channels", "fleetrun.envs.contract", "fleetrun.envs.mpi",
        "fleetrun.envs.progress_report", "fleetrun.frozen", "fleetrun.proc", "fleetrun.values",
    }  # fmt: skip
    assert outside <= set(sys.stdlib_module_names)


def test_the_servers_know_nothing_of_the_face():
    wrong = [
        f"{module} -> {target}"
        for module, target in edges()
        if module.startswith("trainers.ps") and target in ("trainers", "trainers.fleet")
    ]
    assert not wrong


def test_no_import_goes_in_circles():
    assert not cycles(
        {name: {each for each in found if each in modules()} for name, found in imports_of().items()}
    )


def test_the_guard_against_that_sees_it():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_the_launcher_starts_without_what_is_slow():
    code = (
        "import sys, fleetrun.__main__, fleetrun.cli, fleetrun.launcher.local\n"
        "slow = {'torch', 'numpy', 'rich', 'psutil', 'zmq', 'click', 'asyncio', 'pynvml', 'trainers'}\n"
        "print(*sorted(slow & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []


DEAR = {
    "ast", "asyncio", "click", "dataclasses", "difflib", "dis", "encodings.idna", "hashlib",
    "importlib.metadata", "inspect", "logging", "numpy", "psutil", "random", "rich", "shlex", "ssl", "string",
    "tempfile", "textwrap", "tokenize", "tomllib", "torch", "traceback", "trainers", "uuid", "zmq",
}  # fmt: skip
"""Imports that take a millisecond or more, or memory, and can wait until something needs them."""
LATE = tuple(
    f"fleetrun.{name}"
    for name in ("commands", "completion", "doctor", "elastic", "exporters", "jobfile", "plots", "stacks")
) + tuple(
    f"fleetrun.console.{name}" for name in ("status_line", "status_text", "jsonlines", "nodes", "dry_run")
)
"""Parts that a launch of nothing but processes on one machine does not need."""

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
    ours = {name for name in modules if name.startswith("fleetrun.")}
    assert not [name for name in sorted(ours) if name.startswith(LATE)]


# ---- what no file has

DANGEROUS_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
DANGEROUS_CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load"}


def test_nothing_is_unpickled():
    """But functions and their values, in a folder to which no other user can write."""
    found = {(module, target) for module, target in edges() if package_of(target) in DANGEROUS_MODULES}
    assert found == {("fleetrun.function", "pickle"), ("fleetrun.function", "cloudpickle")}


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


@pytest.mark.slow
def test_nothing_runs_text_as_a_program():
    found = [f"{module}, {danger}" for module, tree in modules().items() for danger in dangers(tree)]
    assert not found


@pytest.mark.parametrize(
    "text", ["eval('1')", "os.system('x')", "run(['x'], shell=True)", "run(['x'], shell=want)"]
)
def test_the_guard_against_dangers_sees_them(text):
    assert list(dangers(ast.parse(text)))


OWN_GENERATORS = {
    "random": {"Random", "SystemRandom"},
    "numpy.random": {
        "default_rng", "Generator", "RandomState", "SeedSequence", "BitGenerator", "PCG64", "Philox",
    },
}  # fmt: skip
"""What of a module draws nothing from its global generator."""
READS = {"getstate", "get_state", "get_rng_state"}
TORCH_DRAWS = {
    "bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "binomial", "manual_seed", "seed", "random_split", "RandomSampler",
    "WeightedRandomSampler", "DataLoader", "dropout",
}  # fmt: skip
"""Of torch and what is in it; without `generator=` they draw from the global one."""
IN_PLACE_DRAWS = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_", "sparse_",
}  # fmt: skip
MAY_DRAW = ("trainers.zoo", "trainers.examples")
"""They are of the script: a model's first values are drawn as torch's own layers draw theirs."""


def full_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                each.asname or each.name.partition(".")[0]: each.name
                if each.asname
                else package_of(each.name)
                for each in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def draws(tree: ast.AST) -> Iterator[str]:
    """Uses of generators that a script may have seeded."""
    names = full_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            head, _, rest = ast.unparse(node).partition(".")
            module, _, name = f"{names.get(head, '')}.{rest}".rstrip(".").rpartition(".")
            if module in OWN_GENERATORS and name not in OWN_GENERATORS[module] | READS:
                yield f"line {node.lineno}: {module}.{name}"
        if isinstance(node, ast.Call) and not any(each.arg == "generator" for each in node.keywords):
            head, _, rest = ast.unparse(node.func).partition(".")
            full = f"{names.get(head, head)}.{rest}".rstrip(".")
            name = full.rpartition(".")[2]
            if name in IN_PLACE_DRAWS or (
                full.startswith("torch.") and "Generator(" not in full and name in TORCH_DRAWS
            ):
                yield f"line {node.lineno}: {full}"


def test_the_runtime_draws_from_no_generator_of_the_script():
    """Ranks that shuffle alike by a seed would drift apart."""
    found = [
        f"{module}, {draw}"
        for module, tree in modules().items()
        if package_of(module) == "trainers" and not module.startswith(MAY_DRAW)
        for draw in draws(tree)
    ]
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "import random\nrandom.uniform(0, 1)", "from random import shuffle\nshuffle([1])",
        "import random\ndraw = random.random", "import numpy as np\nnp.random.rand(3)",
        "import numpy as np\nnp.random.seed(1)", "from numpy.random import rand\nrand(3)",
        "from numpy import random\nrandom.permutation(3)", "import numpy\nnumpy.random.shuffle([])",
        "import torch\ntorch.rand(3)", "from torch import randperm\nrandperm(3)", "x.uniform_(0, 1)",
        "import torch\ntorch.manual_seed(0)", "from torch.utils.data import DataLoader\nDataLoader(data)",
        "import torch.nn as nn\nnn.init.kaiming_normal_(w)", "import torch\ntorch.empty(3).normal_()",
    ],
)  # fmt: skip
def test_the_guard_against_that_sees_each_way_to_draw(text):
    assert list(draws(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "import random\nrandom.Random(3).uniform(0, 1)", "import random\nrandom.getstate()",
        "import numpy as np\nnp.random.default_rng(3).random()", "import torch\ntorch.rand(3, generator=g)",
        "import numpy as np\nx: np.random.Generator", "self._random.uniform(0, 1)", "x.normal_(generator=g)",
        "import torch\ntorch.set_rng_state(before)", "import torch\ntorch.Generator().manual_seed(0)",
    ],
)  # fmt: skip
def test_a_generator_of_its_own_is_no_such_way(text):
    assert not list(draws(ast.parse(text)))


def test_no_file_has_grown_out_of_sight():
    """An alarm, not a goal: a file of this length is probably two."""
    assert not [str(path) for path in FILES if len(path.read_text().splitlines()) > ALARM]


def test_the_product_has_not_grown():
    limit = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["house"]["tokens"]
    found = tokens()
    assert found <= limit, f"{found} tokens, and [tool.house] of pyproject.toml allows {limit}"


def test_comments_docstrings_and_blank_lines_have_no_size():
    assert code("x = 1\n") == (1, 3)
    assert code('"""Doc."""\n\n# why\nx = 1  # one\n') == (1, 3)
    assert code('def f():\n    """Doc."""\n    return "text"\n') == (2, 7)


def test_the_picture_in_the_documentation_is_of_this_code():
    """Otherwise: `python tools/house.py --picture docs/pictures/architecture.svg`."""
    assert (ROOT / "docs" / "pictures" / "architecture.svg").read_text() == picture()


SPOKEN = {"told", "said", "heard", "gone", "ways", "begun", "tell", "tells", "hear", "hears", "say", "says"}
"""Write the word for the thing instead: `reported`, `fields`, `last_seen`, `ended`, `modes`, `started`."""
SPOKEN_BY_OTHERS = {
    ("fleetrun.commands.report", "tell"): "the position in a file",
    ("trainers.checkpoints.torch_storage", "tell"): "the position in a file, which torch asks for",
}


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for name in ("id", "attr", "arg", "name", "asname"):
            if isinstance(found := getattr(node, name, None), str):
                yield found


def spoken(tree: ast.AST) -> set[str]:
    """The identifiers with one of these words between underscores and capitals."""
    parts = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
    return {name for name in identifiers(tree) if SPOKEN & {part.lower() for part in parts.findall(name)}}


def test_names_say_what_a_thing_is():
    found = {(module, name) for module, tree in modules().items() for name in spoken(tree)}
    assert found == SPOKEN_BY_OTHERS.keys()


@pytest.mark.parametrize(
    "text", ["told = 1", "a._said", "f(heard=1)", "class AllGone: ...", "def f(ways): ...", "f'{_BEGUN}'"]
)
def test_the_guard_against_such_names_sees_them(text):
    assert len(spoken(ast.parse(text))) == 1


def test_every_module_has_a_docstring():
    silent = [
        name
        for path in FILES
        for name in [module_name(path)]
        if path.name != "__init__.py" and not ast.get_docstring(modules()[name])
    ]
    assert not silent


def test_the_tested_versions_of_packages_run_in_the_oldest_python() -> None:
    """Debian 12 has 3.11.2, and pip refuses a package that wants 3.11.5."""
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    newer = {
        each.metadata["Name"]: wanted
        for each in distributions()
        if (wanted := each.metadata["Requires-Python"])
        and not SpecifierSet(wanted).contains(f"{oldest.removeprefix('>=')}.0")
    }
    assert newer == {}
