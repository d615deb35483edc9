"""What has to be there before a job starts that exports, and what is said when it is not."""

import os
import socket

import pytest

from fleetrun.errors import PortError, UsageError
from fleetrun.exporters.targets import check_folder, listening_socket, metrics_url
from fleetrun.host.interpreter import check_package
from fleetrun.host.network import Ports


@pytest.fixture
def ports():
    made = Ports()
    yield made
    made.close()


# ---- packages


def test_a_package_that_is_there():
    check_package("prometheus_client", "--metrics_port", "monitor")


@pytest.mark.parametrize("name", ["no_such_package", "no_such.package", "json.no.such"])
def test_one_that_is_not(name):
    with pytest.raises(UsageError) as raised:
        check_package(name, "--metrics_port", "monitor")
    assert "--metrics_port needs the Python package" in raised.value.message
    assert raised.value.hint == "pip install 'fleetrun[monitor]'"


def test_a_folder_of_its_name_is_not_it(tmp_path, monkeypatch):
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="not installed"):
        check_package("no_such_package", "--tensorboard", "monitor")


# ---- the folder


def test_the_folder_is_made(tmp_path):
    path = check_folder(str(tmp_path / "a" / "b"))
    assert path == tmp_path / "a" / "b"
    assert path.is_dir()
    assert check_folder(str(path)) == path, "again"


@pytest.mark.parametrize("kind", ["file", "below a file", "fifo", "dangling link"])
def test_what_is_no_folder(tmp_path, kind):
    path = tmp_path / "runs"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "file")
        (tmp_path / "file").write_text("")
    else:
        path.write_text("")
    with pytest.raises(UsageError, match=r"--tensorboard .* cannot be used"):
        check_folder(str(path / "x" if kind == "below a file" else path))


def test_a_url_is_refused():
    with pytest.raises(UsageError, match="--tensorboard s3"):
        check_folder("s3://bucket/runs")


# ---- the port


def test_any_free_port_is_told_and_nobody_else_gets_it(ports):
    with listening_socket("127.0.0.1", 0, ports, []) as sock:
        port = sock.getsockname()[1]
        assert metrics_url(sock) == f"http://127.0.0.1:{port}/metrics"
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
        other = Ports()
        with pytest.raises(PortError, match=r"--metrics_port: port \d+ is taken"):
            listening_socket("127.0.0.1", port, other, [])
        other.close()


def test_a_port_that_somebody_listens_on(ports):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=rf"--metrics_port: port {port} is taken: process \d+") as raised:
            listening_socket("127.0.0.1", port, ports, [])
    assert (
        raised.value.hint
        == "End the program that uses the port, or choose another port. With 0, fleetrun chooses a free port."
    )


def test_a_port_of_the_job_itself(ports):
    with pytest.raises(PortError, match="--metrics_port 6170"):
        listening_socket("127.0.0.1", 6170, ports, ["", "10.0.0.1:6170"])


def test_an_address_of_another_machine(ports):
    with pytest.raises(UsageError, match=r"--metrics_host 192\.0\.2\.1 is not an address of this node"):
        listening_socket("192.0.2.1", 0, ports, [])


def test_a_name_that_is_none(ports):
    with pytest.raises(UsageError, match=r"--metrics_host x{70} has no address"):
        listening_socket("x" * 70, 0, ports, [])


def test_every_address(ports):
    with listening_socket("0.0.0.0", 0, ports, []) as sock:
        assert metrics_url(sock).startswith("http://0.0.0.0:")
