"""Ports: who may have a reserved one and who not, with real sockets and processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fleetrun.envs.contract import join_endpoint, split_endpoint
from fleetrun.errors import PortError
from fleetrun.host.network import Ports, is_this_host
from tests.support import netns
from tests.support.ports import free_port


@pytest.fixture
def reserve():
    made = []

    def make(*arguments):
        made.append(Ports(*arguments))
        return made[-1]

    yield make
    for ports in made:
        ports.close()


def run(code, *arguments):
    """A Python program of another process, to its end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    with socket.create_connection(server.getsockname()) as client:
        print("served")
"""
"""`create_server` sets SO_REUSEADDR, as every server of this world does."""


# ---- what a reservation promises


def test_the_owner_can_bind_listen_and_be_reached(reserve):
    port = reserve().any()
    for host in ("127.0.0.1", "0.0.0.0"):
        done = run(SERVE, host, port)
        assert done.stdout == "served\n", done.stderr


def test_so_it_can_after_a_restart(reserve):
    """The connections of its first life linger in TIME_WAIT."""
    port = reserve().any()
    for _ in range(3):
        assert run(SERVE, "127.0.0.1", port).stdout == "served\n"


@pytest.mark.slow
def test_nobody_gets_it_by_chance(reserve):
    """The kernel hands out free ports to those who bind 0 and to connections: never a reserved one."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = reserve()
    held = {ports.any() for _ in range(200)}
    assert len(held) == 200
    assert all(low <= port <= high for port in held)
    for _ in range(2000):
        with socket.socket() as chance:
            chance.bind(("127.0.0.1", 0))
            assert chance.getsockname()[1] not in held


def test_two_launchers_never_get_the_same(reserve):
    first, second = reserve(), reserve()
    assert not {first.any() for _ in range(300)} & {second.any() for _ in range(300)}


def test_nor_from_the_same_small_range(reserve):
    port = free_port([""])
    span = (port, port + 5)
    first, second = reserve(span), reserve(span)
    got = []
    for ports in (first, second, first, second, first, second):
        try:
            got.append(ports.any())
        except PortError:  # somebody else has one of them
            break
    assert len(set(got)) == len(got)
    assert set(got) <= set(range(port, port + 6))


def test_closing_gives_everything_back(reserve):
    ports = reserve()
    port = ports.any()
    ports.close()
    other = reserve()
    assert other.fixed(port) == port


def test_a_reservation_is_not_inherited(reserve):
    """Or a daemon that outlives the launcher would hold its ports."""
    port = reserve().any()
    done = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True)
    assert "socket:" not in done.stdout, port


# ---- a certain port


def test_a_fixed_port_is_that_port(reserve):
    port = free_port([""])
    assert reserve().fixed(port) == port


def test_a_fixed_port_that_just_closed_its_connections(reserve):
    port = free_port([""])
    assert run(SERVE, "127.0.0.1", port).stdout == "served\n"
    assert reserve().fixed(port) == port


def test_a_port_wanted_twice_by_one_job(reserve):
    ports = reserve()
    port = ports.any()
    with pytest.raises(PortError, match=f"port {port} twice"):
        ports.fixed(port)


def test_a_port_that_somebody_listens_on_is_refused_and_its_holder_named(reserve):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortError) as caught:
            reserve().fixed(port)
    assert f"port {port} is taken" in caught.value.message
    assert caught.value.hint == "End the program that uses the port, or choose another port."
    assert f"process {os.getpid()} (" in caught.value.message
    assert "listens on this port" in caught.value.message


HOLD = """
import sys
from pathlib import Path
from fleetrun.host.network import Ports
ports = Ports()
print(ports.any(), flush=True)
sys.stdin.read()
"""


def test_a_port_that_another_launcher_reserved_is_refused_and_that_launcher_named(reserve):
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        port = int(other.stdout.readline())
        with pytest.raises(PortError) as caught:
            reserve().fixed(port)
        other.stdin.close()
    assert caught.value.message == f"port {port} is taken: reserved by another fleetrun, process {other.pid}"


def test_its_ports_are_free_once_it_is_gone(reserve):
    done = subprocess.run([sys.executable, "-c", HOLD], input=b"", capture_output=True, check=True)
    port = int(done.stdout)
    assert reserve().fixed(port) == port


# ---- a range


def test_ports_of_a_range(reserve):
    first = free_port([""])
    ports = reserve((first, first + 400))
    got = [ports.any() for _ in range(50)]
    assert len(set(got)) == 50
    assert all(first <= port <= first + 400 for port in got)


def test_a_range_passes_over_what_is_taken(reserve):
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        ports = reserve((taken, taken + 300))
        assert taken not in {ports.any() for _ in range(100)}


def test_an_exhausted_range(reserve):
    port = free_port([""])
    ports = reserve((port, port))
    assert ports.any() == port
    with pytest.raises(
        PortError, match=f"PORT_RANGE={port}:{port} has no free port; this job holds 1"
    ) as caught:
        ports.any()
    assert caught.value.exit_code == 125


FEW_PORTS = """
echo "40000 40001" >/proc/sys/net/ipv4/ip_local_port_range || exit 77
echo 1 >/proc/sys/net/ipv4/ip_autobind_reuse
exec "$1" -c '
import socket
from fleetrun.host.network import Ports
from fleetrun.errors import PortError
reserved = [socket.socket() for _ in range(2)]
for port, each in enumerate(reserved, start=40000):
    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    each.bind(("", port))
try:
    print("given twice:", Ports().any())
except PortError as error:
    print(error)
'
"""


def test_what_another_program_reserved_in_the_same_way_is_not_free():
    """With SO_REUSEADDR the kernel may share it (ip_autobind_reuse). In a network that has two ports."""
    command = ["unshare", "-n", "sh", "-c", FEW_PORTS, "sh", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode in (1, 77) and "Traceback" not in done.stderr:
        pytest.skip("this user may not make a network")
    assert done.stdout == "the kernel has no free port; this job holds 0 ports\n", done.stderr


# ---- who binds over it


def test_zmq_binds_over_a_reservation(reserve):
    """libzmq sets SO_REUSEADDR; a server of this package is a zmq socket."""
    import zmq

    port = reserve().any()
    for _ in range(2):  # a closed socket lets go of its port when its context has ended
        with zmq.Context() as context, context.socket(zmq.REP) as server, context.socket(zmq.REQ) as client:
            for each in (server, client):
                each.setsockopt(zmq.LINGER, 0)
                each.setsockopt(zmq.RCVTIMEO, 60_000)
            server.bind(f"tcp://127.0.0.1:{port}")
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"hello")
            assert server.recv() == b"hello"


@pytest.mark.slow
def test_torchs_stores_bind_over_a_reservation(reserve):
    """PADDLE_MASTER and MASTER_PORT are where rank 0 makes its TCPStore."""
    ports = [reserve().any() for _ in range(2)]
    code = (
        "import sys, datetime, torch.distributed as dist\n"
        "for libuv in (False, True):\n"
        "    store = dist.TCPStore('127.0.0.1', int(sys.argv[1 + libuv]), is_master=True,\n"
        "        use_libuv=libuv, timeout=datetime.timedelta(seconds=60))\n"
        "    store.set('key', 'value'); print(store.get('key').decode())"
    )
    done = run(code, *ports)
    assert done.stdout == "value\nvalue\n", done.stderr


# ---- endpoints and hosts


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("127.0.0.1:6070", "127.0.0.1", 6070),
        ("node-1.cluster:80", "node-1.cluster", 80),
        ("[::1]:6070", "::1", 6070),
        ("[2001:db8::8:800:200c:417a]:65535", "2001:db8::8:800:200c:417a", 65535),
    ],
)
def test_endpoints_are_taken_apart_and_put_together(endpoint, host, port):
    assert split_endpoint(endpoint) == (host, port)
    assert join_endpoint(host, port) == endpoint


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "0.0.0.0", socket.gethostname()])
def test_this_host(host):
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        pytest.skip("this machine does not know its own name")
    assert is_this_host(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "203.0.113.9", "2001:db8::1", "no-such-host.invalid"])
def test_not_this_host(host):
    assert not is_this_host(host)


_ASK = """
set -e
sysctl -qw net.ipv4.ip_nonlocal_bind=1
ip link add v0 type veth peer name v1
ip addr add 10.5.5.5/24 dev v0
ip link set v0 up
ip link set v1 up
exec "$0" -c 'from fleetrun.host.network import is_this_host as own; print(own("10.5.5.5"), own("10.5.5.6"))'
"""


@pytest.mark.hosts
@pytest.mark.skipif(bool(netns.unavailable()), reason=netns.unavailable())
def test_an_address_that_can_be_bound_may_be_another_hosts():
    """As with ip_nonlocal_bind, which load balancers set."""
    asked = subprocess.run(
        ["unshare", "-n", "sh", "-c", _ASK, sys.executable], capture_output=True, text=True, check=True
    )
    assert asked.stdout.split() == ["True", "False"]
