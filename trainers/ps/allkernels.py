"""Compile all kernels of parameter servers and of data sets, in one process per core."""

from __future__ import annotations

import multiprocessing
import os

from trainers.data.warm import use_columns
from trainers.ps.tables.warm import EVERYTHING

_ALL = use_columns, *EVERYTHING


def use_all() -> None:
    """Compile every kernel and store the result on disk. Return when all processes have finished."""
    at_once = min(len(os.sched_getaffinity(0)), len(_ALL))
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=use_from, args=(start, at_once)) for start in range(1, at_once)]
    for other in others:
        other.start()
    use_from(0, at_once)
    for other in others:
        other.join()


def use_from(start: int, at_once: int) -> None:
    """Call all kernels, as process `start` of `at_once` processes.

    Each process starts at a different kernel. The first process to need a kernel compiles it for all.
    """
    first = start * len(_ALL) // at_once
    for use in _ALL[first:] + _ALL[:first]:
        use()
