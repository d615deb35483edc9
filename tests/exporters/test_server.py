"""Metrics over HTTP: who asks, who asks nonsense, and who asks nothing."""

import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleetrun.exporters.job_state import Job
from fleetrun.exporters.prometheus import JobMetrics, serve
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


def test_clients_that_say_nothing_keep_nobody_waiting(served):
    silent = [served.connect() for _ in range(40)]
    assert "fleetrun_failures_total" in served.get(), "none of them has gone"
    gone = [client.recv(1) == b"" for client in silent[:25]]
    assert gone == [True] * 25, "the oldest made room"
    wait_until(lambda: len(served.server._clients) < 16, "the scrape has gone")
    for client in silent:
        client.close()


@pytest.mark.slow
def test_a_client_that_does_not_read_keeps_nobody_waiting(served):
    served.job.facts = {"job": "x" * 8_000_000}  # more than sockets hold
    served.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    deaf = []
    for _ in range(16):
        deaf.append(served.connect())
        deaf[-1].sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert deaf[-1].recv(1) == b"H", "it is being answered"
    with served.lock:
        served.job.facts = {}
    assert "fleetrun_failures_total" in served.get()
    for client in deaf:
        client.close()


def test_more_of_a_request_than_anybody_needs_is_not_read(served):
    with served.connect() as client:
        head = b"GET / HTTP/1.0\r\na: "
        client.sendall(head + b"b" * (64 * 1024 - len(head)))
        assert client.recv(12) == b"HTTP/1.0 200", "answered, though it goes on"
    assert "fleetrun_failures_total" in served.get()


def test_ipv6():
    try:
        made = Served("::1", socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    try:
        assert "fleetrun_failures_total" in made.get(host="[::1]")
    finally:
        made.close()
