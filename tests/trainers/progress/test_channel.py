"""The way to the launcher: whatever is wrong with it, nobody waits and nobody hears of it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainers.progress.channel import Channel, channel_of


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    with contextlib.closing(Channel(str(tmp_path / "p.progress"))) as made:
        yield made


@contextlib.contextmanager
def launcher(path: Path) -> Iterator[socket.socket]:
    """Its socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        fd = os.open(path.parent, os.O_PATH)
        sock.bind(f"/proc/self/fd/{fd}/{path.name}")
        os.close(fd)
        sock.setblocking(False)
        yield sock


def test_a_datagram_arrives(channel, tmp_path):
    with launcher(tmp_path / "p.progress") as sock:
        assert channel.send(b"hello")
        assert sock.recv(100) == b"hello"


def test_a_path_may_be_longer_than_an_address_of_a_socket(tmp_path):
    folder = tmp_path / ("long-" * 40)
    folder.mkdir()
    path = folder / "p.progress"
    with launcher(path) as sock, contextlib.closing(Channel(str(path))) as channel:
        assert channel.send(b"hello")
        assert sock.recv(100) == b"hello"


def test_a_launcher_that_does_not_read_is_not_waited_for(channel, tmp_path):
    with launcher(tmp_path / "p.progress") as sock:
        sent = 0
        while channel.send(b"x" * 8192):
            sent += 1
        assert sent
        assert not channel.send(b"x")
        assert not channel.wait(0.0)
        for _ in range(sent):
            sock.recv(10_000)
        assert channel.wait(60.0)
        assert channel.send(b"x"), "there is room again, on the same connection"


def test_a_launcher_that_comes_later_is_found(channel, tmp_path):
    path = tmp_path / "p.progress"
    assert not channel.send(b"1")
    assert not channel.wait(60.0), "for nobody"
    with launcher(path) as sock:
        assert channel.send(b"2")
        assert sock.recv(10) == b"2"
    assert not channel.send(b"3")
    path.unlink()
    with launcher(path) as sock:
        assert channel.send(b"4")
        assert sock.recv(10) == b"4"


def _nothing(path: Path) -> None: ...


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _file(path: Path) -> None:
    path.write_text("x")


def _stream(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def _loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("there", [_nothing, _fifo, _file, _stream, _loop, Path.mkdir])
def test_what_is_no_launcher_costs_nothing(channel, tmp_path, there):
    there(tmp_path / "p.progress")
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert not any(channel.send(b"x") for _ in range(100))
    after = len(list(Path("/proc/self/fd").iterdir()))
    assert after < before + 100, "some are of threads of other tests"


@pytest.mark.parametrize("path", ["relative", "", "/", "/nowhere/at/all", "x" * 5000, "a\0b"])
def test_a_path_may_be_nonsense(path):
    assert not Channel(path).send(b"x")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_not_spoken_to(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    with launcher(folder / "p.progress") as sock:
        os.chown(folder, 65534, 65534)
        assert not Channel(str(folder / "p.progress")).send(b"secret")
        with pytest.raises(BlockingIOError):
            sock.recv(10)


@pytest.mark.parametrize(
    ("environ", "listens"),
    [
        ({}, False),
        ({"FLEETRUN_PROGRESS": "/run/p.progress"}, False),
        ({"FLEETRUN_CONTAINER": "p.trainer.0"}, False),
        ({"FLEETRUN_PROGRESS": "", "FLEETRUN_CONTAINER": "p.trainer.0"}, False),
        ({"FLEETRUN_PROGRESS": "/run/p.progress", "FLEETRUN_CONTAINER": "p.trainer.0"}, True),
    ],
)
def test_outside_of_fleetrun_nobody_listens(environ, listens):
    assert (channel_of(environ) is not None) == listens
