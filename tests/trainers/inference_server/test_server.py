"""`fleetrun serve` as its clients have it: answers, refusals, limits, deaths, reloads."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.command import FLEETRUN, environment
from tests.support.forking import Forker
from tests.support.inference import (
    JSON_SIZE,
    Served,
    Tensors,
    encoded,
    equal,
    in_json,
    not_served,
    served,
)
from tests.support.traces import wait_until
from trainers.export import save_program
from trainers.inference_server.over_http import LAST_S

pytestmark = pytest.mark.slow  # servers import torch

ROWS = 50


class Net(torch.nn.Module):
    """In whole numbers, so that answers are exact in a batch of any size."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        weight = torch.arange(start, start + 4 * ROWS, dtype=torch.float32).view(ROWS, 4)
        self.rows = torch.nn.Embedding(ROWS, 4, _weight=weight)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = self.rows(ids).sum(1)
        return {"score": (rows * x).sum(1), "rows": rows, "column": x[:, 1]}


class Guarded(Net):
    """Another program for other sizes, which workers refuse."""

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(ids, x)
        return found if x.shape[0] % 2 else {name: -each for name, each in found.items()}


def save(folder: Path, start: int = 0) -> Net:
    model = Net(start).eval()
    save_program(folder, model, batch(3), None, {})
    return model


def batch(rows: int, seed: int = 0) -> Tensors:
    of = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, ROWS, (rows, 3), generator=of)
    return {"ids": ids, "x": torch.randint(-3, 4, (rows, 4), generator=of).float()}


@torch.no_grad()
def computed(model: Net, inputs: Tensors) -> list[torch.Tensor]:
    return list(model(**inputs).values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    save(folder / "bundle")
    words = (
        "--workers=2",
        "--max_rows=64",
        "--max_body=20000",
        "--timeout=2",
        "--keepalive=3",
        "--threads=1",
    )
    with served(folder, "bundle", *words) as found:
        yield found
        assert found.stop() == 0
        assert not list((folder / "cache").iterdir())


def test_answers_are_those_of_the_model_for_many_clients_at_once(server: Served) -> None:
    model = Net()

    def ask(number: int) -> bool:
        inputs = batch(1 + number % 7, number)
        _, outputs = server.infer(inputs, binary=number % 2 == 0)
        return list(outputs) == ["score", "rows", "column"] and equal(outputs, computed(model, inputs))

    with ThreadPoolExecutor(16) as clients:
        assert all(clients.map(ask, range(200)))
    status, _, text = server.ask("GET", "/metrics")
    assert status == 200
    lines = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if line[0] != "#")
    assert float(lines["fleetrun_serve_rows_total"]) >= 200
    assert float(lines['fleetrun_serve_requests_total{path="infer",status="200"}']) >= 200
    assert float(lines["fleetrun_serve_version_sequence"]) == 1


def test_one_row_of_an_input_stands_for_as_many_as_the_others_have(server: Served) -> None:
    def ask(number: int) -> bool:
        inputs = batch(2 + number % 7, number)
        name = ("ids", "x")[number % 2]
        inputs[name] = inputs[name][:1]
        found = server.infer(inputs, binary=number % 3 == 0)[1]
        rows = max(map(len, inputs.values()))
        whole = {name: each.expand(rows, -1) for name, each in inputs.items()}
        return equal(found, computed(Net(), whole)) and equal(server.infer(whole)[1], list(found.values()))

    with ThreadPoolExecutor(8) as clients:
        assert all(clients.map(ask, range(40)))


def test_what_it_serves_and_whether_it_is_ready(server: Served) -> None:
    status, about = server.json("GET", server.path)
    assert status == 200
    assert about["inputs"] == [
        {"name": "ids", "datatype": "INT64", "shape": [-1, 3]},
        {"name": "x", "datatype": "FP32", "shape": [-1, 4]},
    ]
    assert about["outputs"] == [
        {"name": "score", "datatype": "FP32", "shape": [-1]},
        {"name": "rows", "datatype": "FP32", "shape": [-1, 4]},
        {"name": "column", "datatype": "FP32", "shape": [-1]},
    ]
    (version,) = about["versions"]
    for path in ("/v2/health/live", "/v2/health/ready", "/v2", f"{server.path}/versions/{version}/ready"):
        assert server.json("GET", path)[0] == 200
    assert server.json("GET", "/v2/models/other")[0] == 404
    assert server.json("GET", f"{server.path}/versions/0/ready")[0] == 404
    status, said = server.json("GET", "/elsewhere")
    assert status == 404
    assert "/v2/models/NAME/infer" in said["error"]
    status, headers, content = server.ask("GET", f"{server.path}/infer")
    assert status == 405
    assert json.loads(content) == {"error": f"GET is not a method of {server.path}/infer; use POST"}
    assert headers["Allow"] == "POST"


def test_a_bad_request_is_told_its_field_and_does_not_spoil_others(server: Served) -> None:
    def wrong(number: int) -> str:
        inputs = batch(2, number)
        inputs["ids"][1, 1] = ROWS
        body, headers = encoded(inputs)
        status, _, content = server.ask("POST", f"{server.path}/infer", body, headers)
        assert status == 400
        return content.decode()

    def right(number: int) -> bool:
        inputs = batch(2, number)
        return equal(server.infer(inputs)[1], computed(Net(), inputs))

    with ThreadPoolExecutor(16) as clients:
        answers = [clients.submit(wrong if number % 4 == 0 else right, number) for number in range(100)]
        assert all(answer.result() for answer in answers)
    assert "inputs: ids has the id 50, but its table has 50 rows, 0 to 49" in wrong(1)
    status, answer = server.json("POST", f"{server.path}/infer", {"inputs": [{"name": "y"}]})
    assert status == 400
    assert answer["error"].startswith("inputs[0].name")


def test_limits(server: Served) -> None:
    body, headers = encoded(batch(65))
    status, _, content = server.ask("POST", f"{server.path}/infer", body, headers)
    assert status == 400
    assert b"65 rows" in content
    for ids, x in ((3, 2), (2, 3), (3, 0)):
        body, headers = encoded({"ids": batch(ids)["ids"], "x": batch(x)["x"]})
        status, _, content = server.ask("POST", f"{server.path}/infer", body, headers)
        assert status == 400
        assert b" rows, but another input has 3; send 3 rows, or 1 row for all of them" in content
    status, _, content = server.ask("POST", f"{server.path}/infer", b"x" * 20_001)
    assert status == 413
    assert b'"error"' in content
    body = gzip.compress(json.dumps({"inputs": in_json(batch(1))}).encode())
    status, _, content = server.ask("POST", f"{server.path}/infer", body, {"Content-Encoding": "gzip"})
    assert (status, json.loads(content)["error"].split(":")[0]) == (
        415,
        "Content-Encoding 'gzip' is not supported; send the body without it",
    )
    with socket.create_connection(("127.0.0.1", server.port), 60) as slow:
        slow.sendall(f"POST {server.path}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode())
        said = slow.makefile("rb").read()
        assert said.startswith(b"HTTP/1.1 408"), "within --timeout"
        assert "--timeout" in json.loads(said.partition(b"\r\n\r\n")[2])["error"]
    for head in (b"", b"GET /v2 HTTP/1.1\r\nHost:"):
        with socket.create_connection(("127.0.0.1", server.port), 60) as silent:
            silent.sendall(head)
            assert silent.recv(100) == b"", "after --keepalive"


def test_bodies_that_arrive_have_a_limit_together(server: Served) -> None:
    """Each connection leaves its body without the last byte."""
    head = f"POST {server.path}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 60)) for _ in range(60)
        ]
        for each in made:  # a worker takes 16
            each.sendall(head + b" " * 19_999)
        said = [each.recv(1 << 16) for each in made]
    assert {each.split()[1] for each in said} == {b"408", b"503"}, "after --timeout, and at once"
    assert any(b"bytes are already waiting; try again" in each for each in said)
    wait_until(lambda: server.ask("POST", f"{server.path}/infer", b"{}")[0] == 400)


def test_a_client_that_leaves_or_sends_no_http_is_one_line_of_the_log(server: Served) -> None:
    before = len(server.log.read_text().splitlines())
    heads = ("Content-Length: 9", "Transfer-Encoding: chunked", "Host x")
    for number, head in enumerate(heads, 1):
        with socket.create_connection(("127.0.0.1", server.port), 60) as client:
            client.sendall(f"POST {server.path}/infer HTTP/1.1\r\n{head}\r\n\r\nzz\r\n".encode())
            client.shutdown(socket.SHUT_WR)
            while client.recv(1000):
                pass
        wait_until(lambda number=number: len(server.log.read_text().splitlines()) >= before + number)
    lines = server.log.read_text().splitlines()[before:]
    assert len(lines) == 3, lines
    assert all("Error handling request from 127.0.0.1: " in line for line in lines), lines


def test_a_killed_worker_is_replaced(server: Served) -> None:
    pid, other = server.workers()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "serves version" in server.log.read_text())
    assert other in server.workers()
    assert pid not in server.workers()
    assert len(server.workers()) == 2
    inputs = batch(4, pid)
    assert equal(server.infer(inputs)[1], computed(Net(), inputs))


def test_a_worker_that_is_killed_again_and_again_is_started_again(tmp_path: Path) -> None:
    save(tmp_path / "bundle")
    with served(tmp_path, "bundle", "--threads=1") as server:
        for number in range(1, 4):
            (pid,) = server.workers()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda number=number: server.log.read_text().count(" exited with code ") == number)
            assert server.json("GET", "/v2/health/live")[0] == 200
            status, said = server.json("GET", "/v2/health/ready")
            assert (status, said) == (503, {"ready": False})
            assert server.ask("POST", f"{server.path}/infer", b"{}")[0] == 503
            wait_until(lambda pid=pid: server.workers() not in ([], [pid]))
        assert server.log.read_text().count(" starts in ") == 2, "each but the first had not served"
        assert "starts in 2 s" in server.log.read_text()
        wait_until(lambda: "serves version" in server.log.read_text())
        inputs = batch(4)
        assert equal(server.infer(inputs)[1], computed(Net(), inputs))
        assert server.stop() == 0


def test_a_reload_loses_no_request_and_each_answer_is_of_the_version_that_it_names(
    server: Served, folder: Path
) -> None:
    (old,) = server.json("GET", server.path)[1]["versions"]
    done = threading.Event()
    seen: list[str] = []

    def ask() -> None:
        number = 0
        while not done.wait(0.02):  # the workers need the processors to load
            number += 1
            inputs = batch(3, number)
            version, outputs = server.infer(inputs)
            assert equal(outputs, computed(Net(0 if version == old else 1000), inputs))
            seen.append(version)

    with ThreadPoolExecutor(2) as clients:
        asking = [clients.submit(ask) for _ in range(2)]
        (folder / "bundle" / "inference.json").rename(folder / "kept")
        server.process.send_signal(signal.SIGHUP)  # there is no bundle at the moment
        wait_until(lambda: "Could not load the bundle again" in server.log.read_text())
        save(folder / "bundle", 1000)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: (seen[-1:] != [old] and seen) or any(each.done() for each in asking))
        wait_until(lambda: len(server.workers()) == 2 or any(each.done() for each in asking))
        done.set()
        for each in asking:
            each.result()
    assert {old} < set(seen)
    assert len(list((folder / "cache").rglob("*.pt2"))) == 2, "those of the old version are gone"


def test_kept_requests_are_replayed_on_a_new_version_and_a_failure_is_logged_and_not_counted(
    tmp_path: Path,
) -> None:
    save(tmp_path / "bundle")
    with served(tmp_path, "bundle", "--threads=1") as server:
        folder = next((tmp_path / "cache").glob("*/metrics"))
        inputs = batch(2)
        inputs["ids"][0, 0] = ROWS - 1
        server.infer(inputs)
        (kept,) = folder.glob("request-*")
        size, _, body = kept.read_bytes().partition(b"\n")
        assert (body, size.decode()) == (encoded(inputs)[0], encoded(inputs)[1][JSON_SIZE])
        for number in range(40):  # within a second of it
            server.infer(batch(2, number))
        assert len(list(folder.glob("request-*"))) < 40
        for path in folder.glob("request-*"):
            path.unlink()
        kept.write_bytes(size + b"\n" + body)
        (folder / "request-x").write_bytes(b"\n" + json.dumps({"inputs": in_json(batch(1))}).encode())

        def counted() -> list[str]:
            text = server.ask("GET", "/metrics")[2].decode()
            return sorted(re.findall(r"(?m)^fleetrun_serve_.*(?:rows|seconds_|infer).*$", text))

        def reload(words: str) -> None:
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: words in server.log.read_text(), server.log.read_text)

        before = counted()
        assert "fleetrun_serve_rows_total 82.0" in before
        save(tmp_path / "bundle", 1000)
        (old,) = server.json("GET", server.path)[1]["versions"]
        reload("serving the bundle ")
        wait_until(lambda: server.json("GET", server.path)[1]["versions"] != [old])
        assert "kept requests fail" not in server.log.read_text()
        model = Net(1000).eval()
        model.rows = torch.nn.Embedding(ROWS - 1, 4)
        save_program(tmp_path / "bundle", model, batch(3, 1) | {"ids": torch.zeros(3, 3).long()}, None, {})
        reload("1 of 2 kept requests fail with version ")
        wait_until(lambda: server.log.read_text().count("serving the bundle ") == 2, server.log.read_text)
        assert f"which is served now: {kept.name}: ids has the id 49" in server.log.read_text()
        assert counted() == before
        assert server.stop() == 0


def test_a_slow_request_is_logged_with_its_stages_once_a_second_and_kept(tmp_path: Path) -> None:
    save(tmp_path / "bundle")
    with served(tmp_path, "bundle", "--threads=1", "--slow=1e-9") as server:
        inputs = batch(2)
        for _ in range(20):
            server.infer(inputs)
        lines = [line for line in server.log.read_text().splitlines() if "slow request" in line]
        assert 0 < len(lines) < 20
        found = re.search(
            r"slow request: ([\d.]+) s \(read ([\d.]+), decode ([\d.]+), wait ([\d.]+), compute ([\d.]+)\), "
            r"(\d+) bytes, kept in (\S+); 1 since",
            lines[0],
        )
        assert found, lines
        total, *stages = map(float, found.groups()[:5])
        assert abs(total - sum(stages)) < 0.01
        size, _, body = Path(found[7]).read_bytes().partition(b"\n")
        assert (body, size.decode()) == (encoded(inputs)[0], encoded(inputs)[1][JSON_SIZE])
        assert int(found[6]) == len(body)
    with served(tmp_path, "bundle", "--threads=1", "--timeout=0.2", "--slow=0.1") as server:
        with socket.create_connection(("127.0.0.1", server.port), 60) as slow:
            slow.sendall(
                f"POST {server.path}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode()
            )
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
        assert re.search(r"slow request: [\d.]+ s \(read [\d.]+\), 0 bytes", server.log.read_text())


def test_when_the_server_is_killed_its_workers_end_and_a_stop_answers_what_has_begun(tmp_path: Path) -> None:
    save(tmp_path / "bundle")
    words = ("--workers=2", "--threads=1", "--timeout=1000", "--grace=1000")
    with (
        served(tmp_path, "bundle", *words) as server,
        socket.create_connection(("127.0.0.1", server.port), 60) as begun,
    ):
        begun.sendall(f"POST {server.path}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode())
        assert server.json("GET", "/v2/health/ready")[0] == 200  # it has been accepted before this
        workers = server.workers()
        server.stop(signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        (left,) = (tmp_path / "cache").iterdir()
    with served(tmp_path, "bundle", "--threads=1") as server:
        assert not left.exists()
        body, headers = encoded(batch(2))
        head = f"POST {server.path}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        with (
            socket.create_connection(("127.0.0.1", server.port), 60) as late,
            socket.create_connection(("127.0.0.1", server.port), 60) as begun,
        ):
            begun.sendall(head.encode() + body[:10])
            assert server.json("GET", "/v2/health/ready")[0] == 200  # it has been accepted before this
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: refused(server.port))
            begun.sendall(body[10:])
            assert begun.recv(100).startswith(b"HTTP/1.1 200")
            time.sleep(LAST_S + 0.5)
            late.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert late.recv(100).startswith(b"HTTP/1.1 200"), "a first request, which it may still send"
        assert server.process.wait(60) == 0


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 60).close()
    except ConnectionRefusedError:
        return True
    return False


def test_workers_that_cannot_load_a_program_end_the_server_with_their_reason(
    forker: Forker, tmp_path: Path
) -> None:
    model = Guarded().eval()
    save_program(tmp_path / "bundle", model, batch(3), None, {})
    said = not_served(forker, tmp_path, "bundle", "--threads=1")
    assert re.search(r"(?s)right only if.*before it could serve", said)


def test_a_folder_without_a_bundle_is_not_served(forker: Forker, tmp_path: Path) -> None:
    assert "nothing has no inference.json" in not_served(forker, tmp_path, "nothing")


@pytest.mark.parametrize(
    ("words", "said"), [(("bundle", "--workers=0"), "--workers"), (("bundle/.", "--name=a/b"), "--name")]
)
def test_what_cannot_be_served(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = subprocess.run(
        [*FLEETRUN, "serve", *words, "--port=0", f"--cache={tmp_path}/cache"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


def test_a_port_that_is_taken(forker: Forker, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = not_served(forker, tmp_path, "bundle", f"--port={port}")
    assert f"127.0.0.1:{port} (--port): Address already in use" in said
