"""The parameter servers' benches: what is pure in them, and the counters against a known exchange."""

import importlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """Imports a module of the bench folder, which is no package, by its name."""
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(BENCH))


def costs(servers: int) -> dict[str, float]:
    """A step of one trainer by known lines."""
    return {
        "servers": servers,
        "trainer_cpu": 0.004 + 0.0001 * servers,
        "server_cpu": 0.001 + 0.0002 * servers,
        "messages": 4 * servers,
        "bytes_in": 400_000 + 100 * servers,
        "bytes_out": 300_000 + 200 * servers,
    }


def test_the_paper_model_finds_the_lines_it_was_made_of(bench):
    paper = bench("_ps_paper")
    fitted = paper.fit([costs(servers) for servers in (1, 2, 4, 8)])
    for name, value in costs(100).items():
        if name != "servers":
            assert fitted[name].at(100) == pytest.approx(value)
    with pytest.raises(ValueError, match="servers"):
        paper.fit([costs(2), costs(2)])
    noisy = paper.fit([costs(1), {**costs(2), "server_cpu": 0.0001}])
    assert noisy["server_cpu"].each == 0, "more servers never cost less"


def test_the_paper_model_names_what_saturates_first(bench):
    paper = bench("_ps_paper")
    fitted = paper.fit([costs(servers) for servers in (1, 2, 4, 8)])

    def at(servers: int, trainers: int, link: float):
        return paper.load(fitted, servers, trainers, links={"the link": link})

    few = at(100, 10, 1e9)
    assert few.limit == "trainers' CPU"
    assert few.steps == pytest.approx(10 / 0.014)
    many = at(100, 1000, 1e9)
    assert many.limit == "servers' CPU"
    assert many.steps == pytest.approx(100 / 0.021)
    assert many.messages == pytest.approx(1000 * 400)
    assert many.server_messages == pytest.approx(400 * many.steps / 100)
    assert many.bytes == pytest.approx(1000 * (700_000 + 300 * 100))
    slow = at(100, 1000, 1e6)
    assert slow.limit == "the link"
    assert slow.steps == pytest.approx(1e6 * 100 / 410_000), "the busier way counts"


def result(speed: float, auc: float) -> dict[str, float]:
    return {"speed": speed, "trainer_cpu": 8, "server_cpu": 4, "server_mb": 500, "auc": auc, "log_loss": 0.5}


def test_the_table_says_what_is_met(bench):
    tables = bench("_ps_tables")
    samples = {
        "async": {
            "fleetrun": [result(130_000, 0.786), result(125_000, 0.787), result(110_000, 0.788)],
            "Paddle": [result(40_000, 0.784)],
            "alone": [{"speed": 220_000}],
        },
        "batch64": {"fleetrun": [result(29_000, 0.78)], "Paddle": [result(9_900, 0.79)]},
        "geo": {"Paddle": [result(56_500, 0.785)]},
    }
    text = tables.tables(samples, 0.8150, 0.5147)
    assert (
        "in memory | 120,000 and 3 x Paddle | **125,000 [110,000-130,000]** | yes | 40,000 | 3.12 |" in text
    )
    assert "| async, 128x64, batch 64 | 30,000 | **29,000** | no | 9,900 | 2.93 | - |" in text
    assert "| geo, k = 100, 128x64 | 150,000 | **-** | no | 56,500 | - | - |" in text
    assert "| <= 5 | **4.0** | yes | 4.0 | 1.00 | - |" in text
    assert "0.7870 / 0.7840 | 0.5000 / 0.5000 | yes |" in text
    assert "0.7800 / 0.7900 | 0.5000 / 0.5000 | no |" in text, "0.01 below Paddle's"
    assert "AUC 0.8150 and log loss 0.5147" in text


def test_a_run_that_failed_stands_in_its_cell(bench):
    tables = bench("_ps_tables")
    failed = {tables.FAILED: 1.0}
    samples = {
        "async": {"fleetrun": [result(130_000, 0.786)], "Paddle": [failed, failed]},
        "sync": {"fleetrun": [failed, result(110_000, 0.7)], "Paddle": [result(9_900, 0.7), failed, failed]},
    }
    text = tables.tables(samples, 0.8150, 0.5147)
    assert "| **130,000** | yes | 2 of 2 failed | - | - |" in text
    assert "| **110,000, 1 of 2 failed** | yes | 9,900, 2 of 3 failed | 11.11 |" in text


def test_rows_that_are_measured_again_take_their_places(bench):
    tables, cases = bench("_ps_tables"), bench("_ps_cases").CASES
    merged, order = bench("_ps_merge").merged, [case.title for case in cases]

    def text(when: str, speeds: dict[str, float]) -> str:
        samples = {name: {"fleetrun": [result(speed, 0.7)]} for name, speed in speeds.items()}
        return f"{when}, 2 CPUs.\n\nCells: as ever.\n\n" + tables.tables(samples, 0.8, 0.5)

    old = text("Monday", {"async": 1000, "batch64": 2000, "pipe": 3000})
    again = merged(old, text("Tuesday", {"batch64": 2500, "geo": 4000, "sync": 5000}), order)
    assert again.startswith("Monday, 2 CPUs.\n\nLater, async, 128x64, batch 64; geo, k = 100, 128x64; sync")
    assert ": Tuesday, 2 CPUs.\n\nCells: as ever.\n\n|" in again
    both = text("Monday", {"async": 1000, "batch64": 2500, "geo": 4000, "sync": 5000, "pipe": 3000})
    assert set(both.splitlines()) < set(again.splitlines()), "rows, heads and notes"
    speeds = [line for line in again.splitlines() if line.startswith("| ") and "**" in line]
    assert [line for line in both.splitlines() if line in speeds] == speeds, "in the same order"
    with pytest.raises(ValueError, match="columns"):
        merged("Sunday.\n\n| a | b |\n| --- | --- |\n| async | 1 |", old, order)


def test_three_times_paddle_is_wanted_too(bench):
    tables, cases = bench("_ps_tables"), {case.name: case for case in bench("_ps_cases").CASES}
    assert tables.met(cases["async"], 121_000, 40_000) == "yes"
    assert tables.met(cases["async"], 121_000, 41_000) == "no"
    assert tables.met(cases["async"], 119_000, 20_000) == "no"
    assert tables.met(cases["async"], 121_000, None) == "yes"
    assert tables.met(cases["async"], None, 40_000) == "no"


def test_the_figures_of_a_job_are_those_of_all_trainers(bench):
    jobs = bench("_ps_jobs")
    row = {
        "rows": 1000,
        "cpu": 0.5,
        "server_cpu": 0.25,
        "server_peak_mb": 70,
        "test_rows": 4,
        "test_loss": 2.0,
    }
    first = {**row, "seconds": 2.0, "others": [2, 0], "clicks": [0, 2]}
    second = {**row, "seconds": 4.0, "others": [0, 2], "clicks": [2, 0], "server_cpu": 0.3}
    found = jobs.figures([first, second])
    assert found == {
        "speed": 500.0,
        "trainer_cpu": 500.0,
        "server_cpu": 150.0,
        "server_mb": 70.0,
        "auc": 0.5,
        "log_loss": 0.5,
    }
    assert "auc" not in jobs.figures([first], with_test=False)


def test_marks(bench):
    put = bench("_marks").put_between_marks
    text = "a\n<!-- bench/x.py --write: begin -->\nold\n<!-- bench/x.py --write: end -->\nz\n"
    assert put(text, "x.py", "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match=r"y\.py --write: begin"):
        put(text, "y.py", "new")
    assert bench("_marks").between_marks(text, "x.py") == "old"


COUNT = """
import json, sys, zmq
from _wire import Wire
from trainers.ps.transport import receive, send
endpoint = sys.argv[1]
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(f"tcp://{endpoint}")
send(socket, [b"hello"])
receive(socket)
wire = Wire([endpoint])
for _ in range(3):
    send(socket, [b"x" * 1000, b"y" * 5000])
    receive(socket)
print(json.dumps(wire.since()))
"""


@pytest.mark.slow
def test_the_wire_is_counted_as_the_kernel_saw_it():
    """In a process of its own, since counting changes zmq's sockets."""
    zmq = pytest.importorskip("zmq")
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    command = [sys.executable, "-c", COUNT, f"127.0.0.1:{port}"]
    with subprocess.Popen(command, cwd=BENCH, stdout=subprocess.PIPE, text=True) as child:
        try:
            for _ in range(4):
                assert server.poll(60_000)
                route, *_ = server.recv_multipart()
                server.send_multipart([route, b"z" * 2000])
            counted = json.loads(child.communicate(timeout=60)[0])
        finally:
            child.kill()
    server.close(linger=0)
    context.term()
    assert (counted["sent_messages"], counted["received_messages"]) == (3, 3)
    assert 18_000 < counted["sent_bytes"] < 18_000 + 100, "payload and zmq's framing"
    assert 6_000 < counted["received_bytes"] < 6_000 + 100


def test_other_connections_are_not_counted(bench):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            with accepted:
                client.sendall(b"x" * 100)
                accepted.recv(100)
                code = f"from _wire import Wire; print(Wire(['127.0.0.1:{port}']).since())"
                done = subprocess.run(
                    [sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, check=True
                )
    assert "'sent_bytes': 0" in done.stdout


def test_bytes_a_row_are_a_slope(bench, monkeypatch):
    memory = bench("_paddle_memory")
    found = [(100_000, 900e6)] + [(rows, 500e6 + 220 * rows) for rows in range(200_000, 1_000_001, 100_000)]
    assert memory.slope(found) == pytest.approx(220)
    monkeypatch.delenv("PADDLE_BIN", raising=False)
    assert memory.bytes_a_row("Adagrad", 16, 1000) is None
    kernels = bench("ps_kernels")
    assert kernels.line(("bytes a row", {"fleetrun": 141.0, "Paddle": 222.0})).endswith("| - | 222 |")
