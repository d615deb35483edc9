"""Compilation: once for a machine, whoever starts, and never from old sources."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.waiting import eventually

SAYS = "compiling kernels"
ROOT = Path(__file__).resolve().parents[4]

SHARED = """
import numba.core.event as event
from trainers.ps.tables.rules import Adagrad
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.tables.warm import warm_up_server, warm_up_trainer
with event.install_recorder("numba:compile") as recorder:
    {}
print(*(e.data["dispatcher"].py_func.__name__ for _, e in recorder.buffer if e.is_start))
"""
STUCK = """
import sys
import numba.core.event as event

class Stuck(event.Listener):
    def on_start(self, event):
        print("compiling", flush=True)
        sys.stdin.readline()

    def on_end(self, event):
        pass

event.register("numba:run_pass", Stuck())
"""
SPEC = "TableSpec(kind=TableKind.SPARSE, name='rows', size=9, rule=Adagrad())"


def start(code: str, environment: Mapping[str, str], folder: Path = ROOT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        cwd=folder,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def outcome(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, said = process.communicate(timeout=250)
    assert process.returncode == 0, said
    return out, said


@pytest.mark.slow
def test_a_server_and_a_trainer_share_the_work_of_a_first_start(tmp_path: Path) -> None:
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    calls = "warm_up_server()", f"warm_up_trainer([{SPEC}], geo=False, bags=True)"
    server, trainer = (start(SHARED.format(call), cache) for call in calls)
    (compiled, said), (compiled_too, said_too) = outcome(server), outcome(trainer)
    names = [name for name in (compiled + compiled_too).split() if name != "impl"]  # numba's own
    assert sorted(names) == sorted(set(names)), "each by one of them"
    assert {"insert", "pull", "adagrad_rows", "unique_kernel"} <= set(names)
    assert not {"sparse_adam_rows", "shrink", "read"} & set(names), "what the job does not need"
    assert (said + said_too).count(SAYS) == 1
    again = start(SHARED.format(calls[0]), cache)
    assert outcome(again) == ("\n", "")


CALL = "from kernels.outer import outer; print(outer(1))"
INNER = "from trainers.kernels.compiled import compiled\n\n@compiled\ndef inner(x):\n    return x + {}\n"
OUTER = (
    "from trainers.kernels.compiled import compiled\nfrom kernels.inner import inner\n\n"
    "@compiled\ndef outer(x):\n    return inner(x)\n"
)


ONCE = CALL + "; print(len(outer.stats.cache_misses))"


def package(folder: Path) -> dict[str, str]:
    """Two kernels there, one of which calls the other. The environment in which they are found."""
    kernels = folder / "kernels"
    kernels.mkdir()
    (kernels / "inner.py").write_text(INNER.format(1))
    (kernels / "outer.py").write_text(OUTER)
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def stuck(environment: Mapping[str, str], folder: Path) -> subprocess.Popen[str]:
    """One that compiles, and goes on when it is told to."""
    process = start(STUCK + ONCE, environment, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    return process


def wait_for_lock(process: subprocess.Popen[str]) -> None:
    """Until it waits for a lock that another one has."""
    waits = re.compile(rf"-> FLOCK .* {process.pid} ")
    eventually(lambda: waits.search(Path("/proc/locks").read_text()), within=200)


@pytest.mark.slow
def test_of_several_processes_one_compiles(tmp_path: Path) -> None:
    environment = package(tmp_path)
    first = stuck(environment, tmp_path)
    others = [start(ONCE, environment, tmp_path) for _ in range(2)]
    for each in others:
        wait_for_lock(each)
    out, said = first.communicate("", timeout=250)
    assert out.splitlines()[-2:] == ["2", "1"]
    assert said.count(SAYS) == 1
    assert [outcome(each) for each in others] == [("2\n0\n", "")] * 2
    assert outcome(start(ONCE, environment, tmp_path)) == ("2\n0\n", "")


@pytest.mark.slow
def test_a_process_that_dies_while_it_compiles_holds_up_nobody(tmp_path: Path) -> None:
    environment = package(tmp_path)
    first = stuck(environment, tmp_path)
    waiting = start(ONCE, environment, tmp_path)
    wait_for_lock(waiting)
    first.kill()
    assert SAYS in first.communicate()[1]
    assert outcome(waiting)[0] == "2\n1\n"


@pytest.mark.slow
def test_a_change_of_a_function_in_another_file_is_seen(tmp_path: Path) -> None:
    """numba itself looks at the caller's file only. The change looks older than what was compiled."""
    environment, kernels = package(tmp_path), tmp_path / "kernels"
    assert outcome(start(CALL, environment, tmp_path))[0] == "2\n"
    (kernels / "inner.py").write_text(INNER.format(10))
    os.utime(kernels / "inner.py", (1e9, 1e9))
    assert outcome(start(CALL, environment, tmp_path))[0] == "11\n"


def test_the_runtime_starts_without_numba() -> None:
    code = "import sys, trainers\nprint(sorted({'numba', 'llvmlite'} & sys.modules.keys()))"
    assert outcome(start(code, {}))[0] == "[]\n"


@pytest.mark.parametrize(("word", "code", "said"), [("--help", 0, "usage: "), ("--hlep", 2, "unrecognized")])
def test_the_command_compiles_nothing_for_its_help_or_a_typo(tmp_path: Path, word: str, code: int, said: str):
    command = [sys.executable, "-m", "trainers.ps", word]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True)
    assert not list(tmp_path.iterdir())
