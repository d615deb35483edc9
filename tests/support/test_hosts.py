"""The hosts that other tests run on: they hear each other, and do not when told so."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import netns
from tests.support.command import Launch
from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.traces import state_of, wait_until

pytestmark = [*needs_hosts, pytest.mark.slow]

ECHO = """
import socket
server = socket.create_server(("", 7000))
print("listening", flush=True)
while True:
    connection, peer = server.accept()
    print("from", peer[0], flush=True)
    try:
        while data := connection.recv(100):
            connection.sendall(data)
        print("closed", flush=True)
    except OSError as error:
        print("broken:", type(error).__name__, flush=True)
"""
# A line is one round trip; "no" within its time.
CALL = """
import socket, sys, time
host, port, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
try:
    connection = socket.create_connection((host, port), patience)
    print("connected", flush=True)
    for number, line in enumerate(sys.stdin):
        began = time.monotonic()
        connection.sendall(line.encode())
        got = connection.recv(100)
        print("echo", number, flush=True)
        print("took", time.monotonic() - began, flush=True)
except OSError as error:
    print("no:", type(error).__name__, flush=True)
"""


@pytest.fixture
def three(tmp_path: Path) -> Iterator[tuple[Host, ...]]:
    with hosts(3, tmp_path) as found:
        yield found


def echo(host: Host) -> Launch:
    server = host.start([sys.executable, "-c", ECHO])
    server.until_out("listening")
    return server


def call(host: Host, to: str, *, port: int = 7000, patience: float = 30.0) -> Launch:
    command = [sys.executable, "-c", CALL, to, str(port), str(patience)]
    return host.start(command, stdin=subprocess.PIPE)


def say(caller: Launch) -> None:
    assert caller.popen.stdin is not None
    caller.popen.stdin.write(b"hello\n")
    caller.popen.stdin.flush()


def end(caller: Launch) -> None:
    assert caller.popen.stdin is not None
    caller.popen.stdin.close()
    caller.wait()


def hears(host: Host, other: Host, patience: float = 30.0) -> bool:
    """Whether a new connection gets through."""
    caller = call(host, other.address, patience=patience)
    caller.until(lambda: "\n" in caller.out)
    end(caller)
    return "connected" in caller.out


def test_they_hear_each_other_by_address_and_by_name(three):
    a, b, c = three
    server = echo(a)
    assert hears(b, a)
    assert hears(a, a)
    caller = call(c, a.name)
    say(caller)
    caller.until_out("echo 0")
    end(caller)
    server.until(lambda: server.out.count("closed") == 3)
    assert {line for line in server.out.splitlines() if "from" in line} == {
        f"from {host.address}" for host in three
    }


def test_each_has_a_name_and_a_folder_and_nothing_of_this_machine_changes(three):
    before = os.uname().nodename, Path("/etc/hosts").read_text()
    script = "import os, socket; print(os.getpid(), socket.gethostname(), os.getcwd())"
    for host in three:
        launch = host.start([sys.executable, "-c", script])
        launch.wait()
        assert launch.out.split() == [str(launch.popen.pid), host.name, str(host.folder)]
    assert before == (os.uname().nodename, Path("/etc/hosts").read_text())


def test_one_way_is_cut(three):
    a, b, c = three
    echo(a), echo(b), echo(c)
    a.drop_from(b)
    caller = call(b, a.address, patience=0.5)
    caller.until_out("no: TimeoutError")
    end(caller)
    assert not hears(a, b, 0.5), "nobody connects where answers do not arrive"
    assert hears(a, c)
    assert hears(c, b)
    a.heal()
    assert hears(b, a)
    a.drop_to(b)
    assert not hears(b, a, 0.5)
    assert hears(c, a)


def test_a_partition_and_its_end(three):
    a, b, c = three
    for host in three:
        echo(host)
    a.partition_from(b, c)
    assert not hears(a, b, 0.5)
    assert not hears(c, a, 0.5)
    assert hears(b, c)
    a.heal()
    assert hears(a, b)
    assert hears(c, a)


def test_a_connection_survives_loss(three):
    a, b, _ = three
    echo(a)
    b.lossy(30)
    caller = call(b, a.address)
    for number in range(3):
        say(caller)
        caller.until_out(f"echo {number}")
    end(caller)
    a.lossy(99)
    assert not hears(b, a, 0.5)


def test_a_connection_survives_that_the_link_is_down_for_a_while(three):
    a, b, c = three
    echo(a)
    caller = call(b, a.address)
    say(caller)
    caller.until_out("echo 0")
    a.link_down()
    say(caller)
    assert not hears(c, a, 0.5)
    assert "echo 1" not in caller.out
    a.link_up()
    caller.until_out("echo 1")
    end(caller)


def test_connections_are_reset_on_both_sides(three):
    a, b, _ = three
    server = echo(a)
    caller = call(b, a.address)
    say(caller)
    caller.until_out("echo 0")
    b.reset_connections()
    server.until_out("broken: ConnectionResetError")
    say(caller)
    caller.until_out("no: ")
    end(caller)
    assert hears(b, a)


def test_a_proxy_delays_each_direction(three):
    a, b, c = three
    echo(a)
    host, _, port = c.proxy(f"{a.address}:7000", 0.05).rpartition(":")
    assert host == c.address
    caller = call(b, host, port=int(port))
    say(caller)
    caller.until(lambda: "took" in caller.out and caller.out.endswith("\n"))
    assert float(caller.out.split()[-1]) >= 0.1
    end(caller)


def test_two_networks_at_once_do_not_meet(tmp_path, three):
    (tmp_path / "other").mkdir()
    echo(three[0])
    with hosts(2, tmp_path / "other") as (other, caller):
        assert other.address == three[0].address
        assert not hears(caller, other)
    assert hears(three[1], three[0])


def test_nothing_is_left_of_them(tmp_path):
    with hosts(2, tmp_path) as pair:
        server = echo(pair[0])
        stray = pair[1].start(["setsid", "--fork", "sleep", "1000"], stdout=subprocess.DEVNULL)
        stray.popen.wait()
        pids = [pid for host in pair for pid in host.pids()]
        assert len(pids) == 2
    assert server.popen.poll() == -signal.SIGKILL
    wait_until(lambda: all(state_of(pid) in ("", "Z") for pid in pids))
    assert not [path for path in netns.FOLDER.glob("*") if f"-{os.getpid()}-" in path.name]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support.hosts import hosts
from tests.support.traces import wait_until
with hosts(1, Path(sys.argv[1])) as (host,):
    launch = host.start(["sleep", "1000"])
    wait_until(host.pids)  # another run may clean up as soon as this one is killed, and finds what is inside
    print(host.namespace, launch.popen.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_run_cleans_up_after_one_that_was_killed(tmp_path):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], cwd=root, capture_output=True, text=True, timeout=60
    )
    namespace, pid = done.stdout.split()
    assert done.returncode == -signal.SIGKILL
    (tmp_path / "mine").mkdir()
    with hosts(1, tmp_path / "mine"):
        assert not netns.path_of(namespace).exists()
        wait_until(lambda: state_of(int(pid)) in ("", "Z"))
