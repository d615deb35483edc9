"""A stream of clicks that never ends: a bounded table beside an unbounded one.

    python bench/ps_stream.py [--examples 2000000] [--rows 600000] [--write docs/benchmarks-ps.md]

Each of the 8 ids of an example is one of the 400,000 newest, with a probability of about one over its age,
and 1.5 new ones come with each example. One server, one trainer, sync, Adagrad, dim 16. Jobs, one after
another: without a bound; bounded; bounded to a sixth, LRU and LFU; with a log; the same with a server that
is killed in the middle. AUC: of the predictions before each step, from 30 % of the stream on. Memory: the
server's resident set; `varies by` is its largest value less its smallest in the second half, as a share of
the largest. The last two jobs must agree in every row.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _marks import check_marks, publish
from _processes import kill_carriers

NAME = "ps_stream.py"
JOB = Path(__file__).with_name("_ps_stream_job.py")
MARK = "FLEETRUN_BENCH_STREAM"
KILLED_AT = 0.5


@dataclass(frozen=True)
class Case:
    title: str
    table: dict[str, Any] = field(default_factory=dict)
    log: bool = False
    killed: bool = False


@dataclass
class Found:
    result: dict[str, Any]
    seconds: float
    memory: list[tuple[float, int]]
    """Share of the stream, bytes."""

    def at(self, share: float) -> int:
        return next((size for position, size in self.memory if position >= share), self.memory[-1][1])

    @property
    def flat(self) -> float:
        late = [size for position, size in self.memory if position >= KILLED_AT] or [self.memory[-1][1]]
        return (max(late) - min(late)) / max(late)


def resident(process: int) -> int | None:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None


def read_number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def run(case: Case, examples: int) -> Found:
    """Raises RuntimeError when the job fails."""
    with tempfile.TemporaryDirectory(prefix="ps_stream.") as name:
        folder, mark = Path(name), f"{os.getpid()}.{time.monotonic_ns()}"
        configs = {"durability": "log", "log_fsync": "no", "snapshot_interval_s": 30.0} if case.log else {}
        options = {"folder": name, "examples": examples, "configs": configs, "table": case.table}
        launcher = [
            sys.executable,
            "-m",
            "fleetrun",
            "--server_num=1",
            "--trainer_num=1",
            f"--log_dir={name}/log",
        ]
        started, memory, killed = time.monotonic(), [], not case.killed
        job = subprocess.Popen(
            [*launcher, f"--log_dir={name}/log", str(JOB), json.dumps(options)],
            env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while job.poll() is None:
                time.sleep(0.2)
                process, position = read_number(folder / "server"), read_number(folder / "position")
                size = resident(int(process)) if process else None
                if size and position is not None and position < 1:
                    memory.append((position, size))
                if process and position and position >= KILLED_AT and not killed:
                    os.kill(int(process), signal.SIGKILL)
                    (folder / "server").unlink()
                    killed = True
        finally:
            kill_carriers(f"{MARK}={mark}".encode())
        if job.returncode:
            raise RuntimeError(f"The job {case.title!r} exited with code {job.returncode}.")
        result = json.loads((folder / "result").read_text())
        return Found(result, time.monotonic() - started, memory)


def line(case: Case, found: Found, best: float) -> str:
    mib = [f"{found.at(share) / 2**20:.0f}" for share in (0.25, 0.5, 0.75, 0.98)]
    auc = found.result["auc"]
    cells = [case.title, *mib, f"{100 * found.flat:.1f} %", f"{found.result['rows']:,}", f"{auc:.4f}"]
    return f"| {' | '.join([*cells, f'{auc - best:+.4f}', f'{found.seconds:.0f}'])} |"


def table_of(cases: list[Case], found: list[Found], options: argparse.Namespace) -> str:
    first = found[0].result["auc"]
    same = found[-1].result["digest"] == found[-2].result["digest"]
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs, {options.examples:,} examples of 8 ids, bound "
        f"{options.rows:,} rows. The job with a kill and the one without have "
        f"{'the same rows, bit for bit' if same else 'OTHER ROWS'}.",
        "",
        "| | server, MiB, at 25 % | 50 % | 75 % | the end | varies by | rows | AUC | | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *(line(case, each, first) for case, each in zip(cases, found, strict=True))])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", metavar="N", type=int, default=2_000_000)
    parser.add_argument("--rows", metavar="N", type=int, default=600_000, help="bound of the table")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    bound, sixth = {"max_rows": options.rows}, {"max_rows": options.rows // 6}
    cases = [
        Case("no bound"),
        Case("LRU", bound),
        Case("LRU, a sixth", sixth),
        Case("LFU, a sixth", sixth | {"evict": "lfu"}),
        Case("LRU, log", bound, log=True),
        Case("LRU, log, killed", bound, log=True, killed=True),
    ]
    found = []
    for case in cases:
        found.append(run(case, options.examples))
        print(line(case, found[-1], found[0].result["auc"]), file=sys.stderr, flush=True)
    publish(table_of(cases, found, options), options.write, NAME)


if __name__ == "__main__":
    main()
