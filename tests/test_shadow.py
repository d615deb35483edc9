"""Another `trainers` on the search path: which of the two Python imports, and to whom it matters."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fleetrun.shadow import OURS, Shadow, find_shadow, shadow_of_failure, shadow_of_script

EMPTY: Mapping[str, str] = {}


def script_in(folder: Path, source: str = "") -> tuple[str, ...]:
    (folder / "train.py").write_text(source)
    return (sys.executable, "-u", str(folder / "train.py"))


def package(folder: Path, *modules: str, name: str = "trainers") -> Path:
    (folder / name).mkdir(parents=True)
    for module in modules:
        (folder / name / f"{module}.py").touch()
    return folder / name


def test_there_is_none(tmp_path: Path) -> None:
    assert find_shadow(script_in(tmp_path), EMPTY) is None


def test_a_package_beside_the_script(tmp_path: Path) -> None:
    theirs = package(tmp_path, "__init__", "mine")
    assert find_shadow(script_in(tmp_path), EMPTY) == Shadow(theirs, hides_ours=True)


def test_the_script_is_a_link(tmp_path: Path) -> None:
    theirs = package(tmp_path / "real", "__init__")
    script_in(tmp_path / "real")
    (tmp_path / "train.py").symlink_to(tmp_path / "real" / "train.py")
    shadow = find_shadow((sys.executable, "-u", str(tmp_path / "train.py")), EMPTY)
    assert shadow == Shadow(theirs, hides_ours=True)


def test_a_file_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "trainers.py").touch()
    assert find_shadow(script_in(tmp_path), EMPTY) == Shadow(tmp_path / "trainers.py", hides_ours=True)


def test_a_folder_without_init_is_hidden_by_an_installed_package(tmp_path: Path) -> None:
    theirs = package(tmp_path, "mine")
    assert find_shadow(script_in(tmp_path), EMPTY) == Shadow(theirs, hides_ours=False)


def test_in_pythonpath(tmp_path: Path) -> None:
    theirs = package(tmp_path / "lib", "__init__")
    paths = {"PYTHONPATH": f"/nowhere:{tmp_path / 'lib'}"}
    assert find_shadow(script_in(tmp_path), paths) == Shadow(theirs, hides_ours=True)
    ours_first = {"PYTHONPATH": f"{OURS.parent}:{tmp_path / 'lib'}"}
    assert find_shadow(script_in(tmp_path), ours_first) == Shadow(theirs, hides_ours=False)


def test_of_a_module_the_working_directory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = package(tmp_path, "__init__")
    monkeypatch.chdir(tmp_path)
    argv = (sys.executable, "-u", "-m", "job")
    assert find_shadow(argv, EMPTY) == Shadow(theirs, hides_ours=True)
    assert find_shadow(argv, {"PYTHONSAFEPATH": "1"}) is None


def test_another_copy_of_fleetrun_is_none(tmp_path: Path) -> None:
    package(tmp_path, "__init__")
    package(tmp_path, "__init__", "__main__", name="fleetrun")
    assert find_shadow(script_in(tmp_path), EMPTY) is None


@pytest.mark.parametrize(
    ("source", "matters"),
    [
        ("from trainers import fleet", True),
        ("from trainers import Slot, get_rank as rank", True),
        ("def main():\n    from trainers.inference import load_inference_model", True),
        ("import trainers.progress", True),
        ("import trainers\ntrainers.fleet.init()", True),
        ("from fleetrun import fleet", True),
        ("import fleetrun\nfleetrun.fleet.init()", True),
        ("from trainers import mine", False),
        ("from trainers.metrics import f1", False),
        ("from .trainers import fleet", False),
        ("import os  # from trainers import fleet", False),
        ("not Python", False),
    ],
)
def test_to_which_script_it_matters(tmp_path: Path, source: str, matters: bool) -> None:
    package(tmp_path, "__init__", "mine", "metrics")
    assert (shadow_of_script(script_in(tmp_path, source), EMPTY) is not None) == matters


def test_a_script_that_loads_the_runtime_by_its_other_name_hides_the_package(tmp_path: Path) -> None:
    theirs = package(tmp_path, "__init__")
    argv = script_in(tmp_path, "from fleetrun import fleet\nfrom trainers.metrics import Auc")
    assert shadow_of_script(argv, EMPTY) == Shadow(theirs, hides_ours=False)


def test_a_script_that_means_the_hidden_folder(tmp_path: Path) -> None:
    package(tmp_path, "mine")
    assert shadow_of_script(script_in(tmp_path, "from trainers import fleet"), EMPTY) is None
    assert shadow_of_script(script_in(tmp_path, "from trainers.mine import net"), EMPTY) is not None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ModuleNotFoundError: No module named 'trainers.mine'", True),
        ("ImportError: cannot import name 'fleet' from 'trainers' (/job/trainers/__init__.py)", True),
        ("AttributeError: module 'trainers' has no attribute 'fleet'", True),
        ("ModuleNotFoundError: No module named 'trainersets'", False),
        ("ValueError: trainers", False),
    ],
)
def test_what_a_process_fails_of(tmp_path: Path, text: str, found: bool) -> None:
    package(tmp_path, "__init__")
    argv = script_in(tmp_path)
    assert (shadow_of_failure(text, argv, EMPTY) is not None) == found


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    argv = script_in(folder, source)
    environment = {"PYTHONPATH": str(OURS.parent)}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=200)


def test_the_name_is_taken(tmp_path: Path) -> None:
    theirs = package(tmp_path, "__init__")
    done = run(tmp_path, "import trainers\nfrom fleetrun import fleet")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError")
    assert str(theirs) in last
    assert str(OURS) in last


CHEAP = """
import sys
before = set(sys.modules)
import fleetrun
assert not hasattr(fleetrun, 'no_such_name')
assert not {'torch', 'trainers', 'typing', 'fleetrun.shadow'} & (sys.modules.keys() - before)
"""


def test_the_launcher_stays_cheap_to_import(tmp_path: Path) -> None:
    done = run(tmp_path, CHEAP)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_same_object(tmp_path: Path) -> None:
    same = "from fleetrun import fleet as one\nfrom trainers import fleet as other\nassert one is other\n"
    same += "from trainers.metrics import Auc"
    done = run(tmp_path, same)
    assert done.returncode == 0, done.stderr
    package(tmp_path, "__init__")
    done = run(tmp_path, same)
    assert done.returncode == 0, done.stderr
