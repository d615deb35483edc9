"""A user's folder with the name of the runtime: told at launch, by doctor and in the failure report."""

import re
from pathlib import Path

import pytest

from fleetrun.shadow import OURS
from tests.support.command import Fleetrun


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "trainers"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "mine.py").touch()
    return folder


def without_breaks(text: str) -> str:
    return re.sub(r"\s+", "", text)


def test_at_launch_and_in_the_report(fleetrun: Fleetrun, theirs: Path) -> None:
    (fleetrun.folder / "train.py").write_text("from trainers import fleet")
    launch = fleetrun.run("--max_restart", "0", "train.py")
    assert launch.code == 1
    warned = [line for line in launch.err.splitlines() if "WARNING" in line]
    assert len(warned) == 1, launch
    assert str(theirs) in warned[0]
    assert str(OURS) in warned[0]
    hint = without_breaks(launch.err).partition("Hint:")[2]
    assert without_breaks(str(theirs)) in hint
    assert str(OURS) in hint


def test_only_a_helper_module_imports_it(fleetrun: Fleetrun, theirs: Path) -> None:
    (fleetrun.folder / "helper.py").write_text("from trainers import fleet")
    (fleetrun.folder / "train.py").write_text("import helper")
    launch = fleetrun.run("--max_restart", "0", "train.py")
    assert "WARNING" not in launch.err, launch
    assert str(OURS) in without_breaks(launch.err).partition("Hint:")[2], launch


def test_a_script_with_a_package_of_its_own(fleetrun: Fleetrun, theirs: Path) -> None:
    (fleetrun.folder / "train.py").write_text("from trainers import mine")
    launch = fleetrun.run("train.py")
    assert launch.code == 0
    assert str(theirs) not in launch.err, launch


def test_the_way_out(fleetrun: Fleetrun, theirs: Path) -> None:
    (fleetrun.folder / "train.py").write_text("from fleetrun import fleet\nfleet.init(is_collective=True)")
    launch = fleetrun.run("--nproc_per_node", "2", "train.py")
    assert launch.code == 0, launch
    assert "WARNING" in launch.err, launch


def test_doctor(fleetrun: Fleetrun, theirs: Path) -> None:
    launch = fleetrun.run("doctor", "--json")
    assert str(theirs) in launch.out, launch
    assert str(OURS) in launch.out, launch
