"""Where sockets are, whose folders are believed, and what is taken away."""

import os
import socket
from pathlib import Path

import pytest

from fleetrun.control.client import control_sockets, remove_dead_sockets, run_folders, trusted
from fleetrun.files import short_socket_path
from tests.support.serving import serving


def dead(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> Path:
    """As a launcher leaves it that was killed."""
    with socket.socket(socket.AF_UNIX, kind) as server, short_socket_path(path) as name:
        server.bind(name)
    return path


def test_a_folder_that_was_chosen_is_the_only_one():
    assert run_folders({"XDG_RUNTIME_DIR": "/somewhere"}) == [Path("/somewhere/fleetrun")]


@pytest.mark.parametrize("login", [True, False])
def test_a_login_and_cron_find_each_others_jobs(login):
    user = os.getuid()
    environ = {"XDG_RUNTIME_DIR": f"/run/user/{user}"} if login else {}
    found = run_folders(environ)
    assert set(found) == {Path(f"/run/user/{user}/fleetrun"), *run_folders({})[:1]}
    assert len(found) == 2


def test_only_sockets_count(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    (folder / "filexx.sock").write_text("")
    (folder / "folder.sock").mkdir()
    (folder / "linkto.sock").symlink_to("nowhere")
    os.mkfifo(folder / "fifoxx.sock")
    for name in ("bbbbbb.sock", "aaaaaa.sock", "aaaaaa.progress", ".newone.sock"):
        dead(folder / name)
    assert [path.name for path in control_sockets(folder)] == ["aaaaaa.sock", "bbbbbb.sock"]


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_write_into_is_not_believed(tmp_path, mode):
    folder = tmp_path / "run"
    folder.mkdir()
    dead(folder / "aaaaaa.sock")
    folder.chmod(0o755)
    assert trusted(folder)
    folder.chmod(mode)
    assert not trusted(folder)
    assert control_sockets(folder) == []


def test_nor_a_link_to_one_nor_one_that_is_not_there(tmp_path):
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to("real")
    assert not trusted(tmp_path / "link")
    assert control_sockets(tmp_path / "none") == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_nor_another_users(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    os.chown(folder, 12345, 12345)
    assert not trusted(folder)


def test_what_a_killed_launcher_left_is_taken_away(tmp_path):
    path = dead(tmp_path / "abcdef.sock")
    dead(tmp_path / "abcdef.progress", socket.SOCK_DGRAM)
    other = dead(tmp_path / "ghijkl.sock")
    remove_dead_sockets(path)
    assert list(tmp_path.iterdir()) == [other]


def test_what_is_in_use_stays(tmp_path):
    with serving(tmp_path / "abcdef.sock", lambda _: {}) as server:
        remove_dead_sockets(server.path)
        assert server.path.exists()


def test_the_reports_of_a_job_that_cannot_be_asked_stay(tmp_path):
    path = dead(tmp_path / "abcdef.sock")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver,
        short_socket_path(tmp_path / "abcdef.progress") as name,
    ):
        receiver.bind(name)
        remove_dead_sockets(path)
    assert [each.name for each in tmp_path.iterdir()] == ["abcdef.progress"]


def test_what_is_no_socket_stays(tmp_path):
    path = tmp_path / "abcdef.sock"
    path.write_text("precious")
    remove_dead_sockets(path)
    assert path.read_text() == "precious"
