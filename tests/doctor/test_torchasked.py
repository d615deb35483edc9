"""Asking torch: of one that is none, lies, dies or never ends. (The real one takes too long for a test.)"""

import json
import os
import sys
from pathlib import Path

import pytest

from fleetrun.doctor import measure
from fleetrun.doctor.facts import Torch

FAKE = """
__version__ = "9.9"
class version: cuda = "12.6"
class cuda:
    class nccl:
        @staticmethod
        def version(): return (2, 21, 5)
    @staticmethod
    def device_count(): return 2
def ones(size, device):
    if device == "cuda:1":
        raise RuntimeError("no kernel image\\nis available")
    class Tensor:
        def sum(self): return self
        def item(self): return 8.0
    return Tensor()
"""
DISTRIBUTED = """
def is_available(): return True
def is_gloo_available(): return True
def is_nccl_available(): return True
def is_mpi_available(): return False
def is_ucc_available(): return False
"""


def asked(folder: Path, text: str, distributed: str = DISTRIBUTED, patience: float = 60.0) -> Torch:
    (folder / "torch" / "distributed").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(text)
    (folder / "torch" / "distributed" / "__init__.py").write_text(distributed)
    environ = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}
    return measure.ask_torch(environ, patience=patience)


def test_what_it_says(tmp_path: Path) -> None:
    found = asked(tmp_path, f"print('hello')\n{FAKE}")
    assert (found.version, found.cuda, found.nccl, found.error) == ("9.9", "12.6", "2.21.5", "")
    assert found.backends == ("gloo", "nccl")
    assert found.kernels == ("", "RuntimeError: no kernel image is available")
    assert found.seconds > 0


def test_what_lies_in_the_current_directory_is_not_taken_for_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "json.py").write_text("raise SystemExit('a script of the user')")
    monkeypatch.chdir(here)
    assert asked(tmp_path, FAKE).version == "9.9"


def test_an_import_that_fails(tmp_path: Path) -> None:
    found = asked(tmp_path, "raise ImportError('libcudart.so.12: cannot open shared object file')")
    assert found.error == "ImportError: libcudart.so.12: cannot open shared object file"


def test_an_import_that_kills_the_process(tmp_path: Path) -> None:
    found = asked(
        tmp_path, "import os, sys; print('Illegal', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    )
    assert found.error == "`import torch` ended with signal 9: Illegal"


def test_an_import_that_leaves(tmp_path: Path) -> None:
    assert "exit code 3" in asked(tmp_path, "import os; os._exit(3)").error


def test_an_import_that_never_ends(tmp_path: Path) -> None:
    found = asked(tmp_path, "import signal; signal.pause()", patience=0.3)
    assert found.error == "`import torch` has not ended after 0.3 s"


def test_no_python(tmp_path: Path) -> None:
    assert "cannot be run" in measure.ask_torch({}, python=str(tmp_path / "none")).error


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null"])
def test_nonsense(text: str) -> None:
    assert measure.read_torch(text).error


def test_fields_of_another_kind() -> None:
    row = {"version": 1, "cuda": None, "backends": "gloo", "kernels": [1], "seconds": "x", "error": None}
    assert measure.read_torch(json.dumps(row)) == Torch(kernels=("1",))


def test_a_long_error_is_cut() -> None:
    found = measure.read_torch(json.dumps({"error": "x\n" * 10_000}))
    assert len(found.error) < 400
    assert "\n" not in found.error


def test_this_python_is_asked_by_default() -> None:
    assert measure.ask_torch.__defaults__ is not None
    assert measure.ask_torch.__defaults__[0] == sys.executable
