"""Saves and loads a table of the parameter server; compares with the speed of the disk in the same run.

    python bench/ps_save.py [--rows 10000000] [--dim 16] [--folder FOLDER] [--repeat 3] [--write FILE]

Writes and reads as many bytes as the save has, in blocks of 16 MB, with one fsync at the end: once through
the page cache and once past it (O_DIRECT), as saves do. Then saves the table alone, saves it while the main
thread pulls and pushes without a pause, and loads it. Before each reading, files are dropped from the page
cache (POSIX_FADV_DONTNEED, these files only). `of the disk` is the speed over the disk's, for writing the
faster of its two; the goal is 0.6. FOLDER must be on a real disk.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from _marks import check_marks, publish

from trainers.ps.saves.manifest import SaveMode, commit_save, new_id
from trainers.ps.saves.read import RowOwner, load_tables
from trainers.ps.saves.write import SHARD_BYTES, SaveSpec, SaveTask, cut_tables
from trainers.ps.tables.rules import Adagrad
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import TableKind, TableSpec

NAME = "ps_save.py"
DIRECT = "disk, write past the page cache"
BLOCK = 16 << 20
BATCH = 100_000

Samples = dict[str, list[float]]


def filled(rows: int, dim: int) -> SparseTable:
    table = SparseTable(TableSpec(kind=TableKind.SPARSE, name="ids", size=dim, rule=Adagrad()))
    for start in range(0, rows, BATCH):
        keys = torch.arange(start, min(start + BATCH, rows)) * 7919
        table.apply(keys, torch.randn(len(keys), dim), 0.1)
    return table


def drop(path: Path) -> None:
    """Out of the page cache."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def written(path: Path, size: int, how: int = 0) -> float:
    """Seconds for a plain sequential write with fsync; `how`: more flags for open, with which it may write up
    to a page less. Random bytes: some disks compress.
    """
    block = memoryview(mmap.mmap(-1, BLOCK))  # O_DIRECT wants memory that begins at a page
    block[:] = os.urandom(BLOCK)
    size = size // mmap.PAGESIZE * mmap.PAGESIZE
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | how)
    for start in range(0, size, BLOCK):
        os.write(descriptor, block[: min(BLOCK, size - start)])
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - began


def read(path: Path) -> float:
    drop(path)
    block = bytearray(BLOCK)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass
    return time.perf_counter() - began


def kept(path: Path) -> float:
    """As `read`, into memory that has not been used yet, like that of a table."""
    drop(path)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file, mmap.mmap(-1, path.stat().st_size) as memory:
        rest = memoryview(memory)
        while count := file.readinto(rest[:BLOCK]):
            rest = rest[count:]
        rest.release()
    return time.perf_counter() - began


def saved(table: SparseTable, where: Path, shard_bytes: int, *, training: bool) -> tuple[float, float]:
    """(seconds of a whole save, keys pulled and pushed a second meanwhile)."""
    keys = (torch.rand(50, BATCH) * len(table)).long() * 7919
    grad = torch.randn(BATCH, table.spec.size)
    began = time.perf_counter()
    order = SaveSpec(
        id=new_id(table.step),
        mode=SaveMode.ALL,
        server=0,
        servers=1,
        shard_bytes=shard_bytes,
    )
    task = SaveTask(where, order, cut_tables([table], SaveMode.ALL))
    batches = 0
    while training and not task.ended:
        table.pull(keys[batches % 50])
        table.apply(keys[batches % 50], grad, 0.1)
        batches += 1
    commit_save(where, order.id, order.mode, order.step, [task.result()])
    took = time.perf_counter() - began
    task.close(saved=True)
    return took, batches * BATCH / took


def trained(table: SparseTable, seconds: float) -> float:
    """Keys pulled and pushed a second, with no save."""
    keys = (torch.rand(50, BATCH) * len(table)).long() * 7919
    grad = torch.randn(BATCH, table.spec.size)
    began = time.perf_counter()
    batches = 0
    while time.perf_counter() - began < seconds:
        table.pull(keys[batches % 50])
        table.apply(keys[batches % 50], grad, 0.1)
        batches += 1
    return batches * BATCH / (time.perf_counter() - began)


def loaded(table: SparseTable, where: Path) -> float:
    drop(where)
    fresh = SparseTable(table.spec)
    began = time.perf_counter()
    load_tables(where, [fresh], RowOwner(0, 1))
    took = time.perf_counter() - began
    assert len(fresh) == len(table)
    probe = torch.arange(0, len(table), max(1, len(table) // 1000)) * 7919
    assert torch.equal(fresh.pull(probe, insert=False), table.pull(probe, insert=False))
    return took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--shard_mb", type=int, default=SHARD_BYTES >> 20)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    table = filled(options.rows, options.dim)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        text = measure(table, folder, options.repeat, options.shard_mb << 20)
    finally:
        shutil.rmtree(folder)
    publish(text, options.write, NAME)


def measure(table: SparseTable, folder: Path, repeat: int, shard_bytes: int) -> str:
    times: Samples = {}
    speeds: Samples = {"alone": [], "while saving": []}
    where = folder / "save"
    saved(table, where, shard_bytes, training=False)  # the first loads kernels
    loaded(table, where)
    size = sum(file.stat().st_size for file in where.rglob("*") if file.is_file())
    for _ in range(repeat):
        shutil.rmtree(where)
        times.setdefault("disk, write", []).append(written(folder / "plain", size))
        times.setdefault(DIRECT, []).append(written(folder / "plain", size, os.O_DIRECT))
        times.setdefault("disk, read", []).append(read(folder / "plain"))
        times.setdefault("disk, read into fresh memory", []).append(kept(folder / "plain"))
        (folder / "plain").unlink()
        times.setdefault("save", []).append(saved(table, where, shard_bytes, training=False)[0])
        times.setdefault("load", []).append(loaded(table, where))
        shutil.rmtree(where)
        speeds["alone"].append(trained(table, 2.0))
        took, speed = saved(table, where, shard_bytes, training=True)
        times.setdefault("save while training", []).append(took)
        speeds["while saving"].append(speed)
    return table_of(times, speeds, size, f"{len(table):,} rows x {table.spec.size}")


def table_of(times: Samples, speeds: Samples, size: int, what: str) -> str:
    fastest = min(("disk, write", DIRECT), key=lambda name: statistics.median(times[name]))
    against = {"save": fastest, "save while training": fastest, "load": "disk, read"}
    lines = ["| | seconds [least-most] | MB/s | of the disk |", "|---|---:|---:|---:|"]
    for name, found in times.items():
        middle = statistics.median(found)
        share = f"{statistics.median(times[against[name]]) / middle:.2f}" if name in against else ""
        spread = f"{middle:.2f} [{min(found):.2f}-{max(found):.2f}]"
        lines.append(f"| {name} | {spread} | {size / middle / 1e6:,.0f} | {share} |")
    alone, meanwhile = (statistics.median(speeds[name]) / 1e6 for name in ("alone", "while saving"))
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} CPUs, {what}, {size / 1e9:.2f} GB, "
        f"{len(speeds['alone'])} runs.\n\n" + "\n".join(lines) + f"\n\nKeys pulled and pushed a second: "
        f"{alone:.2f} M alone, {meanwhile:.2f} M while saving ({meanwhile / alone:.2f})."
    )


if __name__ == "__main__":
    main()
