"""A table of which a part is in memory and the rest on disk, beside the same table in memory.

    python bench/ps_disk.py [--rows 4000000] [--repeats 3] [--write docs/benchmarks-ps.md]

One server, one trainer, async, Adagrad, batches of 512 x 26 ids, where the id of rank r is drawn with a
probability of 1 / r**power. Before the time is taken every row has been trained once, and then 500 batches
were, so that the rows in use are in memory. "Memory": what the
server's rows, their index and the index of those on disk take, and 64 MiB of the system's cache of files: the
server is in a memory control group that allows no more (which needs root). "Read": bytes from the disk for
each step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from _marks import check_marks, publish
from _processes import kill_carriers

NAME = "ps_disk.py"
JOB = Path(__file__).with_name("_ps_disk_job.py")
MARK = "FLEETRUN_BENCH_DISK"
BATCH, SLOTS = 512, 26
FILE_CACHE = 64 << 20
ON_DISK = 28
"""Bytes of memory that a row on disk takes."""
GROUPS = Path("/sys/fs/cgroup")


@dataclass
class Found:
    speed: float
    """Examples a second."""
    memory: int
    """Bytes."""
    read: float
    """Bytes a step."""


def anonymous(process: int) -> int:
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    return 0


def bytes_read(process: int) -> int:
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


@contextlib.contextmanager
def limited(process: int, size: int) -> Iterator[None]:
    """What the process needs from now on, the pages of files that it reads included, is at most `size`."""
    first = not (GROUPS / "memory").is_dir()
    parent, limit = (GROUPS, "memory.max") if first else (GROUPS / "memory", "memory.limit_in_bytes")
    group = parent / f"fleetrun-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(size))
        (group / "cgroup.procs").write_text(str(process))
        yield
        with contextlib.suppress(OSError):  # it has ended
            (parent / "cgroup.procs").write_text(str(process))
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def forget_files(process: int) -> None:
    """The system's cache has no page of the unnamed files that this process has open."""
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            if not str(link.readlink()).endswith("(deleted)"):
                continue
            file = os.open(link, os.O_RDWR)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def wait_for(path: Path, job: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        if job.poll() is not None:
            raise RuntimeError(f"The job exited with code {job.returncode}. See {path.parent}/log.")
        time.sleep(0.05)


def run(options: argparse.Namespace, dim: int, power: float, bound: int | None) -> Found:
    """`bound`: bytes of rows in memory. Raises RuntimeError when the job fails."""
    with tempfile.TemporaryDirectory(prefix="ps_disk.", dir=options.work) as name:
        folder, mark = Path(name), f"{os.getpid()}.{time.monotonic_ns()}"
        job_options = {
            "folder": name, "rows": options.rows, "dim": dim, "slots": SLOTS, "batch": BATCH, "power": power,
            "steps": options.steps, "configs": {} if bound is None else {"disk_dir": name},
            "table": {} if bound is None else {"max_bytes": bound, "evict": options.evict},
        }  # fmt: skip
        job = subprocess.Popen(
            [sys.executable, "-m", "fleetrun", "--server_num=1", "--trainer_num=1", f"--log_dir={name}/log",
             str(JOB), json.dumps(job_options)],
            env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_for(folder / "server", job)
            server = int((folder / "server").read_text())
            wait_for(folder / "begun", job)
            before = anonymous(server)
            wait_for(folder / "filled", job)
            memory = anonymous(server) - before + (0 if bound is None else FILE_CACHE)
            with contextlib.ExitStack() as undo:
                if bound is not None:
                    forget_files(server)
                    undo.enter_context(limited(server, FILE_CACHE))
                read = read_now = bytes_read(server)
                (folder / "go").touch()
                while not (folder / "result").exists():
                    wait_for(folder / "go", job)
                    if job.poll() is not None:
                        raise RuntimeError(f"the job ended with exit code {job.returncode}")
                    with contextlib.suppress(OSError, StopIteration):
                        read_now = bytes_read(server)
                    time.sleep(0.02)
            return Found(float((folder / "result").read_text()), memory, (read_now - read) / options.steps)
        finally:
            job.wait(60)
            kill_carriers(f"{MARK}={mark}".encode())


def line(dim: int, power: float, whole: Sequence[Found], part: Sequence[Found]) -> str:
    ratios = [one.speed / other.speed for one, other in zip(part, whole, strict=True)]
    memory = [statistics.median(each.memory for each in some) / 2**20 for some in (whole, part)]
    speeds = [statistics.median(each.speed for each in some) for some in (whole, part)]
    read = statistics.median(each.read for each in part) / 1024
    cells = [str(dim), str(power), f"{memory[0]:.0f}", f"{memory[1]:.0f}", f"{memory[0] / memory[1]:.1f}"]
    cells += [
        f"{speeds[0]:,.0f}",
        f"{speeds[1]:,.0f}",
        f"**{statistics.median(ratios):.2f}**",
        f"{read:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", metavar="N", type=int, default=4_000_000)
    parser.add_argument("--steps", metavar="N", type=int, default=500)
    parser.add_argument("--dims", metavar="NUMBERS", default="64")
    parser.add_argument("--powers", metavar="NUMBERS", default="1.05,1.2,1.4")
    parser.add_argument("--share", metavar="N", type=float, default=4, help="table : memory")
    parser.add_argument("--evict", choices=("lru", "lfu"), default="lfu")
    parser.add_argument("--repeats", metavar="N", type=int, default=3)
    parser.add_argument("--work", metavar="DIR", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs, {options.rows:,} rows, median of "
        f"{options.repeats} pairs.",
        "",
        "| dim | power | table, MiB | memory, MiB | table : memory | examples/s in memory | with a disk "
        "| ratio | read, KiB a step |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for dim in map(int, options.dims.split(",")):
        for power in map(float, options.powers.split(",")):
            size = (8 + 4 * dim + 4 * dim + 4 + 16) * options.rows
            bound = int(size / options.share - ON_DISK * options.rows - FILE_CACHE)
            if bound <= 0:
                raise SystemExit(f"dim {dim}: {size >> 20} MiB / {options.share} is too small for an index")
            whole, part = [], []
            for _ in range(options.repeats):
                whole.append(run(options, dim, power, None))
                part.append(run(options, dim, power, bound))
            lines.append(line(dim, power, whole, part))
            print(lines[-1], file=sys.stderr, flush=True)
    publish("\n".join(lines), options.write, NAME)


if __name__ == "__main__":
    main()
