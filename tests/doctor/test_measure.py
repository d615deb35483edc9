"""What is looked at on this machine. Most of it can only be there or not; folders are made to be hostile."""

import os
import socket
import threading
from pathlib import Path

import pytest

from fleetrun.doctor import measure
from fleetrun.doctor.visit import at_once


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
