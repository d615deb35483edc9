"""Pulls and pushes of a real server process over loopback, compared with limits measured in the same run.

    python bench/ps_micro.py [--runs 15] [--rows 1000000] [--write docs/benchmarks-ps-parts.md]

One trainer, one request at a time, unique ids drawn uniformly from a table with Adagrad that has them all.
`echo`: two plain zmq sockets that exchange as many bytes in either direction, without checksum and without
looking at them. `memcpy`: copies that many bytes once. The servers' turns alternate; cells are medians.
Server CPU counts libzmq's threads too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zmq
from _marks import check_marks, measured, publish
from _ps_served import Served, free_endpoint, table_line

from trainers.ps.tables.rules import Adagrad
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.wire import Field, Kind, Part

NAME = "ps_micro.py"
SIZES = (5_000, 100_000)
DIMS = (9, 64)
VERBS = ("pull", "push")
TOKEN = "a token for this bench only, no secret"
_LENGTH = struct.Struct("<Q")

Exchange = Callable[[np.ndarray | None, int], None]
"""Sends these bytes, and gets so many."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request: `verb` for `keys` rows of `dim`."""

    verb: str
    keys: int
    dim: int

    @property
    def sent(self) -> int:
        return 8 * self.keys + (4 * self.dim * self.keys if self.verb == "push" else 0)

    @property
    def received(self) -> int:
        return 4 * self.dim * self.keys if self.verb == "pull" else 0


# ---- the echo


def answer(endpoint: str) -> None:
    """Until an empty message comes: as many bytes as the first frame says."""
    context = zmq.Context.instance()
    content = np.ones(max(SIZES) * max(DIMS) * 4, np.uint8)
    with context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://{endpoint}")
        while True:
            route, head, *_ = router.recv_multipart(copy=False)
            if not len(head.buffer):
                return
            (wanted,) = _LENGTH.unpack(head.bytes)
            router.send_multipart([route.bytes, content[:wanted].data], copy=False)


@contextmanager
def echo() -> Iterator[Exchange]:
    endpoint = free_endpoint()
    process = multiprocessing.get_context("spawn").Process(target=answer, args=(endpoint,))
    process.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://{endpoint}")

        def exchange(sent: np.ndarray | None, received: int) -> None:
            frames = [_LENGTH.pack(received), sent.data] if sent is not None else [b""]
            dealer.send_multipart(frames, copy=False)
            if sent is not None:
                dealer.recv_multipart(copy=False)

        yield exchange
        exchange(None, 0)
        process.join()


# ---- what is measured


class Requests:
    """The messages of a case, ready to be sent."""

    def __init__(self, case: Case, table: int, rows: int) -> None:
        random = np.random.default_rng(3)
        self._keys = [torch.from_numpy(random.choice(rows, case.keys, replace=False)) for _ in range(4)]
        self._grad = torch.randn(case.keys, case.dim)
        self._case, self._table, self._turn = case, table, 0

    def send(self, served: Served) -> None:
        keys = Part(self._table, Field.KEYS, self._keys[self._turn % 4])
        self._turn += 1
        if self._case.verb == "pull":
            (rows,) = served.ask(Kind.PULL, keys).parts
            assert rows.data.shape == self._grad.shape
        else:
            served.ask(Kind.PUSH, keys, Part(self._table, Field.ROWS, self._grad, lr=1e-3))


def seconds(call: Callable[[], object], times: int) -> float:
    """Of one call; the mean of so many."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def measure(
    cases: Sequence[Case], plain: Served, curve: Served, exchange: Exchange, rows: int, runs: int
) -> dict[Case, dict[str, float]]:
    """Medians: `ours`, `curve`, `echo`, `memcpy` in seconds a request, `cpu` in server seconds."""
    found: dict[Case, dict[str, list[float]]] = {case: {} for case in cases}
    requests = {case: Requests(case, DIMS.index(case.dim), rows) for case in cases}
    source, target = (np.ones(max(case.sent + case.received for case in cases), np.uint8) for _ in "ab")
    for run in range(runs + 1):
        for case in cases:
            times, sent = max(1, 50_000 // case.keys), source[: case.sent]
            before = plain.cpu()
            calls: dict[str, Callable[[], object]] = {
                "ours": lambda case=case: requests[case].send(plain),  # type: ignore[misc]
                "curve": lambda case=case: requests[case].send(curve),  # type: ignore[misc]
                "echo": lambda case=case, sent=sent: exchange(sent, case.received),  # type: ignore[misc]
                "memcpy": lambda size=case.sent + case.received: np.copyto(target[:size], source[:size]),  # type: ignore[misc]
            }
            took = {name: seconds(call, times) for name, call in calls.items()}
            took["cpu"] = (plain.cpu() - before) / times
            for name, each in took.items():
                found[case].setdefault(name, []).extend([each] if run else [])
    return {
        case: {name: statistics.median(each) for name, each in lists.items()} for case, lists in found.items()
    }


def fill(served: Served, rows: int) -> None:
    for table in range(len(DIMS)):
        for start in range(0, rows, max(SIZES)):
            keys = torch.arange(start, min(start + max(SIZES), rows))
            served.ask(Kind.PULL, Part(table, Field.KEYS, keys))


# ---- the table


def table_of(found: dict[Case, dict[str, float]]) -> str:
    head = ("request", "**fleetrun**, M keys/s", "MB/s", "zmq echo, M keys/s", "echo / ours, time",
            "memcpy, M keys/s", "memcpy / ours, time", "server CPU, ns a key", "with CURVE, M keys/s",
            "CURVE's time / plain")  # fmt: skip
    lines = [table_line(head), table_line(["---"] + ["---:"] * (len(head) - 1))]
    for case, took in found.items():
        ours, size = took["ours"], case.sent + case.received

        def speed(name: str, took: dict[str, float] = took, keys: int = case.keys) -> str:
            return f"{keys / took[name] / 1e6:.2f}"

        cells = [
            f"{case.verb}, {case.keys:,} keys, dim {case.dim}",
            f"**{speed('ours')}**",
            f"{size / ours / 1e6:,.0f}",
            speed("echo"),
            f"{took['echo'] / ours:.2f}",
            speed("memcpy"),
            f"{took['memcpy'] / ours:.2f}",
            f"{took['cpu'] / case.keys * 1e9:.0f}",
            speed("curve"),
            f"{took['curve'] / ours:.2f}",
        ]
        lines.append(table_line(cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", metavar="N", type=int, default=15, help="runs of each measurement")
    parser.add_argument("--rows", metavar="N", type=int, default=1_000_000, help="rows of each table")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    specs = [TableSpec(kind=TableKind.SPARSE, name=f"dim{dim}", size=dim, rule=Adagrad()) for dim in DIMS]
    cases = [Case(verb, keys, dim) for verb in VERBS for keys in SIZES for dim in DIMS]
    with ExitStack() as stack:
        plain, curve = (stack.enter_context(Served(specs, token=token)) for token in ("", TOKEN))
        exchange = stack.enter_context(echo())
        for served in (plain, curve):
            fill(served, options.rows)
        found = measure(cases, plain, curve, exchange, options.rows, options.runs)
    head = measured(f"{options.runs} runs, {options.rows:,} rows a table", load)
    publish(f"{head}\n\n{table_of(found)}", options.write, NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
