"""How fast text becomes batches: fleetrun's parser and data sets beside readers made of str.split, numpy and
pandas (where it is installed), on the same file in one run.

    python bench/ps_parse.py                     # 100,000 lines, about 60 MB, five rounds
    python bench/ps_parse.py --lines 20000 --rounds 3

The file is wide&deep's: 13 floats, 26 ids of 63 bits and a label; the logs for the rows of criteo_reader are
the same examples in Criteo's layout. Everything runs on one core (this process pins itself), rounds
alternate, and the figures are medians of CPU time, children included, so that a busy machine changes them
little.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from trainers.data.click_files import CLICK_SLOTS, write_slots, write_tsv
from trainers.data.clicks import ClickModel
from trainers.data.dataset import FileDataset, InMemoryDataset, QueueDataset
from trainers.data.multislot import BrokenLines, Parser
from trainers.data.slots import Layout
from trainers.data.sources import FileSource

READER = "trainers.examples.criteo_reader"
BATCH = 512

Kind = TypeVar("Kind", bound=FileDataset)


def parser(text: Path) -> int:
    """The parser alone: columns in memory."""
    made = Parser(Layout.of(CLICK_SLOTS), BATCH, BrokenLines())
    with text.open("rb", buffering=0) as stream:
        return sum(map(len, made.read(FileSource("text", stream)))) + len(made.rest())


def streamed(command: str) -> Callable[[Path], int]:
    def run(text: Path) -> int:
        return sum(map(len, _ready(QueueDataset(), text, command)))

    return run


def loaded(text: Path) -> int:
    """Into memory, shuffled, and once through."""
    made = _ready(InMemoryDataset(), text, "cat")
    made.load_into_memory()
    made.local_shuffle()
    return sum(map(len, made))


def _ready(made: Kind, path: Path, command: str) -> Kind:
    made.init(use_var=CLICK_SLOTS, batch_size=BATCH, pipe_command=command)
    made.set_filelist([path])
    return made


def split_reader(text: Path) -> int:
    """What one writes first: str.split, int and float, lists into arrays a batch at a time."""
    rows = 0
    dense: list[list[float]] = []
    ids: list[list[int]] = []
    with text.open() as lines:
        for line in lines:
            words = line.split()
            dense.append([float(word) for word in words[1:14]])
            ids.append([int(word) for word in words[15::2]])
            if len(ids) == BATCH:
                rows += len(np.array(dense, dtype=np.float32)) and len(np.array(ids, dtype=np.int64))
                dense, ids = [], []
    return rows + len(ids)


def numpy_reader(text: Path) -> int:
    """numpy.fromstring over blocks of lines, floats and whole numbers apart (a float64 cannot hold an id)."""
    rows = 0
    with text.open() as lines:
        while block := lines.readlines(1 << 20):
            parts = [line.split(" ", 14) for line in block]
            dense = np.fromstring(" ".join([" ".join(part[1:14]) for part in parts]), np.float32, sep=" ")
            ids = np.fromstring(" ".join([part[14] for part in parts]), np.int64, sep=" ")
            rows += len(dense.reshape(-1, 13))
            assert ids.reshape(-1, 54)[:, 1::2].shape == (len(parts), 27)
    return rows


def pandas_reader(text: Path) -> int:
    import pandas

    types = {column: np.float32 if 1 <= column <= 13 else np.int64 for column in range(68)}
    blocks = pandas.read_csv(text, sep=" ", header=None, dtype=types, chunksize=4096)
    return sum(len(block.iloc[:, 15::2].to_numpy()) for block in blocks)


def reader(*program: str) -> Callable[[Path], int]:
    """A reader on the logs, as a pipe command: start included."""

    def run(text: Path) -> int:
        with text.with_name("tsv").open("rb") as logs:
            made = subprocess.run([sys.executable, *program], stdin=logs, capture_output=True, check=True)
        return made.stdout.count(b"\n")

    return run


def start(_: Path) -> int:
    subprocess.run([sys.executable, "-m", READER], stdin=subprocess.DEVNULL, check=True)
    return 0


ROWS: dict[str, Callable[[Path], int]] = {
    "parser alone": parser,
    "QueueDataset, batches of 512": streamed("cat"),
    "QueueDataset, through `cat -`": streamed("cat -"),
    "InMemoryDataset: load, shuffle, one pass": loaded,
    "str.split reader": split_reader,
    "numpy.fromstring reader": numpy_reader,
    "pandas.read_csv reader": pandas_reader,
    "criteo_reader (text made)": reader("-m", READER),
    "MultiSlotDataGenerator (text made)": reader(str(Path(__file__).with_name("_criteo_lines.py"))),
    "criteo_reader, start alone": start,
}


def cpu_seconds() -> float:
    """Of this process, all its threads, and its children that have ended."""
    uses = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def measure(text: Path, lines: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU, wall) seconds of every row, round by round; the first round, which compiles, is not kept."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ROWS}
    for number in range(rounds + 1):
        for name, run in list(ROWS.items()):
            cpu, wall = cpu_seconds(), time.perf_counter()
            try:
                got = run(text)
            except ImportError:
                del ROWS[name], found[name]
                continue
            if got not in (lines, 0):
                raise SystemExit(f"{name} read {got} of {lines} lines")
            if number:
                found[name].append((cpu_seconds() - cpu, time.perf_counter() - wall))
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--lines", type=int, default=100_000)
    asked.add_argument("--rounds", type=int, default=5)
    options = asked.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        clicks = ClickModel().draw(options.lines, seed=0)
        write_slots(clicks, [text])
        write_tsv(clicks, [Path(folder, "tsv")])
        size = text.stat().st_size
        print(f"{options.lines} lines, {size / options.lines:.0f} bytes each; medians of {options.rounds}\n")
        print("| reader | MB/s of text | lines/s | CPU ms | wall ms |\n|---|---|---|---|---|")
        for name, samples in measure(text, options.lines, options.rounds).items():
            cpu, wall = (statistics.median(values) for values in zip(*samples, strict=True))
            figures = (
                f"{size / cpu / 1e6:.0f} | {options.lines / cpu:,.0f}" if name != list(ROWS)[-1] else "- | -"
            )
            print(f"| {name} | {figures} | {cpu * 1e3:.0f} | {wall * 1e3:.0f} |")


if __name__ == "__main__":
    main()
