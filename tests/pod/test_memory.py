"""The launcher's store of memory: what is handed in is given back, and garbage harms nobody."""

import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleetrun.pod import memory
from fleetrun.pod.loop import Loop
from fleetrun.pod.memory import MemoryStore
from tests.control.test_server import no_descriptor_left
from trainers.checkpoints.manifest import CheckpointError
from trainers.checkpoints.memory import Store


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Of a store that runs."""
    loop = Loop()
    folder = tmp_path / ("long" * 30)
    store = MemoryStore(loop, folder / "p.memory")
    assert store.open() is None
    read, write = os.pipe()
    loop.add(read, loop.stop)
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield folder / "p.memory"
    os.write(write, b"x")
    thread.join()
    store.close()
    store.close()
    assert not (folder / "p.memory").exists()
    for descriptor in (read, write):
        os.close(descriptor)


def piece(text: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, text)
    return descriptor


def content(descriptor: int) -> bytes:
    found = os.pread(descriptor, 100, 0)
    os.close(descriptor)
    return found


def test_what_is_kept_is_given_by_prefix_however_much_it_is(path: Path):
    store = Store(str(path))
    for number in range(100):
        descriptor = piece(b"%d" % number)
        store.keep(f"a.{number:03}", descriptor)
        os.close(descriptor)
    store.keep("b.0", descriptor := piece(b"other"))
    os.close(descriptor)
    found = {name: content(fd) for name, fd in store.give("a.").items()}
    assert found == {f"a.{number:03}": b"%d" % number for number in range(100)}
    assert store.give("c.") == {}
    store.keep("b.0", descriptor := piece(b"newer"))
    os.close(descriptor)
    assert [content(fd) for fd in store.give("b.").values()] == [b"newer"]


def test_a_socket_that_was_taken_away_is_made_again_and_what_is_kept_stays(tmp_path: Path):
    loop = Loop()
    store = MemoryStore(loop, tmp_path / "p.memory")
    assert store.open() is None
    read, write = os.pipe()
    loop.add(read, loop.stop)

    def while_it_runs(then: Callable[[], None]) -> None:
        thread = threading.Thread(target=loop.run)
        thread.start()
        then()
        os.write(write, b"x")
        thread.join()
        os.read(read, 1)

    def keep() -> None:
        Store(str(tmp_path / "p.memory")).keep("a", descriptor := piece(b"kept"))
        os.close(descriptor)

    found: list[dict[str, int]] = []
    while_it_runs(keep)
    (tmp_path / "p.memory").unlink()
    store.renew()
    while_it_runs(lambda: found.append(Store(str(tmp_path / "p.memory")).give("a")))
    assert [content(fd) for fd in found[0].values()] == [b"kept"]
    store.close()
    loop.close()
    for descriptor in (read, write):
        os.close(descriptor)


def ask(path: Path, data: bytes, descriptors: list[int] | None = None) -> dict[str, object]:
    folder = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
        socket.send_fds(asking, [data], descriptors or [])
        return json.loads(asking.recv(1 << 16))


@pytest.mark.parametrize(
    "data", [b"x", b"{}", b"[1]", b"null", b'{"keep": "a"}', b'{"give": 3}', b'{"drop": []}', b"[" * 60_000]
)
def test_what_is_not_a_request_is_answered(path: Path, data: bytes):
    assert "error" in ask(path, data)
    assert Store(str(path)).give("") == {}


def test_pieces_are_limited_and_dropped(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "_MOST", 2)
    store, descriptor = Store(str(path)), piece(b"x")
    before = len(list(Path("/proc/self/fd").iterdir()))
    store.keep("a.1", descriptor)
    store.keep("a.2", descriptor)
    with pytest.raises(CheckpointError, match="2 pieces"):
        store.keep("a.3", descriptor)
    assert ask(path, b'{"keep": "a.4"}', [descriptor, descriptor])["error"]
    store.drop("a.")
    found = store.give("")
    assert list(found) == ["a.1", "a.2"], "only whole names are dropped"
    for name, given in found.items():
        os.close(given)
        store.drop(name)
    store.drop("a.1")
    assert store.give("") == {}
    os.close(descriptor)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_descriptors_are_left_for_the_launcher(path: Path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    store, descriptor = Store(str(path)), piece(b"x")
    most = 100 + max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * most, before[1]))
    try:
        for number in range(most):
            store.keep(f"a.{number}", descriptor)
        with pytest.raises(CheckpointError, match=f"{most} pieces"):
            store.keep("b", descriptor)
        store.keep("a.1", descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    os.close(descriptor)


def test_one_that_only_connects_or_hangs_up_does_no_harm(path: Path):
    folder = os.open(path.parent, os.O_PATH)
    idle = []
    for number in range(20):
        asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asking.connect(f"/proc/self/fd/{folder}/{path.name}")
        if number % 2:
            asking.send(b'{"give": ""}')
            asking.close()
        else:
            idle.append(asking)
    os.close(folder)
    assert Store(str(path)).give("") == {}
    for asking in idle:
        asking.close()


def test_without_a_free_descriptor_the_launcher_pauses(tmp_path: Path):
    """A socket with a client that waits is readable again immediately, without end."""
    now = [0.0]
    loop = Loop(clock=lambda: now[0])
    store = MemoryStore(loop, tmp_path / "p.memory")
    assert store.open() is None

    def turn() -> None:
        loop.after(0.0, loop.stop)
        loop.run()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client, no_descriptor_left():
        client.connect(str(tmp_path / "p.memory"))
        turn()
        listener = store._listener
        assert listener is not None
        assert listener.fileno() not in loop._handlers
    now[0] += 2
    turn()
    assert listener.fileno() in loop._handlers
    store.close()
    loop.close()
