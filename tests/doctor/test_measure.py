"""What is looked at on this machine. Most of it can only be there or not; folders are made to be hostile."""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fleetrun.doctor import measure
from fleetrun.doctor.facts import Torch
from fleetrun.doctor.visit import at_once
from fleetrun.host.cgroups import Groups


def test_a_folder_that_is_there_and_one_that_will_be_made(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "not" / "yet"):
        found = measure.folder(path)
        assert (found.error, found.path) == ("", str(path))
        assert found.space is not None
        assert found.speed is None or found.speed > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left there"


def test_a_process_that_stands_still_as_it_begins_makes_no_disk_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_LONGEST", 0.0)
    found = measure.folder(tmp_path)
    assert found.speed is None or found.speed > 0


def test_a_folder_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert measure.folder(Path("log")).error == ""


def test_a_folder_named_from_a_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert measure.folder(Path("log")).error == "No such file or directory"


@pytest.mark.parametrize("kind", ["file", "fifo", "socket", "dangling"])
def test_what_is_no_folder(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "log"
    if kind == "file":
        path.touch()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    else:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("log")
    assert measure.folder(path).error
    assert measure.folder(path / "below").error


def test_a_file_system_that_takes_no_files() -> None:
    assert measure.folder(Path("/proc/1")).error
    assert measure.unwritable(Path("/proc/not/there"))


def test_whether_a_folder_can_be_written_to(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "not" / "yet"):
        assert measure.unwritable(path) == ""
    assert list(tmp_path.iterdir()) == [], "nothing is left there"
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert measure.unwritable(path) == "Not a directory"


def test_the_kind_of_a_file_system() -> None:
    found = measure.space(Path("/proc"))
    assert found is not None
    assert found.kind == "proc"
    assert measure.space(Path("/nowhere/at/all")) is None


def test_this_machine() -> None:
    cores, memory, limits = measure.cores(), measure.memory(), measure.limits()
    assert 1 <= cores.visible <= cores.total
    assert 0 < memory.available <= memory.total
    assert limits.tasks >= 1
    assert limits.open_files is None or limits.open_files > 0


def test_the_network_of_this_machine() -> None:
    found = measure.network("localhost")
    assert set(found.own) & {"127.0.0.1", "::1"}
    assert found.name == socket.gethostname()
    assert "127.0.0.1" in {address for nic in found.nics for address in nic.addresses}
    assert found.clients[0] < found.clients[1]


def test_names_that_cannot_be_asked_for_have_no_address() -> None:
    """Linux takes a host name of 64 letters, the name service of 63."""
    assert measure.network("h" * 64).own == ()


def test_all_at_once_and_nobody_waits_for_what_never_answers() -> None:
    over = threading.Event()
    try:
        found = at_once({"quick": lambda: 1, "never": over.wait}, {"quick": 60.0, "never": 0.01})
        assert found == {"quick": 1}
    finally:
        over.set()


def test_a_driver_that_may_not_be_there() -> None:
    found = measure.ask_driver(("0", "GPU-of-nobody"))
    assert bool(found.error) != bool(found.version)
    assert "GPU-of-nobody" not in {gpu.id for gpu in found.gpus}


# ---- What control groups leave, read from folders as the kernel shows them.

MIB, GIB = 1 << 20, 1 << 30
UNLIMITED = 9223372036854771712
"""What version 1 says of a group without a limit."""


GroupsOf = Callable[[str, Mapping[str, object]], Groups]


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GroupsOf:
    def made(membership: str, files: Mapping[str, object]) -> Groups:
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        (tmp_path / "membership").write_text(membership)
        return Groups()

    monkeypatch.setattr("fleetrun.host.cgroups.ROOT", tmp_path / "cgroup")
    monkeypatch.setattr("fleetrun.host.cgroups.MEMBERSHIP", tmp_path / "membership")
    return made


TWO = "0::/user/job\n"
ONE = "9:name=systemd:/\n4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:pids:/docker/abc\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (TWO, {"user/job/cpu.max": "150000 100000", "user/cpu.max": "max 100000"}, 1.5),
        (TWO, {"user/job/cpu.max": "max 100000", "user/cpu.max": "50000 100000"}, 0.5),
        (TWO, {"user/job/cpu.max": "max 100000"}, None),
        (TWO, {"cpu.max": "200000 100000"}, 2.0),
        (ONE, {"cpu/docker/abc/cpu.cfs_quota_us": 400000, "cpu/docker/abc/cpu.cfs_period_us": 100000}, 4.0),
        (ONE, {"cpu/cpu.cfs_quota_us": 400000, "cpu/cpu.cfs_period_us": 100000}, 4.0),
        (ONE, {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, None),
        (ONE, {"unified/cpu.max": "100000 100000"}, 1.0),
        (TWO, {"user/job/cpu.max": "100000 0"}, None),
        ("", {}, None),
        ("nonsense\n1:2\n", {}, None),
    ],
)
def test_processors(
    groups: GroupsOf, membership: str, files: Mapping[str, object], expected: float | None
) -> None:
    assert groups(membership, files).processors() == expected


def test_what_the_cache_holds_of_files_is_free(groups: GroupsOf) -> None:
    """A container that has read a data set is full of it, and nothing is wrong."""
    stat = f"anon {GIB}\nfile {6 * GIB}\nshmem 0\ninactive_file {4 * GIB}\nactive_file {2 * GIB}"
    found = groups(
        TWO,
        {
            "user/job/memory.max": 8 * GIB,
            "user/job/memory.current": 7 * GIB + 512 * MIB,
            "user/job/memory.stat": stat,
            "user/memory.max": "max",
            "user/memory.current": 20 * GIB,
        },
    )
    assert list(found.memory()) == [(8 * GIB, 6 * GIB + 512 * MIB)]


def test_memory_of_version_1(groups: GroupsOf) -> None:
    found = groups(
        ONE,
        {
            "memory/docker/abc/memory.limit_in_bytes": 2 * GIB,
            "memory/docker/abc/memory.usage_in_bytes": 2 * GIB,
            "memory/docker/abc/memory.stat": f"inactive_file 5\ntotal_inactive_file {MIB}",
            "memory/memory.limit_in_bytes": UNLIMITED,
            "memory/memory.usage_in_bytes": 9 * GIB,
        },
    )
    assert list(found.memory()) == [(2 * GIB, MIB), (UNLIMITED, UNLIMITED - 9 * GIB)]
    facts = measure.memory()
    assert (facts.total, facts.available) == (2 * GIB, MIB)


def test_a_group_that_holds_more_than_it_may(groups: GroupsOf) -> None:
    """The limit was lowered just now."""
    files = {"user/job/memory.max": MIB, "user/job/memory.current": GIB}
    assert list(groups(TWO, files).memory()) == [(MIB, 0)]


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (TWO, {"user/job/pids.max": 100, "user/job/pids.current": 60}, (100, 60)),
        (TWO, {"user/job/pids.max": "max", "user/job/pids.current": 60}, None),
        (TWO, {"user/job/pids.max": 100, "user/job/pids.current": 1, "user/pids.max": 50,
               "user/pids.current": 45}, (50, 45)),
        (ONE, {"pids/pids.max": 30, "pids/pids.current": 4}, (30, 4)),
    ],
)  # fmt: skip
def test_tasks_are_those_that_the_limit_counts(
    groups: GroupsOf, membership: str, files: Mapping[str, object], expected: tuple[int, int] | None
) -> None:
    """Not those of the user, who may have others elsewhere, and none of those here."""
    groups(membership, files)
    facts = measure.limits()
    if expected is not None:
        assert (facts.tasks_allowed, facts.tasks) == expected
    else:
        assert facts.tasks >= 1


# ---- Asking torch: of one that is none, lies, dies or never ends. (The real one takes too long for a test.)

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
    for row in ({"version": 1}, {"cuda": None}, {"backends": 3}, {"seconds": "x"}):
        assert "cannot read" in measure.read_torch(json.dumps(row)).error


def test_a_long_error_is_cut() -> None:
    found = measure.read_torch(json.dumps({"error": "x\n" * 10_000}))
    assert len(found.error) < 400
    assert "\n" not in found.error


def test_this_python_is_asked_by_default() -> None:
    assert measure.ask_torch.__defaults__ is not None
    assert measure.ask_torch.__defaults__[0] == sys.executable
