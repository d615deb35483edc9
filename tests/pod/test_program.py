"""Whether a script can be started, before anything is."""

import os
import tempfile
from pathlib import Path

import pytest

from fleetrun.errors import ScriptNotExecutableError, ScriptNotFoundError
from fleetrun.launch import prepare
from tests.support.isolated import isolated


@pytest.fixture
def here(tmp_path):
    """The current directory, for modules and short names."""
    before = os.getcwd()  # noqa: PTH109
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def test_a_python_script(here):
    (here / "train.py").touch()
    prepare.check_python_script("train.py")


def test_a_python_script_that_is_not_there(here):
    (here / "train.py").touch()
    with pytest.raises(ScriptNotFoundError, match=r"there is no script trian\.py") as caught:
        prepare.check_python_script("trian.py")
    assert (caught.value.exit_code, caught.value.hint) == (127, "Did you mean train.py?")


def test_nothing_like_it_is_there(here):
    with pytest.raises(ScriptNotFoundError) as caught:
        prepare.check_python_script("no/such/train.py")
    assert caught.value.hint is None


def test_a_directory(here):
    (here / "train.py").mkdir()
    for check in (prepare.check_python_script, lambda name: prepare.check_executable(f"./{name}", "")):
        with pytest.raises(ScriptNotExecutableError, match="is a directory") as caught:
            check("train.py")
        assert caught.value.exit_code == 126


def a_script_that_may_not_be_read():
    if os.getuid() == 0:  # who may read everything
        os.setuid(65534)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.touch(mode=0o000)
        with pytest.raises(ScriptNotExecutableError, match="cannot be read: permission denied"):
            prepare.check_python_script(str(script))


@pytest.mark.slow
def test_a_script_that_may_not_be_read():
    isolated(a_script_that_may_not_be_read)


@pytest.mark.parametrize(
    "module", ["json", "json.tool", "this", "zipimport", "trainers.examples.mnist", "mine", "folder"]
)
def test_modules(here, module):
    (here / "mine.py").touch()
    (here / "folder").mkdir()
    prepare.check_module(module)


@pytest.mark.parametrize("module", ["no_such_module_anywhere", "no_such.json"])
def test_a_module_that_is_not_there(here, module):
    with pytest.raises(ScriptNotFoundError, match=r"there is no module no_such") as caught:
        prepare.check_module(module)
    assert caught.value.exit_code == 127


@pytest.mark.parametrize("module", ["train/x", "./train", "a-b", "", ".x", "__main__"])
def test_what_is_no_name_of_a_module(here, module):
    with pytest.raises(ScriptNotFoundError, match="not the name of a module"):
        prepare.check_module(module)


def test_a_module_that_an_editable_install_provides(here):
    """setuptools makes such packages known by a finder of its own, and not by a folder on the path."""
    import importlib.machinery
    import sys

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, None) if name == "known_to_a_finder" else None

    sys.meta_path.append(Finder)
    try:
        prepare.check_module("known_to_a_finder.train")
    finally:
        sys.meta_path.remove(Finder)


def test_programs(here):
    (here / "run").touch(mode=0o755)
    prepare.check_executable("./run", "")
    prepare.check_executable("sh", os.environ["PATH"])
    prepare.check_executable("run", f"/nowhere:{here}")
    prepare.check_executable("run", "/nowhere:")


def test_a_program_that_may_not_be_executed(here):
    (here / "run").touch(mode=0o644)
    with pytest.raises(ScriptNotExecutableError, match="is not executable") as caught:
        prepare.check_executable("./run", "")
    assert "chmod +x ./run" in caught.value.hint


def test_a_program_that_is_not_there(here):
    with pytest.raises(ScriptNotFoundError, match=r"there is no program \./run"):
        prepare.check_executable("./run", "")
    with pytest.raises(ScriptNotFoundError, match="no program run on PATH"):
        prepare.check_executable("run", "/usr/bin")
