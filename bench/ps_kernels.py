"""Compares the kernels of the parameter server with the usual Python libraries: one run, one table.

    python bench/ps_kernels.py [--keys 10000000] [--batch 100000] [--runs 21]
                               [--write docs/benchmarks-ps-parts.md]

One thread each, and its CPU time, so that others on the machine disturb little. A table of 10 M random ids is
asked for batches that are drawn from them uniformly, by a zipf law (exponent 1.1), or not among them. A cell
is the median over the runs, in millions of ids or rows a second unless its row says otherwise; in brackets
how many times faster ours is. The runs of all alternate. `memcpy` copies as many bytes as the values of the
batch have (for insertions: it writes as many bytes of new memory as the rows need, for the first time): no
lookup can be faster. pandas takes part if installed; Paddle if PADDLE_BIN is the folder of its `fleetrun`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from _marks import check_marks, publish
from _paddle_memory import bytes_a_row
from _ps_jobs import PADDLE

from trainers.ps.kernels.batch import unique_kernel
from trainers.ps.kernels.index import SECRET
from trainers.ps.tables.rules import Adagrad, AnyRule, SparseAdam
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import Initializer, InitKind, RowOptions, TableKind, TableSpec
from trainers.ps.tables.warm import EVERYTHING

NAME = "ps_kernels.py"
OURS = "fleetrun"
COLUMNS = (OURS, "torch", "numpy", "pandas", "dict", "memcpy", PADDLE)
LAWS = ("uniform", "zipf", "missing")

Batches = Sequence[torch.Tensor]
Calls = dict[str, Callable[[torch.Tensor], object]]
Row = tuple[str, dict[str, float]]


def new_table(dim: int, rule: AnyRule) -> SparseTable:
    init = Initializer(InitKind.UNIFORM, -0.01, 0.01, seed=1)
    spec = TableSpec(kind=TableKind.SPARSE, name="ids", size=dim, rule=rule, rows=RowOptions(init=init))
    return SparseTable(spec)


def batches(ids: np.ndarray, law: str, size: int, count: int = 16) -> Batches:
    random = np.random.default_rng(1)
    if law == "missing":
        return [torch.from_numpy(random.integers(-(2**63), 2**63 - 1, size)) for _ in range(count)]
    if law == "uniform":
        return [torch.from_numpy(ids[random.integers(0, len(ids), size)]) for _ in range(count)]
    return [torch.from_numpy(ids[zipf(random, len(ids), size)]) for _ in range(count)]


def zipf(random: np.random.Generator, below: int, size: int) -> np.ndarray:
    """`size` numbers from 0 below `below`."""
    drawn = random.zipf(1.1, 4 * size)
    while (drawn <= below).sum() < size:
        drawn = np.append(drawn, random.zipf(1.1, 4 * size))
    return drawn[drawn <= below][:size] - 1


def alternate(calls: Calls, data: Batches, runs: int) -> dict[str, float]:
    """Millions of ids a second of each call: median of the runs, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    turn: Iterator[torch.Tensor] = cycle(data)
    for run in range(runs + 1):
        batch = next(turn)
        for name, call in calls.items():
            began = time.thread_time()
            call(batch)
            if run:
                times[name].append(time.thread_time() - began)
    return {name: len(data[0]) / statistics.median(each) / 1e6 for name, each in times.items()}


# ---- what is compared


def lookups(table: SparseTable, ids: np.ndarray, dim: int) -> Calls:
    """Lookup and gather. Peers keep values by number of the id; an id that they do not have reads row -1."""
    values = np.zeros((len(ids), dim), np.float32)
    shared, order = torch.from_numpy(values), torch.from_numpy(np.argsort(ids))
    ordered = torch.from_numpy(ids)[order]
    numbers = dict(zip(ids.tolist(), range(len(ids)), strict=True))

    def with_torch(batch: torch.Tensor) -> torch.Tensor:
        near = torch.searchsorted(ordered, batch).clamp_(max=len(ordered) - 1)
        found = torch.where(ordered[near] == batch, order[near], len(ordered) - 1)
        return shared.index_select(0, found)

    def with_dict(batch: torch.Tensor) -> np.ndarray:
        return values.take([numbers.get(key, -1) for key in batch.tolist()], axis=0)

    source = np.ones((1 << 20, dim), np.float32)
    calls: Calls = {
        OURS: lambda batch: table.pull(batch, insert=False),
        "torch": with_torch,
        "dict": with_dict,
        "memcpy": lambda batch: source[: len(batch)].copy(),
    }
    if pandas := installed("pandas"):
        index = pandas.Index(ids)
        calls["pandas"] = lambda batch: values.take(index.get_indexer(batch.numpy()), axis=0)
    return calls


def updates(table: SparseTable, ids: np.ndarray, lr: float = 1e-3) -> Calls:
    """Lookup and one step of the optimizer. torch: rows gathered, updated and put back; no lookup at all."""
    rule, dim = table.spec.rule, table.spec.size
    values, state = torch.zeros(len(ids), dim), [torch.zeros(len(ids), dim) for _ in range(rule.states)]
    grad = torch.randn(1 << 17, dim)
    number = torch.randint(len(ids), (1 << 17,))

    def with_torch(batch: torch.Tensor) -> None:
        places, slopes = number[: len(batch)], grad[: len(batch)]
        rows, parts = values[places], [each[places] for each in state]
        rule.update(rows, slopes, parts, 10, lr)
        values[places] = rows
        for each, part in zip(state, parts, strict=True):
            each[places] = part

    return {OURS: lambda batch: table.apply(batch, grad[: len(batch)], lr), "torch": with_torch}


def unique(batch: torch.Tensor) -> torch.Tensor:
    """The distinct ids of a batch, in the order of their first appearance."""
    keys, place, counts = (np.empty(len(batch), np.int64) for _ in range(3))
    return torch.from_numpy(keys[: unique_kernel(batch.numpy(), SECRET, keys, place, counts)])


def uniques() -> Calls:
    calls: Calls = {
        OURS: unique,
        "torch": lambda batch: torch.unique(batch, return_inverse=True, return_counts=True),
        "numpy": lambda batch: np.unique(batch.numpy(), return_inverse=True, return_counts=True),
        "memcpy": lambda batch: batch.clone(),
    }
    if pandas := installed("pandas"):
        calls["pandas"] = lambda batch: pandas.factorize(batch.numpy())
    return calls


def installed(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


# ---- growth and memory


def fill(table: SparseTable, ids: np.ndarray, step: int) -> tuple[list[float], float]:
    """Seconds of each request that inserts `step` new keys, and bytes a row of resident memory."""
    table.pull(torch.from_numpy(ids[:10]))
    before, inserted = resident(), []
    for start in range(0, len(ids), step):
        batch = torch.from_numpy(ids[start : start + step])
        began = time.thread_time()
        table.pull(batch)
        inserted.append(time.thread_time() - began)
    return inserted, (resident() - before) / len(ids)


def touch(size: int, count: int = 25) -> list[float]:
    """Seconds to write `size` bytes of new memory for the first time."""
    block = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    fresh, seconds = np.frombuffer(block, np.uint8), []
    for start in range(0, count * size, size):
        began = time.thread_time()
        fresh[start : start + size] = 1
        seconds.append(time.thread_time() - began)
    return seconds


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def table_rows(rule: AnyRule, dim: int, ids: np.ndarray, options: argparse.Namespace) -> Iterator[Row]:
    """Everything about one table; it is gone afterwards."""
    name, table = f"{type(rule).__name__}, dim {dim}", new_table(dim, rule)
    touched = touch(options.batch * 8 * table._storage.stride)
    inserted, size = fill(table, ids, options.batch)
    ideal = 8 + 4 * dim * (1 + rule.states)
    speed = options.batch / statistics.median(inserted) / 1e6
    yield f"insert new ids ({name})", {OURS: speed}
    yield (
        f"same, requests of {options.batch:,}: median, longest ms",
        {
            OURS: statistics.median(inserted) * 1e3,
            "longest": max(inserted) * 1e3,
            "memcpy": statistics.median(touched) * 1e3,
            "longest touch": max(touched) * 1e3,
        },
    )
    theirs = bytes_a_row(type(rule).__name__, dim, len(ids))
    both = {OURS: size, PADDLE: theirs} if theirs else {OURS: size}
    yield f"bytes a row ({name})", both
    title = f"the same / {ideal} bytes of key, values and state (wanted: <= 1.25)"
    yield title, {side: each / ideal for side, each in both.items()}
    calls = lookups(table, ids, dim)
    for law in LAWS:
        yield (
            f"lookup and gather, {law} (dim {dim})",
            alternate(calls, batches(ids, law, options.batch), options.runs),
        )
    del calls
    gc.collect()
    calls = updates(table, ids)
    for law in LAWS[:2]:
        yield f"update, {law} ({name})", alternate(calls, batches(ids, law, options.batch), options.runs)


def request_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Unique ids; and what one batch of 512 examples with 26 ids costs a server."""
    random = np.random.default_rng(2)
    ids = random.integers(-(2**63), 2**63 - 1, 750_000)
    for law in LAWS[:2]:
        yield f"unique ids, {law}", alternate(uniques(), batches(ids, law, options.batch), options.runs)
    asked = [unique(batch) for batch in batches(ids, "zipf", 13_312)]
    table, grad = new_table(9, SparseAdam()), torch.randn(13_312, 9)
    table.pull(torch.from_numpy(ids))

    def serve(keys: torch.Tensor) -> None:
        table.pull(keys)
        table.check(keys, grad[: len(keys)])
        table.apply(keys, grad[: len(keys)], 1e-3)

    for turn in range(10 * options.runs + 10):
        if turn == 10:
            times = []
        began = time.thread_time()
        serve(asked[turn % len(asked)])
        if turn >= 10:
            times.append(time.thread_time() - began)
    mean = sum(map(len, asked)) / len(asked)
    title = f"pull and push of 13,312 zipf ids, {mean:,.0f} of them unique (Adam, dim 9), microseconds"
    yield title, {OURS: statistics.median(times) * 1e6}


# ---- the table


def line(row: Row) -> str:
    title, found = row
    ours = found[OURS]
    cells = [f"**{number(ours)}**" + (f", {number(found['longest'])}" if "longest" in found else "")]
    for name in COLUMNS[1:]:
        ratio = "" if name == PADDLE or "longest" in found else f" ({ours / found.get(name, ours):.1f} x)"
        cells.append(number(found[name]) + ratio if name in found else "-")
    if "longest touch" in found:
        cells[COLUMNS.index("memcpy")] += f", {number(found['longest touch'])}"
    return f"| {title} | {' | '.join(cells)} |"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", metavar="N", type=int, default=10_000_000, help="rows of a table")
    parser.add_argument("--batch", metavar="N", type=int, default=100_000, help="ids of a request")
    parser.add_argument("--runs", metavar="N", type=int, default=21, help="runs of each measurement")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    torch.set_num_threads(1)
    began = time.perf_counter()
    for use in EVERYTHING:
        use()
    sys.stderr.write(f"warm after {time.perf_counter() - began:.1f} s\n")
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, options.keys)
    lines = [f"| {options.keys:,} ids; M/s unless said | {' | '.join(COLUMNS)} |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    makers = [
        request_rows(options),
        table_rows(Adagrad(), 16, ids, options),
        table_rows(SparseAdam(), 9, ids, options),
    ]
    for maker in makers:
        for row in maker:
            lines.append(line(row))
            sys.stderr.write(f"{lines[-1]}\n")
        gc.collect()
    publish("\n".join(lines), options.write, NAME)


if __name__ == "__main__":
    main()
