"""What a request to `fleetrun serve` costs beside the bare model, and the first one after a new version:

    python bench/serving_requests.py [--write docs/benchmarks-serving.md]

It takes four minutes, and needs the extra serve. The job of bench/serving.py trains meanwhile, and publishes
a version every two seconds. One worker with one thread answers requests in binary, from this process over
plain sockets. CPU is counted for the worker only, in turns with the bare model in plain torch.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from _marks import check_marks, measured, publish  # a script's neighbours
from _serving_job import COUNTER, ROWS, SLOTS
from serving import SIZE, children, job, plain, request, server

NAME = "serving_requests.py"
CANDIDATES = 64
median = statistics.median


class Ranking(torch.nn.Module):
    """A user of 20 ids and 50 past items, and a candidate of 6 ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.past = torch.nn.Embedding(100_000, 16), torch.nn.EmbeddingBag(100_000, 16, "mean")
        self.tower = torch.nn.Sequential(
            torch.nn.Linear(21 * 16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
        )
        self.item = torch.nn.Linear(6 * 16, 64)
        self.top = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, user: torch.Tensor, past: torch.Tensor, item: torch.Tensor) -> dict[str, torch.Tensor]:
        users = self.tower(torch.cat([self.table(user).flatten(1), self.past(past)], 1))
        items = self.item(self.table(item).flatten(1))
        return {"score": self.top(torch.cat([users * items, items], 1))[:, 0]}


def ranking_inputs(users: int, candidates: int) -> dict[str, torch.Tensor]:
    shapes = {"user": (users, 20), "past": (users, 50), "item": (candidates, 6)}
    return {name: torch.randint(100_000, shape) for name, shape in shapes.items()}


def message(inputs: Mapping[str, torch.Tensor]) -> bytes:
    body, size = request(dict(inputs), ["score"])
    head = f"POST /v2/models/model/infer HTTP/1.1\r\nHost: x\r\n{SIZE}: {size}\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def connected(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def answer(connection: socket.socket) -> bytes:
    """The whole answer. AssertionError unless the status is 200."""
    found = connection.recv(1 << 16)
    assert found.startswith(b"HTTP/1.1 200"), found
    head, _, body = found.partition(b"\r\n\r\n")
    size = next(
        int(line.partition(b": ")[2])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length: ")
    )
    while len(body) < size:
        body += connection.recv(1 << 16)
    return body


def ask(port: int, asked: bytes, connections: int, seconds: float) -> int:
    """Ask all the time over so many connections, and return the number of answers."""
    count, until = 0, time.perf_counter() + seconds
    with selectors.DefaultSelector() as ready:
        for _ in range(connections):
            ready.register(made := connected(port), selectors.EVENT_READ)
            made.sendall(asked)
        while ready.get_map():
            for key, _ in ready.select():
                connection: socket.socket = key.fileobj  # type: ignore[assignment]  # this is what was registered
                answer(connection)
                count += 1
                if time.perf_counter() < until:
                    connection.sendall(asked)
                else:
                    ready.unregister(connection)
                    connection.close()
    return count


def cpu_of(pid: int) -> float:
    """Milliseconds of CPU of this process so far, to the microsecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def cost(port: int, pid: int, asked: bytes, connections: int, seconds: float) -> float:
    """Milliseconds of CPU of the worker for an answer."""
    before = cpu_of(pid)
    count = ask(port, asked, connections, seconds)
    return (cpu_of(pid) - before) / count


def beside_the_model(folder: Path, turns: int, seconds: float) -> Iterator[str]:
    yield "| 64 rows, CPU of an answer, ms | bare model | served | ratio, median | least and most |"
    yield "|---|---:|---:|---:|---|"
    asked = message({"ids": torch.randint(1, ROWS, (64, SLOTS))})
    with server(folder, 1) as (pid, port):
        (worker,) = children(pid)
        for connections in (8, 1):
            found = []
            for _ in range(turns):
                bare = 1e3 * plain(64, seconds)[1]
                found.append((bare, cost(port, worker, asked, connections, seconds)))
            ratios = [ours / bare for bare, ours in found]
            yield (
                f"| {connections} connections | {median(bare for bare, _ in found):.2f} | "
                f"{median(ours for _, ours in found):.2f} | **{median(ratios):.2f}** | "
                f"{min(ratios):.2f} to {max(ratios):.2f} |"
            )


def one_user(folder: Path, turns: int, seconds: float) -> Iterator[str]:
    from trainers.export import save_program

    (folder / "ranking").mkdir()
    save_program(folder / "ranking" / "bundle", Ranking().eval(), ranking_inputs(5, 5), None, {})
    one = ranking_inputs(1, CANDIDATES)
    many = {name: each.expand(CANDIDATES, -1).contiguous() for name, each in one.items()}
    yield f"| {CANDIDATES} candidates of a user, 8 connections | bytes | CPU of an answer, ms |"
    yield "|---|---:|---:|"
    found: dict[str, list[float]] = {"many": [], "one": []}
    with server(folder / "ranking", 1, follow=False) as (pid, port):
        (worker,) = children(pid)
        for _ in range(turns):
            found["many"].append(cost(port, worker, message(many), 8, seconds))
            found["one"].append(cost(port, worker, message(one), 8, seconds))
    for name, inputs in (("many", many), ("one", one)):
        what = "a row of the user for each candidate" if name == "many" else "one row of the user"
        yield f"| {what} | {len(message(inputs)):,} | {median(found[name]):.2f} |"
    ratio = median(one / many for many, one in zip(found["many"], found["one"], strict=True))
    yield f"| ratio, median of {turns} turns | | **{ratio:.2f}** |"


def after_a_swap(folder: Path, seconds: float) -> Iterator[str]:
    """Ask every 10 ms, and compare the first answer of each version with all answers."""
    asked = message({"ids": torch.randint(COUNTER, ROWS, (64, SLOTS))})
    firsts, others, last = [], [], b""
    with server(folder, 1) as (pid, port):
        connection, until = connected(port), time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            connection.sendall(asked)
            found = answer(connection)
            took = 1e3 * (time.perf_counter() - began)
            version = found.partition(b'"model_version":"')[2].partition(b'"')[0]
            (firsts if last and version != last else others).append(took)
            last = version
            time.sleep(0.01)
        connection.close()
        reloaded, fresh = [], []
        for _ in range(6):
            fresh.append(first(port, asked))
            time.sleep(1.1)  # a request a second is kept
            fresh.append(first(port, asked))
            former = set(children(pid))
            os.kill(pid, signal.SIGHUP)
            while not (now := set(children(pid))) or now & former:
                time.sleep(0.05)
            reloaded.append(first(port, asked))
    yield "| latency of 64 rows, ms | answers | median | of the median |"
    yield "|---|---:|---:|---:|"
    for what, some, base in (
        ("all answers over one connection", others, others),
        ("the first one of each version of the job", firsts, others),
        ("the first one of a new connection", fresh, fresh),
        ("the same, to a new worker after SIGHUP", reloaded, fresh),
    ):
        yield f"| {what} | {len(some):,} | {median(some):.2f} | {median(some) / median(base):.2f} |"


def first(port: int, asked: bytes) -> float:
    """Milliseconds of the first answer of a connection."""
    with connected(port) as connection:
        began = time.perf_counter()
        connection.sendall(asked)
        answer(connection)
        return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of each turn")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="put the tables between the marks in this file"
    )
    args = parser.parse_args()
    check_marks(args.write, NAME)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name, job(Path(name), 2.0):
        folder = Path(name)
        lines = [
            *beside_the_model(folder, args.turns, args.seconds),
            "",
            *one_user(folder, args.turns, args.seconds),
            "",
            *after_a_swap(folder, 4 * args.turns * args.seconds),
        ]
    head = measured(f"torch {torch.__version__}, {args.turns} turns of {args.seconds:g} s", load)
    publish("\n".join([head, "", *lines]), args.write, NAME)


if __name__ == "__main__":
    main()
