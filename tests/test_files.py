"""Files in a folder where scripts may have put anything: opened and written without waiting."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetrun.files import open_plain, replace_file, run_folder

KINDS: list[Callable[[Path], object]] = [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")]


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND])
@pytest.mark.parametrize("make", KINDS)
def test_only_files_are_opened_and_nothing_stays_open(
    tmp_path: Path, flags: int, make: Callable[[Path], object]
) -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208  (names)
    make(tmp_path / "x")
    with pytest.raises(OSError):  # noqa: PT011  (which one is the kernel's)
        open_plain(tmp_path / "x", flags)
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_who_inherits_it_finds_an_ordinary_one(tmp_path: Path) -> None:
    fd = open_plain(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    assert os.get_blocking(fd)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    os.close(fd)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/full"), Path.touch])
def test_what_is_in_the_way_is_taken_away(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "x.json")
    replace_file(tmp_path / "x.json", "new")
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "new"
    assert (tmp_path / "x.json").is_file()
    assert not (tmp_path / "x.json").is_symlink()


def test_a_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "x.json", "new")


@pytest.mark.parametrize("base", ["/run/user/4294967294", "", "relative"])
def test_a_run_folder_of_a_login_that_is_not_here(base: str):
    """Slurm gives a job the variable of the node from which it was submitted."""
    assert run_folder({"XDG_RUNTIME_DIR": base}) == Path(f"/tmp/fleetrun-{os.getuid()}")
    assert run_folder({"XDG_RUNTIME_DIR": "/somewhere"}) == Path("/somewhere/fleetrun")
