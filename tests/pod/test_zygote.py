"""The zygotes of a launcher: their lists of imports, and the scan of a script."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

import fleetrun
from fleetrun.envs.channels import FILES_SUFFIX, IMPORTS_SUFFIX, PROBE_VARIABLE, TREE_VARIABLE
from fleetrun.envs.contract import Role
from fleetrun.pod.loop import Loop
from fleetrun.pod.spec import ContainerSpec
from fleetrun.pod.zygote import Zygotes, _common, _state_of, _until_set, is_python, pack, unpack

TORCH, NUMPY = ("torch", "/site-packages/torch.py", {"A": "1"}), ("numpy", "/n.py", {"B": None})


def test_a_list_goes_there_and_back():
    assert unpack(pack([TORCH, NUMPY], ("c",), "text")) == ([TORCH, NUMPY], ("c",), "text")


@pytest.mark.parametrize(
    "data",
    [b"", b"text", zlib.compress(b"{"), zlib.compress(b"[1]"), zlib.compress(b'[["a", "b", []]]')[:-6]],
)
def test_what_is_no_list_is_an_error(data: bytes):
    with pytest.raises(ValueError, match=r"imports|JSON|Expecting|unpack"):
        unpack(data)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (["a", "b", "c"], ["a", "c"], ["a", "c"]),
        (["a", "b=1", "c"], ["a", "b=2", "c"], ["a"]),
        (["a", "b=1", "c"], ["a", "c=1"], ["a"]),
        (["a", "b=1", "c"], ["a", "b=1", "c", "d"], ["a", "b=1", "c"]),
    ],
)
def test_processes_have_imports_in_common(one: list[str], other: list[str], both: list[str]):
    def rows(words: list[str]) -> list[list[object]]:
        parts = [word.partition("=") for word in words]
        return [[name, f"/{name}.py", {"X": value} if value else {}] for name, _, value in parts]

    lists = {json.dumps({"modules": rows(words)}).encode()[1:] for words in (one, other)}
    assert _common(lists) == rows(both)


def test_a_list_is_kept_when_all_processes_of_a_zygote_have_written_theirs(tmp_path: Path):
    def container(role: Role, rank: int, *names: str) -> SimpleNamespace:
        probe = tmp_path / f"{role}.{rank}"
        rows = [[name, f"/{name}.py", {}] for name in names]
        Path(f"{probe}{IMPORTS_SUFFIX}").write_text(json.dumps({"pid": rank + 1, "modules": rows}))
        env = {PROBE_VARIABLE: str(probe), "ROLE": role}
        argv = (sys.executable, "train.py")
        log = tmp_path / "missing" / "log"  # no zygote can be started with it
        spec = ContainerSpec(role=role, rank=rank, index=rank, argv=argv, env=env, log=log)
        return SimpleNamespace(spec=spec, restarts=0)

    server = container(Role.SERVER, 0, "a")
    trainers = [container(Role.TRAINER, 0, "a", "b"), container(Role.TRAINER, 1, "b", "c")]
    loop, folder = Loop(), tmp_path / "run"
    zygotes = Zygotes(loop, set(), pytest.fail, pytest.fail, folder)
    zygotes.set_pod(SimpleNamespace(containers=[server, *trainers]))  # type: ignore[arg-type]
    counts = []
    for each in (server, *trainers):
        zygotes.learn(each.spec, 77)  # another process has written it
        zygotes.learn(each.spec, each.spec.rank + 1)
        counts.append(len(list(folder.glob("*.imports"))))
    assert counts == [1, 1, 2]
    kept = [unpack(each.read_bytes())[0] for each in folder.glob("*.imports")]
    assert sorted(kept) == [[("a", "/a.py", {})], [("b", "/b.py", {})]]
    loop.close()


@pytest.mark.parametrize(
    ("words", "python"),
    [
        (["-u", "train.py", "-I"], True),
        (["-u", "-m", "train"], True),
        (["-X", "utf8", "-Werror", "-c", "pass"], True),
        (["-I", "train.py"], False),
        (["-uE", "train.py"], False),
        (["-X", "dev", "-S", "train.py"], False),
        ([], False),
    ],
)
def test_a_python_loads_the_probe(words: list[str], python: bool):
    assert is_python((sys.executable, *words)) is python
    assert is_python(("taskset", "--cpu-list", "0", sys.executable, *words)) is python
    assert not is_python(("/bin/sh", *words))


INSIDE = Path(fleetrun.__file__).parent / "probe" / "inside"

IMPORT = """
import json, sys
sys.path.insert(0, sys.argv[3])
import fleetrun_imports
try:
    fleetrun_imports.import_all(json.loads(sys.argv[1]), (), lambda name: None)
except fleetrun_imports.Refused as refusal:
    print("refused", refusal)
print("colorsys" in sys.modules)
"""


def import_all(folder: Path, *modules) -> list[str]:
    """What a zygote says of this list; the script is in this folder."""
    script = folder / "train.py"
    script.write_text(
        IMPORT.replace("sys.argv[1]", repr(json.dumps(modules))).replace("sys.argv[3]", repr(str(INSIDE)))
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


def installed(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}; print({name}.__file__)"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_a_zygote_runs_nothing_of_a_module_that_is_not_installed(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    for name in ("mine/__init__.py", "mine/part.py", "antigravity.py"):
        (tmp_path / name).write_text("print('it has run')")
    within = ["mine.part", str(tmp_path / "mine/part.py"), {}]
    assert import_all(tmp_path, within) == [
        f"refused mine is not an installed package: {tmp_path}/mine/__init__.py",
        "False",
    ]
    shadowed = import_all(tmp_path, ["antigravity", str(tmp_path / "antigravity.py"), {}])
    assert shadowed[0].startswith("refused antigravity is not an installed package"), shadowed
    program = import_all(tmp_path, ["pip.__main__", "/pip/__main__.py", {}])
    assert program == ["refused pip.__main__ is a program", "False"]


def test_a_zygote_imports_what_is_installed_where_the_list_says(tmp_path: Path):
    path = installed("colorsys")
    assert import_all(tmp_path, ["absent", "/absent.py", {}], ["colorsys", path, {}]) == ["True"]
    assert import_all(tmp_path, ["colorsys", "/other.py", {}]) == [
        "refused colorsys of the script is another one: /other.py",
        "False",
    ]


SCAN = """
import sys
sys.path[0] = {folder!r}
sys.path.insert(0, {inside!r})
sys.argv[0] = {script!r}
import fleetrun_imports
print(*dict.fromkeys(name for name, _ in fleetrun_imports.leading()))
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import json, colorsys\nprint()\nimport wave", "json colorsys"),
        ('"text"\nfrom __future__ import annotations\nLIMIT = 3\nimport wave', "__future__ __future__.annotations wave"),  # noqa: E501
        ("import os\nos.environ['A'] = '1'\nimport wave", "os"),
        ("def f(): import wave\nclass C:\n    x = 1\n    def f(self): pass\nimport colorsys", "colorsys"),
        ("try:\n    import colorsys\nexcept ImportError:\n    colorsys = None\nimport wave", "colorsys wave"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import wave\nimport json", "typing typing.TYPE_CHECKING json"),  # noqa: E501
        ("if True:\n    import wave\nimport json", ""),
        ("import plain\nimport wave", "colorsys json wave"),
        ("import acts\nimport wave", "colorsys"),
        ("from package.part import x\nimport wave", "json colorsys wave"),
        ("import sys, missing\nimport wave", "wave"),
        ("import (", ""),
    ],
)  # fmt: skip
def test_the_first_imports_of_a_script(tmp_path: Path, text: str, found: str):
    (tmp_path / "plain.py").write_text(
        "import colorsys\nX = 1\ndef f(): print()\nimport json\nimport plain\n"
    )
    (tmp_path / "acts.py").write_text("import colorsys\nprint('it has run')\nimport json\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import json\n")
    (tmp_path / "package" / "part.py").write_text("from . import other\nfrom .other import x\n")
    (tmp_path / "package" / "other.py").write_text("import colorsys\nx = 1\n")
    (tmp_path / "train.py").write_text(text)
    names = {"folder": str(tmp_path), "inside": str(INSIDE), "script": str(tmp_path / "train.py")}
    done = subprocess.run(
        [sys.executable, "-c", SCAN.format(**names)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == found


SETS = [
    "os.environ['X'] = '1'\n",
    "os.environ[ 'X' ]= '1'\n",
    "os.environ['X'] += '1'\n",
    "os.environ.setdefault('X', '1')\n",
    "os.environ.update(\n    X='1',\n)\n",
    "os.environ['X'] = (\n    '1'\n)\n",
    "if True:\n    os.environ['X'] = '1'\n",
    "del os.environ['X']\n",
    "os.environb[b'X'] = b'1'\n",
    "os.putenv('X', '1')\n",
    "sys.path.insert(0, 'other')\n",
]


@pytest.mark.parametrize("text", SETS)
def test_an_edit_above_a_statement_that_sets_a_variable_may_change_its_value(text: str):
    before, after = "import os, sys\nvalue = 1\n", "import torch\nvalue = 2\n"
    assert _until_set(f"{before}{text}{after}".encode()) == f"{before}{text}".rstrip("\n").encode()


@pytest.mark.parametrize(
    "text",
    [
        "a = os.environ['X']\n",
        "os.environ.get('X') == 1\n",
        "if os.environ['X'] == '1':\n    a = 1\n",
        "# my environment\n",
    ],
)
def test_a_module_that_only_reads_variables_may_be_edited(text: str):
    assert _until_set(f"import os\n{text}".encode()) == b""


@pytest.mark.parametrize("text", ["env = os.environ\n", "from os import environ as env\n", "f(os.environ)\n"])
def test_a_module_that_passes_the_environment_on_counts_whole(text: str):
    whole = f"{text}env['X'] = '1'\nvalue = 2\n".encode()
    assert _until_set(whole) == whole


@pytest.mark.parametrize("watch", [False, True])
def test_a_pipe_beside_the_script_is_no_module(tmp_path: Path, watch: bool):
    (tmp_path / "train.py").write_text("os.environ['X'] = '1'\n")
    spec = SimpleNamespace(argv=(sys.executable, str(tmp_path / "train.py")), role=Role.TRAINER, env={})
    state = _state_of(spec, watch)
    os.mkfifo(tmp_path / "other.py")
    assert _state_of(spec, watch) == state


@pytest.mark.parametrize(
    ("path", "same"), [("/lib", True), ("/lib:", False), ("src", False), ("/a:.", False)]
)
def test_a_zygote_serves_the_next_copy_unless_its_path_leads_into_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, same: bool
):
    states = set()
    for digest in ("a" * 32, "b" * 32):
        monkeypatch.setenv(TREE_VARIABLE, digest)
        (tmp_path / digest).mkdir()
        monkeypatch.chdir(tmp_path / digest)
        argv, env = (sys.executable, "train.py"), {"PYTHONPATH": path}
        states.add(_state_of(SimpleNamespace(argv=argv, role=Role.TRAINER, env=env), True))
    assert (len(states) == 1) is same


@pytest.mark.parametrize("sets", [True, False])
def test_an_edit_of_a_module_counts_if_another_module_may_set_its_value(tmp_path: Path, sets: bool):
    script, settings = tmp_path / "train.py", tmp_path / "settings.py"
    script.write_text("import os, settings\n" + "os.environ['THREADS'] = settings.THREADS\n" * sets)
    settings.write_text("THREADS = '1'\n")
    argv = (sys.executable, "-u", str(script))
    spec = ContainerSpec(role=Role.TRAINER, rank=0, index=0, argv=argv, env={}, log=tmp_path / "log")
    before = _state_of(spec, True), _state_of(spec, False)
    script.write_text(f"{script.read_text()}import torch\n")
    assert _state_of(spec, True) == before[0]
    assert _state_of(spec, False) != before[1]
    settings.write_text("THREADS = '2'\n")
    assert (_state_of(spec, True) != before[0]) is sets


NOTE = """
import os, sys
sys.path[:0] = [sys.argv[3]]
import fleetrun_imports
watch = fleetrun_imports.Watch()
sys.path[:1] = [os.path.dirname(__file__), os, "missing"]
watch.begin(sys.argv[1])
import colorsys, own, package.module
try:
    import broken
except SyntaxError:
    pass
try:
    import missing_module
except ImportError:
    pass
"""


def test_a_process_notes_the_files_of_the_modules_of_the_user(tmp_path: Path):
    for name, text in (("own", ""), ("broken", "def f(:"), ("package/__init__", ""), ("package/module", "")):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    script = tmp_path / "train.py"
    script.write_text(NOTE.replace("sys.argv[3]", repr(str(INSIDE))))
    subprocess.run([sys.executable, script, tmp_path / "probe"], check=True, timeout=60)
    lines = (tmp_path / f"probe{FILES_SUFFIX}").read_text().splitlines()
    found = {path: int(state) for state, path in (line.split(" ", 1) for line in lines)}
    missing = [tmp_path / "missing_module.py", tmp_path / "missing_module" / "__init__.py"]
    expected = {str(each): -1 for each in missing}
    for name in ("own", "broken", "package/__init__", "package/module"):
        path = tmp_path / f"{name}.py"
        expected[str(path)] = path.stat().st_mtime_ns
    assert found == expected
