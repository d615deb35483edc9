"""The rows of `fleetrun top`: the history of each process, the order of the processes, the filter, and the
cells of a row. All functions are pure, and time is an argument.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fleetrun.aliases import Fields
from fleetrun.commands import views
from fleetrun.commands.output import Cell, columns
from fleetrun.commands.views import formatted, number_of, text_of
from fleetrun.console.text import format_duration, format_short, format_speed
from fleetrun.decoding import whole_in
from fleetrun.frozen import frozen
from fleetrun.record.journal import objects_in

Key = tuple[str, str]
"""Identifies a process by the rank of its node (empty in a job on one node) and its name there."""

# ---- History of each process

BARS = "▁▂▃▄▅▆▇█"
STEP_CELLS, STEP_CELL = 12, 10.0
LATE_CELLS, LATE_CELL = 8, 60.0
"""Size of a sparkline: number of cells, and seconds per cell. Lateness is measured once a minute."""


class Series:
    """The newest values of one number, averaged over spans of `seconds`."""

    def __init__(self, cells: int, seconds: float) -> None:
        self._seconds = seconds
        self._cells: deque[tuple[int, float, int]] = deque(maxlen=cells)
        """Span number, sum of the values, and count of the values."""

    def add(self, value: float | None, now: float) -> None:
        if value is None:
            return
        number = int(now // self._seconds)
        if self._cells and self._cells[-1][0] == number:
            _, total, count = self._cells.pop()
            self._cells.append((number, total + value, count + 1))
        else:
            self._cells.append((number, value, 1))

    def bars(self, highest: float) -> str:
        """Draw one character per span, with the newest span last. The value `highest` has full height. A span
        without values is blank.
        """
        if not self._cells:
            return ""
        first, last = self._cells[0][0], self._cells[-1][0]
        means = {number: total / count for number, total, count in self._cells}
        spans = range(max(first, last - (self._cells.maxlen or 1) + 1), last + 1)
        return "".join(_bar(means[each], highest) if each in means else " " for each in spans)

    @property
    def highest(self) -> float:
        """The largest mean of all spans."""
        return max((total / count for _, total, count in self._cells), default=0.0)


def _bar(value: float, highest: float) -> str:
    part = min(1.0, max(0.0, value / highest)) if highest > 0 else 0.0
    return BARS[max(0, math.ceil(part * len(BARS)) - 1)]


@dataclass(slots=True)
class Memory:
    """The history of one process."""

    step_time: Series = field(default_factory=lambda: Series(STEP_CELLS, STEP_CELL))
    late: Series = field(default_factory=lambda: Series(LATE_CELLS, LATE_CELL))


@frozen
class Process:
    """One process in the newest status."""

    node: str
    host: str
    """Name of its node. Empty in a job on one node."""
    fields: Fields
    """Fields of the process in the status of its launcher."""
    answered: float
    memory: Memory

    @property
    def key(self) -> Key:
        return self.node, text_of(self.fields, "name")

    @property
    def role(self) -> str:
        return text_of(self.fields, "role")

    @property
    def rank(self) -> int | None:
        """The rank. None if the status has no valid rank."""
        return whole_in(self.fields.get("rank"))

    @property
    def alive(self) -> bool:
        return self.fields.get("alive") is True

    @property
    def title(self) -> str:
        """The title, such as `trainer 3` or `server 0`."""
        name = "server" if self.role == "ps" else self.role
        return name if self.rank is None else f"{name} {self.rank}"


class Processes:
    """All processes of the newest status, with their histories."""

    def __init__(self) -> None:
        self.all: list[Process] = []
        self._memories: dict[Key, Memory] = {}

    def take(self, status: Fields, now: float) -> None:
        """Take a new status. Processes that it lacks are dropped, unless their node did not answer."""
        silent = {text_of(each, "rank") for each in objects_in(status, "nodes") if each.get("silent")}
        hosts = {text_of(each, "rank"): text_of(each, "title") for each in objects_in(status, "nodes")}
        found = {each.key: each for each in self.all if each.node in silent}
        for node, answer, fields in views.processes(status):
            key = node, text_of(fields, "name")
            memory = self._memories.setdefault(key, Memory())
            memory.step_time.add(number_of(fields, "step_seconds"), now)
            memory.late.add(number_of(fields, "late"), now)
            host = hosts.get(node, "")
            found[key] = Process(node, host, fields, views.answer_time(answer), memory)
        self._memories = {key: self._memories[key] for key in found}
        self.all = sorted(found.values(), key=_by_rank)


# ---- Order

Order = Callable[[Process], tuple[object, ...]]


def _by_rank(one: Process) -> tuple[object, ...]:
    rank = one.rank
    return one.role != "trainer", one.role, rank is None, rank or 0, one.node, text_of(one.fields, "name")


def _by(name: str, sign: int) -> Order:
    """Order processes by one number. Missing values come last."""

    def order(one: Process) -> tuple[object, ...]:
        value = number_of(one.fields, name)
        return math.inf if value is None else sign * value, *_by_rank(one)

    return order


def _unusual_first(one: Process) -> tuple[object, ...]:
    state = text_of(one.fields, "state")
    return state in ("ready", "running", "completed"), state in ("running", "completed"), *_by_rank(one)


def _node_first(one: Process) -> tuple[object, ...]:
    return int(one.node) if one.node.isdecimal() else -1, *_by_rank(one)


ORDERS: Mapping[str, Order] = {
    "rank": _by_rank,
    "node": _node_first,
    "state": _unusual_first,
    "step": _by("step", 1),
    "step time": _by("step_seconds", -1),
    "lateness": _by("late", -1),
    "cpu": _by("cpu", -1),
    "memory": _by("memory", -1),
}
"""Orders by name. The rows that need attention come first: processes in an unusual state, the slowest, the
latest, the largest.
"""

# ---- Filter


def wanted(text: str) -> Callable[[Process], bool]:
    """Parse a filter. All its words must apply.

    A word can be `node=0-3`, `rank=7`, `role=ps` or `state=failed`. A number or a range selects ranks. Any
    other word must occur in the row.
    """
    tests = [_test(word.lower()) for word in text.split()]
    return lambda one: all(test(one) for test in tests)


def _test(word: str) -> Callable[[Process], bool]:
    name, equals, value = word.partition("=")
    if equals and name == "node":
        return lambda one: _in_range(one.node, value)
    if equals and name == "rank":
        return lambda one: _in_range(str(one.rank), value)
    if equals and name in ("role", "state"):
        return lambda one: value in text_of(one.fields, name).lower()
    if re.fullmatch(r"\d+(-\d*)?", word):
        return lambda one: _in_range(str(one.rank), word)
    return lambda one: word in _words_of(one)


def _in_range(number: str, value: str) -> bool:
    """Return True if `number` is in the range `value`: `3`, `3-7` or `3-`. An empty value matches all."""
    low, dash, high = value.partition("-")
    if not number.isdecimal() or not low.isdecimal():
        return not value
    most = int(high) if high.isdecimal() else math.inf if dash else int(low)
    return int(low) <= int(number) <= most


def _words_of(one: Process) -> str:
    fields = one.fields
    parts = (one.title, one.role, one.host, text_of(fields, "name"), text_of(fields, "state"))
    return " ".join((*parts, views.activity_or_last_line(fields))).lower()


# ---- A line

COLUMNS = columns(
    "NODE:>8.4",
    "ROLE:.7",
    "RANK:>.4",
    "STATE:.9",
    "STEP:>8.6",
    "STEP TIME:>7.9",
    f":5.{STEP_CELLS}",
    "LATE:>7.4",
    f":4.{LATE_CELLS}",
    "LOSS:>6.7",
    "CPU:>6.4",
    "MEM:>6.4",
    "GPU:>5.4",
    "GPUMEM:>3",
    "UP:>2.5",
    "RESTARTS:>2",
    "PID:>1.5",
    "LAST LINE:1*",
)


def title_of(order: str) -> str:
    """Return the title of the column that belongs to an order."""
    return {"lateness": "LATE", "memory": "MEM"}.get(order, order.upper())


def cells(one: Process, slowest: float) -> list[Cell]:
    """Return the cells for COLUMNS. `slowest`: the step time, in seconds, of a bar with full height."""
    fields = one.fields
    late, started, attempt = (number_of(fields, name) for name in ("late", "started", "attempt"))
    return [
        one.node,
        "server" if one.role == "ps" else one.role,
        "" if one.rank is None else str(one.rank),
        views.state_cell(fields),
        views.step_of(fields),
        formatted(format_seconds, number_of(fields, "step_seconds")),
        (one.memory.step_time.bars(slowest), "cyan"),
        (formatted("{:.0%}".format, late), "yellow" if late and late >= 0.1 else ""),
        (one.memory.late.bars(1.0) if one.memory.late.highest else "", "yellow"),
        views.loss_cell(fields),
        *views.usage_cells(fields),
        format_duration(one.answered - started) if started is not None and one.alive else "",
        "" if not attempt else f"{attempt:g}",
        text_of(fields, "pid"),
        (views.activity_or_last_line(fields), "dim"),
    ]


def slowest_step(there: Iterable[Process]) -> float:
    """Return the largest mean step time of all processes, in seconds."""
    return max((each.memory.step_time.highest for each in there), default=0.0)


def format_seconds(seconds: float) -> str:
    """Format seconds as `1.2 s`, `31 ms` or `210 us`."""
    if seconds >= 0.9995:
        return f"{format_short(seconds)} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 0.9995e-3 else f"{1e6 * seconds:.3g} us"


# ---- Above the lines


def newest(there: Sequence[Process]) -> Process | None:
    """Return the trainer with the highest step."""
    trainers = [
        each for each in there if each.role == "trainer" and number_of(each.fields, "step") is not None
    ]
    return max(trainers, key=lambda each: number_of(each.fields, "step") or 0, default=None)


def progress_text(there: Sequence[Process]) -> str:
    """Summarize the progress as `step 1,234 of 5,000 (25 %), 3m12s left, loss 0.02314, 12.3k samples/s`.
    Empty before the first step.
    """
    first = newest(there)
    if first is None:
        return ""
    step, of = number_of(first.fields, "step") or 0, number_of(first.fields, "of")
    parts = [f"step {step:,}" + (f" of {of:,} ({100 * step / of:.0f} %)" if of else "")]
    if (left := number_of(first.fields, "left")) is not None:
        parts.append(f"{format_duration(left)} left")
    if loss := views.loss_of(first.fields):
        parts.append(f"loss {loss}")
    rates = (number_of(each.fields, "rate") for each in there)
    if speed := format_speed(rates, number_of(first.fields, "step_seconds")):
        parts.append(speed)
    return ", ".join(parts)
