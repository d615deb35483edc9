"""Simulate jobs on all cores for so many minutes, or until one breaks a promise.

    python -m tests.simulated_ps.run [--minutes 60] [--first SEED]
    python -m tests.simulated_ps.run --seed SEED [--without FAULT,FEATURE,...]
    python -m tests.simulated_ps.run --mutant NAME

Seeds are simulated in order from `--first` on, so a later run can continue. Every half a minute, a line has
the number of histories. After a violation, the features and faults without which it remains are taken away,
and the rest is printed with its trace. `--seed` repeats one history and prints its trace.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

_REPORT_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--first", type=int, default=int(time.time()) % 1_000_000 * 1000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--without", default="")
    parser.add_argument("--mutant", help="print the first seed that finds this mutant")
    options = parser.parse_args()
    if options.mutant is not None:
        from tests.simulated_ps.mutants import first_find

        print(first_find(options.mutant, 1000))
        return
    if options.seed is not None:
        from tests.simulated_ps.job import prepare, simulate

        prepare()
        without = frozenset(filter(None, options.without.split(",")))
        print("\n".join(simulate(options.seed, without).world.trace))
        return
    sys.exit(explore(options.first, options.processes, 60 * options.minutes))


def explore(first: int, processes: int, seconds: float) -> int:
    """Simulate seeds from `first` on in so many processes. Return the exit code."""
    context = multiprocessing.get_context("spawn")
    following, stop, found = context.Value("q", first), context.Event(), context.SimpleQueue()
    started = time.monotonic()
    workers = [
        context.Process(target=work, args=(following, stop, found), daemon=True) for _ in range(processes)
    ]
    for each in workers:
        each.start()
    report = started + _REPORT_S
    while time.monotonic() < started + seconds and found.empty() and any(map(alive, workers)):
        time.sleep(0.2)
        if time.monotonic() > report:
            report += _REPORT_S
            progress(first, following.value, time.monotonic() - started)
    failed = not all(map(alive, workers))
    stop.set()
    violations = []
    while any(map(alive, workers)) or not found.empty():  # a full pipe would block the workers
        if not found.empty():
            violations.append(found.get())
        time.sleep(0.05)
    print(*violations, sep="\n\n", flush=True)
    progress(first, following.value, time.monotonic() - started)
    return 1 if violations or failed else 0


def alive(process: Any) -> bool:
    return bool(process.is_alive())


def progress(first: int, following: int, seconds: float) -> None:
    count = following - first
    rate = 3600 * count / seconds
    print(
        f"{seconds / 60:.1f} min: {count:,} histories, {rate:,.0f} an hour; next seed {following}", flush=True
    )


def work(following: Any, stop: Event, found: Any) -> None:
    """Simulate the next seeds until `stop`, or until one breaks a promise."""
    from tests.simulated_ps.job import Violation, prepare, shortened, simulate

    torch.set_num_threads(1)
    prepare()
    while not stop.is_set():
        with following.get_lock():
            seed = following.value
            following.value += 1
        if seed % 20 == 0:
            gc.collect()  # tables reserve address space
        try:
            simulate(seed)
        except Violation as error:
            stop.set()
            found.put(shortened(seed, error))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
