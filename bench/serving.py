"""`fleetrun serve`, measured with wrk, on a parameter-server job that publishes while it trains:

    python bench/serving.py [--write docs/benchmarks-serving.md]

It takes five minutes, and needs Debian's wrk and the extra serve.

Rows and requests a second over HTTP with binary tensors, next to the same model in plain torch in one
process; the 99th percentile of requests while increments are read, and while the follower is suspended, in
turns; and the time from a push to the first answer that has it, without and with kills (of a worker and of a
parameter server).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _marks import check_marks, measured, publish  # a script's neighbours
from _serving_job import COUNTER, DIM, ROWS, SLOTS, Model  # a script's neighbour

NAME = "serving.py"
FLEETRUN = (sys.executable, "-m", "fleetrun")
SIZE = "Inference-Header-Content-Length"
LUA = """
local file = io.open("%s", "rb")
wrk.method, wrk.body = "POST", file:read("*a")
wrk.headers["%s"] = "%d"
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\\nJSON {"requests": %%d, "seconds": %%f, "p50": %%f, "p99": %%f, "errors": %%d}\\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
"""


def request(inputs: dict[str, torch.Tensor], outputs: list[str]) -> tuple[bytes, int]:
    """A body in binary, and the size of its JSON. All inputs are INT64."""
    contents = {name: tensor.numpy().tobytes() for name, tensor in inputs.items()}
    entries = [
        {
            "name": name,
            "datatype": "INT64",
            "shape": list(inputs[name].shape),
            "parameters": {"binary_data_size": len(content)},
        }
        for name, content in contents.items()
    ]
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    head = json.dumps({"inputs": entries, "outputs": wanted}).encode()
    return b"".join([head, *contents.values()]), len(head)


def wrk(folder: Path, port: int, rows: int, connections: int, seconds: float) -> dict[str, Any]:
    body, size = request({"ids": torch.randint(1, ROWS, (rows, SLOTS))}, ["score"])
    (folder / "body").write_bytes(body)
    (folder / "post.lua").write_text(LUA % (folder / "body", SIZE, size))
    done = subprocess.run(
        ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency", "-s",
         str(folder / "post.lua"), f"http://127.0.0.1:{port}/v2/models/model/infer"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("JSON "))
    found: dict[str, Any] = json.loads(line.removeprefix("JSON "))
    assert not found["errors"], done.stdout
    return found


def counter(port: int) -> float:
    """The row that counts steps, as it is served; -1 while nobody answers."""
    body, size = request({"ids": torch.full((1, SLOTS), COUNTER)}, ["first"])
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v2/models/model/infer", body, {SIZE: str(size)})
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            content = answer.read()[int(answer.headers[SIZE]) :]
            return float(torch.frombuffer(bytearray(content), dtype=torch.float32)[0])
    except (urllib.error.URLError, ConnectionError):
        return -1.0


@contextlib.contextmanager
def job(folder: Path, interval: float) -> Iterator[None]:
    env = {**os.environ, "INTERVAL_S": str(interval), "OMP_NUM_THREADS": "1"}
    with (folder / "job.out").open("wb") as out:
        process = subprocess.Popen(
            [*FLEETRUN, "--server_num=1", "--trainer_num=1", "--warm", f"--log_dir={folder}/log",
             str(Path(__file__).with_name("_serving_job.py")), str(folder)],
            env=env, stdout=out, stderr=out,
        )  # fmt: skip
        try:
            wait_for(lambda: (folder / "filled").exists(), process)
            yield
            (folder / "stop").touch()
            process.wait(120)
        finally:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def server(folder: Path, workers: int, *, follow: bool = True) -> Iterator[tuple[int, int]]:
    """Its pid and port."""
    words = [f"--follow={folder / 'published'}"] if follow else []
    log = folder / f"serve-{workers}.out"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*FLEETRUN, "serve", str(folder / "bundle"), *words, "--name=model", "--port=0",
             f"--workers={workers}", "--threads=1"],
            stdout=out, stderr=out,
        )  # fmt: skip
        try:
            wait_for(lambda: "is served at" in log.read_text(), process)
            yield process.pid, int(log.read_text().split("is served at")[1].split()[0].rpartition(":")[2])
        finally:
            process.terminate()
            process.wait(60)


def wait_for(condition: Any, process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None, process.args
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_of(pids: list[int]) -> float:
    """Seconds of CPU of these processes so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


@torch.inference_mode()
def plain(rows: int, seconds: float) -> tuple[float, float]:
    """Calls a second of the model in plain torch, one thread, the table as an nn.Embedding; and the CPU
    seconds of one.
    """
    torch.set_num_threads(1)
    model = Model(torch.nn.Embedding(ROWS, DIM)).eval()
    batches = [torch.randint(1, ROWS, (rows, SLOTS)) for _ in range(64)]
    count, until = 0, time.perf_counter() + seconds
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() < until:
        model(batches[count % 64])
        count += 1
    return count / (time.perf_counter() - began), (time.process_time() - cpu) / count


def throughput(folder: Path, seconds: float) -> Iterator[str]:
    yield "| rows | plain torch, one process: requests/s (rows/s) | served, 1 worker | served, 2 workers |"
    yield "|---:|---:|---:|---:|"
    cells: dict[int, list[str]] = {}
    for rows in (1, 64, 512):
        alone, cpu = plain(rows, seconds)
        cells[rows] = [f"{alone:,.0f} ({alone * rows:,.0f}), CPU {1e3 * cpu:.2f} ms"]
    for workers in (1, 2):
        with server(folder, workers) as (pid, port):
            for rows, line in cells.items():
                before = cpu_of(children(pid))
                found = wrk(folder, port, rows, 8, seconds)
                rate = found["requests"] / found["seconds"]
                cpu = 1e3 * (cpu_of(children(pid)) - before) / found["requests"]
                times = f"CPU {cpu:.2f} ms, p50 {found['p50']:.1f}, p99 {found['p99']:.1f} ms"
                line.append(f"{rate:,.0f} ({rate * rows:,.0f}), {times}")
    for rows, line in cells.items():
        yield f"| {rows} | {' | '.join(line)} |"


def increments(folder: Path, seconds: float, turns: int) -> Iterator[str]:
    """In turns, the same workers: with the follower, and with the follower suspended."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    with server(folder, 1) as (pid, port):
        for _ in range(turns):
            os.kill(pid, signal.SIGSTOP)
            found["without"].append(wrk(folder, port, 64, 4, seconds)["p99"])
            os.kill(pid, signal.SIGCONT)
            time.sleep(1)  # it catches up
            found["with"].append(wrk(folder, port, 64, 4, seconds)["p99"])
    yield f"| p99 of requests of 64 rows, ms, {turns} turns of {seconds:g} s | median | all |"
    yield "|---|---:|---|"
    for name, values in found.items():
        each = " ".join(f"{value:.2f}" for value in values)
        yield f"| {name} increments | {statistics.median(values):.2f} | {each} |"
    ratio = statistics.median(found["with"]) / statistics.median(found["without"])
    yield f"| ratio | {ratio:.2f} | |"


def freshness(folder: Path, seconds: float, kill: bool) -> str:
    """From the beginning of a push to the first answer that has it; asked every 20 ms."""
    fill = -(-(ROWS - 1) // 50_000)
    with server(folder, 2) as (pid, port):
        seen: list[tuple[float, float]] = []
        began = time.time()
        end = began + seconds
        kills = [began + seconds * share for share in (0.2, 0.4, 0.6, 0.8)] if kill else []
        last = fill
        while time.time() < end or kills or seen[-1][1] < last:
            if kills and time.time() > kills[0]:
                victim = int((folder / "server.pid").read_text()) if len(kills) % 2 else children(pid)[0]
                with contextlib.suppress(ProcessLookupError):  # the last one killed is not back yet
                    os.kill(victim, signal.SIGKILL)
                    kills.pop(0)
            seen.append((time.time(), counter(port)))
            pushes = [float(line) for line in (folder / "pushes").read_text().split()]
            last = fill + sum(pushed < end for pushed in pushes)
            time.sleep(0.02)
    delays = sorted(
        next(when for when, count in seen if count >= number) - pushed
        for number, pushed in enumerate(pushes, fill + 1)
        if began <= pushed < end
    )
    quantiles = [delays[min(len(delays) - 1, int(len(delays) * share))] for share in (0.5, 0.99)]
    what = "a worker and the parameter server killed in turns, 4 kills" if kill else "nothing killed"
    return f"| {what} | {len(delays)} | {quantiles[0]:.1f} | {quantiles[1]:.1f} | {delays[-1]:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement")
    parser.add_argument("--interval", type=float, default=5.0, help="publish_interval_s")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="put the tables between the marks in this file"
    )
    args = parser.parse_args()
    check_marks(args.write, NAME)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name, job(Path(name), args.interval):
        folder = Path(name)
        lines = [
            *throughput(folder, args.seconds / 2),
            "",
            *increments(folder, args.seconds, args.turns),
            "",
            "| from a push to an answer that has it, s | pushes | median | p99 | most |",
            "|---|---:|---:|---:|---:|",
            freshness(folder, 4 * args.seconds, kill=False),
            freshness(folder, 6 * args.seconds, kill=True),
        ]
    what = (
        f"torch {torch.__version__}, {ROWS:,} rows x {DIM}, 10,000 rows a second changed, a version every "
        f"{args.interval:g} s"
    )
    head = measured(what, load)
    publish("\n".join([head, "", *lines]), args.write, NAME)


if __name__ == "__main__":
    main()
