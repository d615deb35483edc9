"""Lists of imports that a node publishes for the standbys of spares."""

import json
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import fleetrun
from fleetrun.envs.channels import IMPORTS_SUFFIX, PROBE_VARIABLE
from fleetrun.envs.contract import Role
from fleetrun.pod.loop import Loop
from fleetrun.pod.spec import ContainerSpec
from fleetrun.pod.standby import Standbys, _listed, _packed, _unpacked


@pytest.fixture
def spec(tmp_path: Path) -> ContainerSpec:
    env = {PROBE_VARIABLE: str(tmp_path / "probe")}
    return ContainerSpec(
        role=Role.TRAINER, rank=0, index=0, argv=("python",), env=env, log=tmp_path / "trainer.0.log"
    )


def leave(spec: ContainerSpec, *modules) -> None:
    said = json.dumps({"pid": 1, "modules": modules})
    Path(spec.env[PROBE_VARIABLE] + IMPORTS_SUFFIX).write_text(said)


def test_a_list_goes_there_and_back(spec: ContainerSpec):
    torch, numpy = (
        ("torch", "/site-packages/torch.py", {"OMP_NUM_THREADS": "1"}),
        ("numpy", "/n.py", {"A": None}),
    )
    leave(spec, torch, numpy)
    assert _unpacked(_packed(spec)) == [torch, numpy]


@pytest.mark.parametrize("name", ["HF_TOKEN", "wandb_api_key", "DB_PASSWORD"])
def test_it_ends_before_the_first_secret(spec: ContainerSpec, name: str):
    leave(spec, ("a", "/a.py", {}), ("b", "/b.py", {name: "s3cret"}), ("c", "/c.py", {}))
    assert _unpacked(_packed(spec)) == [("a", "/a.py", {})]


def test_without_a_list_nothing_is_published(spec: ContainerSpec):
    assert _packed(spec) == b""


@pytest.mark.parametrize(
    "data",
    [b"", b"text", zlib.compress(b"{"), zlib.compress(b"[1]"), zlib.compress(b'[["a", "b", []]]')[:-6]],
)
def test_what_is_no_list_is_an_error(data: bytes):
    with pytest.raises(ValueError, match=r"imports|JSON|Expecting"):
        _unpacked(data)


@pytest.mark.parametrize("trusted", [True, False])
def test_what_a_stranger_may_have_written_sets_no_variable(
    spec: ContainerSpec, tmp_path: Path, trusted: bool
):
    rows = [["a", "/a.py", {}], ["b", "/b.py", {"BROWSER": "sh -c id"}], ["c", "/c.py", {}]]
    leave(spec, *rows)
    # No process can be started with this log: what it would import is what matters here.
    spec = replace(spec, argv=(sys.executable, "train.py"), log=tmp_path / "missing" / "trainer.0.log")
    standbys = Standbys(Loop(), set(), lambda text: None, lambda text: None)
    standbys.prepare([spec], _packed(spec), trusted=trusted)
    assert json.loads(_listed(spec).read_bytes())["modules"] == (rows if trusted else rows[:1])


READY = """
import os, sys
channel = int(os.environ["FLEETRUN_STANDBY"].split()[0])
print(os.getpid(), flush=True)
os.write(channel, b'{"memory": 1}\\n')
os.read(channel, 1)
"""


def test_a_container_that_is_wanted_twice_before_its_turn_has_one_standby(
    spec: ContainerSpec, tmp_path: Path
):
    """After ten seconds without a step, and at the first step, while that of another one imports."""
    script = tmp_path / "ready.py"
    script.write_text(READY)
    first = replace(spec, argv=(sys.executable, str(script)))
    second = replace(first, rank=1, index=1, log=tmp_path / "trainer.1.log")
    loop, companions, told = Loop(), set(), []

    def tell(text: str) -> None:
        told.append(text)
        loop.stop()

    standbys = Standbys(loop, companions, tell, pytest.fail)
    leave(spec)
    standbys.prepare([first, second, second], _packed(spec), trusted=True)
    loop.run()
    assert told == ["2 standbys are ready for warm restarts, with 0 MiB of memory"]
    assert [len(each.log.read_text().split()) for each in (first, second)] == [1, 1]
    standbys.close()
    while companions:  # the loop reaps them
        loop.after(0.01, loop.stop)
        loop.run()


def test_a_standby_is_started_again_if_its_process_has_imported_more_by_its_first_step(
    spec: ContainerSpec, tmp_path: Path
):
    """It was started ten seconds after the process had joined its group."""
    script = tmp_path / "ready.py"
    script.write_text(READY)
    spec = replace(spec, argv=(sys.executable, str(script)))
    container = SimpleNamespace(spec=spec, process=None, alive=True, restarts=0)
    loop, companions = Loop(), set()
    standbys = Standbys(loop, companions, lambda text: loop.stop(), pytest.fail)
    for modules, started in (([("a", "/a.py", {})], 1), ([("a", "/a.py", {}), ("b", "/b.py", {})], 2)):
        leave(spec, *modules)
        standbys._copy(container)
        loop.run()
        standbys._copy(container)
        assert len(spec.log.read_text().split()) == started
    standbys.close()
    while companions:
        loop.after(0.01, loop.stop)
        loop.run()


INSIDE = Path(fleetrun.__file__).parent / "probe" / "inside"

IMPORT = """
import json, sys
sys.path.insert(0, sys.argv[3])
import fleetrun_standby
try:
    fleetrun_standby._import_all(json.loads(sys.argv[1]), lambda name: None)
except fleetrun_standby.Refused as refusal:
    print("refused", refusal)
print("colorsys" in sys.modules)
"""


def import_all(folder: Path, *modules) -> list[str]:
    """What a standby says of this list; the script is in this folder."""
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


def test_a_standby_runs_nothing_of_a_module_that_is_not_installed(tmp_path: Path):
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


def test_a_standby_imports_what_is_installed_where_the_list_says(tmp_path: Path):
    path = installed("colorsys")
    assert import_all(tmp_path, ["absent", "/absent.py", {}], ["colorsys", path, {}]) == ["True"]
    assert import_all(tmp_path, ["colorsys", "/other.py", {}]) == [
        "refused colorsys of the script is another one: /other.py",
        "False",
    ]
