"""The Python stacks of all processes of a job on this machine, within a bound of time. Blocks: for a command
and for the process that a launcher starts for it, never in a launcher's loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fleetrun.host.interpreter import helper_environment
from fleetrun.stacks import processes, spy
from fleetrun.stacks.asking import ask, can_ask
from fleetrun.stacks.spy import SpyError
from fleetrun.stacks.taken import Taken, Target
from fleetrun.stacks.traces import Thread

_AT_ONCE = 8
_EACH = 5.0  # seconds for one process
_LONGEST_NAME = 40
_OLD = 5.0  # seconds after which a process has begun
_PAUSE = 0.25


@dataclass(frozen=True, slots=True)
class Collection:
    """`hint` says what would have shown more; empty when nothing is missing."""

    processes: tuple[Taken, ...]
    hint: str = ""

    @property
    def whole(self) -> bool:
        """Whether the place of each Python process is known."""
        return not self.hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """How it is looked: `program` is py-spy or None, `env` what it is run with."""

    program: str | None
    env: Mapping[str, str]
    deadline: float
    clock: Callable[[], float] = time.monotonic
    age: Callable[[int], float | None] = processes.age_of

    @property
    def left(self) -> float:
        return self.deadline - self.clock()


def collect(targets: Sequence[Target], within: float, program: str | None) -> Collection:
    """In the order of the targets, each with the Python processes below it. Takes little more than `within`
    seconds, whatever the processes do. `program` is py-spy (`spy.find`), None: it is not here.
    """
    means = Means(program=program, env=helper_environment(os.environ), deadline=time.monotonic() + within)
    jobs = [(target, pid) for target in targets for pid in _pids(target)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        taken = tuple(pool.map(lambda job: take(job[0], job[1], means), jobs))
    unknown = any(not each.threads and each.note != _NO_PYTHON for each in taken)
    hint = "" if not unknown else spy.MISSING if means.program is None else "not every process could be read"
    return Collection(taken, hint)


_NO_PYTHON = "it is no Python"


def _pids(target: Target) -> list[int]:
    below = processes.python_below(target.pid)
    return [target.pid, *below[: processes.MOST_BELOW]]


def take(target: Target, pid: int, means: Means) -> Taken:
    """What one process does."""
    state = processes.state_of(pid)
    known = {"target": target, "pid": pid, "state": state}
    command = processes.command_of(pid)[:_LONGEST_NAME]
    threads: tuple[Thread, ...] = ()
    if not state or state in "ZX":
        note = "it has ended"
    elif not processes.is_python(pid):
        note = _NO_PYTHON
    elif means.left <= 0:
        note = "there was no time left for it"
    else:
        threads, note = _look(target, pid, means)
    return Taken(**known, command=command, threads=threads, note="" if threads else note)  # type: ignore[arg-type]


def _look(target: Target, pid: int, means: Means) -> tuple[tuple[Thread, ...], str]:
    """Its threads, or why they are not known. One that has just begun gets some time to begin."""
    threads, note = _once(target, pid, means)
    while not threads and means.left > _PAUSE and _young(means.age(pid)):
        time.sleep(_PAUSE)
        threads, note = _once(target, pid, means)
    return threads, note


def _young(age: float | None) -> bool:
    return age is not None and age < _OLD


def _once(target: Target, pid: int, means: Means) -> tuple[tuple[Thread, ...], str]:
    note = "py-spy is not there"
    if means.program is not None:
        try:
            threads = spy.dump(means.program, pid, means.env, max(0.1, min(_EACH, means.left)))
            return threads, "no Python runs in it"
        except SpyError as error:
            note = str(error)
    if not can_ask(target, pid):
        return (), f"{note}; nor does it write its stacks itself (scripts that import trainers do)"
    return ask(target, pid), f"{note}; it was asked to write its stacks to its stderr"
