"""How fast Parquet files become batches: ParquetFiles and a stream of it, beside pyarrow alone on the same
file in one run.

    python bench/ps_parquet.py [--rows 200000] [--rounds 5] [--write docs/benchmarks-ps.md]

A file is wide&deep's: 13 floats, 26 ids and a label, or three columns of lists of ids, in row groups of
50,000. `decoded` are the bytes of the columns that are read, as float32 and int64. Everything runs on one
core (this process pins itself), rounds alternate, and the figures are medians of CPU time. pyarrow is
measured with the same columns: row groups as a whole, and in pieces of as many rows as ParquetFiles decodes
at a time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _marks import check_marks, publish

from trainers.data.parquet import _CHUNK_ROWS, ParquetFiles
from trainers.data.positions import Records
from trainers.data.slots import Slot
from trainers.data.stream import Reading, Stream

NAME = "ps_parquet.py"
BATCH, GROUP = 1024, 50_000
CLICKS = [
    *(Slot(f"d{number}", "float32") for number in range(13)),
    *(Slot(f"c{number}") for number in range(26)),
    Slot("label"),
]
LISTS = [Slot(f"list{number}", length=None) for number in range(3)]
Case = tuple[str, Path, list[Slot], int]


class Alone:
    """A trainer without servers."""

    place = 0, 1
    interrupted = False

    def __init__(self) -> None:
        self.streams: dict[str, Reading] = {}

    def positions(self, stream: str) -> Sequence[dict[str, list[int]]]:
        return [{}]

    def give(self, records: Records, on: object) -> None:
        return

    def forget(self, records: object) -> None:
        return

    def flush(self) -> None:
        return


def cases(folder: Path, rows: int) -> list[Case]:
    """What is read, the file, its slots, and the bytes of their columns."""
    random = np.random.default_rng(1)
    columns: dict[str, pa.Array] = {}
    for slot in CLICKS:
        if slot.name == "label":
            columns[slot.name] = pa.array((random.random(rows) < 0.1).astype(np.int64))
        elif slot.dtype == "float32":
            columns[slot.name] = pa.array(random.random(rows, dtype=np.float32))
        else:
            columns[slot.name] = pa.array(random.zipf(1.2, rows) % 1_000_000 * 2_654_435_761)
    for slot in LISTS:
        offsets = np.concatenate([[0], np.cumsum(random.integers(0, 21, rows))])
        ids = random.zipf(1.2, offsets[-1]) % 1_000_000 * 2_654_435_761
        columns[slot.name] = pa.ListArray.from_arrays(offsets.astype(np.int32), ids)
    table = pa.table(columns)
    usual, plain = folder / "usual", folder / "plain"
    pq.write_table(table, usual, row_group_size=GROUP)
    pq.write_table(table, plain, row_group_size=GROUP, compression="none", use_dictionary=False)
    fixed = rows * (13 * 4 + 27 * 8)
    ids = 8 * sum(len(columns[slot.name].values) for slot in LISTS)
    few = [CLICKS[0], *CLICKS[13:16], CLICKS[-1]]
    return [
        ("40 columns, dictionary and Snappy", usual, CLICKS, fixed),
        ("40 columns, plain", plain, CLICKS, fixed),
        ("5 of 43 columns, dictionary and Snappy", usual, few, rows * (4 + 4 * 8)),
        ("3 columns of lists, dictionary and Snappy", usual, LISTS, ids),
    ]


def groups(path: Path, slots: list[Slot]) -> int:
    file = pq.ParquetFile(path)
    names = [slot.name for slot in slots]
    return sum(
        len(file.read_row_group(number, columns=names, use_threads=False))
        for number in range(file.num_row_groups)
    )


def pieces(path: Path, slots: list[Slot]) -> int:
    file = pq.ParquetFile(path)
    names = [slot.name for slot in slots]
    return sum(
        len(found)
        for number in range(file.num_row_groups)
        for found in file.iter_batches(
            batch_size=_CHUNK_ROWS, row_groups=[number], columns=names, use_threads=False
        )
    )


def source(path: Path, slots: list[Slot]) -> int:
    made = ParquetFiles(path, use_var=slots)
    splits = made.splits(made.shards(), 0, 1)
    return sum(
        len(batch)
        for split in splits
        for batch, _ in made.read(split.shard, split.start, split.stop, BATCH, grows=False)
        if batch is not None
    )


def stream(path: Path, slots: list[Slot]) -> int:
    return sum(map(len, Stream(ParquetFiles(path, use_var=slots), Alone, batch_size=BATCH)))


READERS: dict[str, Callable[[Path, list[Slot]], int]] = {
    "pyarrow, whole row groups": groups,
    "pyarrow, in pieces": pieces,
    "ParquetFiles": source,
    "a stream of it": stream,
}


def measure(case: Case, rows: int, rounds: int) -> dict[str, float]:
    """Median CPU seconds of each reader; the first round is not kept."""
    found: dict[str, list[float]] = {name: [] for name in READERS}
    for number in range(rounds + 1):
        for name, run in READERS.items():
            cpu = time.process_time()
            got = run(case[1], case[2])
            if got != rows:
                raise SystemExit(f"{name} read {got} of {rows} rows of {case[0]}")
            if number:
                found[name].append(time.process_time() - cpu)
    return {name: statistics.median(each) for name, each in found.items()}


def report(options: argparse.Namespace) -> str:
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M')}, {options.rows:,} rows, batches of {BATCH:,}, one core, CPU "
        f"time, medians of {options.rounds}; pyarrow {pa.__version__}; other work was running.",
        "",
        "| decoded MB/s | " + " | ".join(READERS) + " | stream, of pyarrow in pieces |",
        "|---|" + "---:|" * (len(READERS) + 1),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder), options.rows):
            seconds = measure(case, options.rows, options.rounds)
            figures = " | ".join(f"{case[3] / 1e6 / seconds[name]:.0f}" for name in READERS)
            share = seconds["pyarrow, in pieces"] / seconds["a stream of it"]
            lines.append(f"| {case[0]} | {figures} | {share:.2f} |")
    return "\n".join(lines)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rows", type=int, default=200_000)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument(
        "--write", type=Path, metavar="FILE", help="put the table between the marks in this file"
    )
    options = asked.parse_args()
    check_marks(options.write, NAME)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    publish(report(options), options.write, NAME)


if __name__ == "__main__":
    main()
