"""Metrics over HTTP: who asks, who asks nonsense, and who asks nothing."""

import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleetrun.exporters.metrics import JobMetrics
from fleetrun.exporters.server import serve
from fleetrun.exporters.standing import Job
from tests.exporters.said import begin, pod
from tests.support.traces import wait_until


class Served:
    def __init__(self, address="127.0.0.1", family=socket.AF_INET):
        self.job = Job()
        self.lock = threading.Lock()
        self.listening = socket.create_server((address, 0), family=family)
        self.port = self.listening.getsockname()[1]
        self.server = serve(self.listening, JobMetrics(self.job), self.lock, 0.01)

    def get(self, path="/metrics", host="127.0.0.1"):
        with urllib.request.urlopen(f"http://{host}:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def served():
    made = Served()
    yield made
    made.close()


@pytest.mark.parametrize("path", ["/", "/metrics", "/metrics?name[]=fleetrun_failures_total"])
def test_metrics_are_there_as_they_are_now(served, path):
    assert "fleetrun_failures_total 0.0" in served.get(path)
    served.job.take(begin(), 5.0)
    served.job.take(pod(), 5.0)
    served.job.failures = 3
    text = served.get(path)
    assert "fleetrun_failures_total 3.0" in text
    assert list(text_string_to_metric_families(text))


def test_nothing_else_is_there(served):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        served.get("/etc/passwd")


@pytest.mark.parametrize("garbage", [b"\xff" * 5000, b"GET\r\n\r\n", b"POST / HTTP/1.0\r\n\r\n", b""])
def test_garbage_does_not_end_it(served, garbage):
    with served.connect() as client:
        client.sendall(garbage)
        client.shutdown(socket.SHUT_WR)
        while client.recv(4096):
            pass
    assert "fleetrun_failures_total" in served.get()


def test_clients_that_say_nothing_are_bounded_and_leave_room_again(served):
    silent = [served.connect() for _ in range(40)]
    turned_away = 0
    for client in silent[-8:]:  # more than there is room for
        turned_away += client.recv(1) == b""
    assert turned_away == 8
    for client in silent:
        client.close()

    def has_room():
        try:
            return "fleetrun_failures_total" in served.get()
        except OSError:
            return False  # the silent ones are still leaving

    wait_until(has_room, "room again")


def test_ipv6():
    try:
        made = Served("::1", socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    try:
        assert "fleetrun_failures_total" in made.get(host="[::1]")
    finally:
        made.close()
