"""A job and its nodes as lines of text for a given width, for a terminal, a pipe or a screen that is redrawn.

Answers of a launcher may have any form: each value is checked before it is shown.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

from fleetrun.commands.output import Cell, Column, cut, filled, percent, size, table
from fleetrun.console.text import format_count, format_duration, format_loss, format_short, printable
from fleetrun.control.usage import objects_in
from fleetrun.pod.process import signal_name

# ---- Values in the answer of a launcher, whatever stands there.

STYLES = {
    "running": "green",
    "completed": "green",
    "failed": "red",
    "terminating": "yellow",
    "restarting": "yellow",
    "ending": "yellow",
    "leaving": "yellow",
    "meeting": "cyan",
    "starting": "cyan",
}
"""Of states."""


_LONGEST = 4096


def text(one: Mapping[str, Any], name: str) -> str:
    value = one.get(name)
    return "" if value is None or isinstance(value, dict | list) else printable(str(value)[:_LONGEST])


def figure(one: Mapping[str, Any], name: str) -> float | None:
    value = one.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return value


def written(how: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else how(value)


def alive(containers: Sequence[Mapping[str, Any]]) -> int:
    """How many have a process: also those that are asked to end."""
    return sum(each.get("alive") is True for each in containers)


# ---- How the machines of a job stand, a line each. Believes no word of what they say that has another form
# than it should.

_NODE_COLUMNS = (
    Column("NODE", right=True),
    Column("HOST"),
    Column("STATE"),
    Column("PROCESSES", 8),
    Column("UP", 5, right=True),
    Column("POD", 4),
    Column("STEP", 7, right=True),
    Column("SAMPLES/S", 6, right=True),
    Column("", 1, rest=True),
)


_ENDLESS = 1 << 40


def _shown_nodes(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The machines that are shown, none of a job on one machine. `only`: the rank of the one meant."""
    nodes, only = objects_in(status, "nodes"), status.get("only")
    return [each for each in nodes if only in (None, each.get("rank"))] if len(nodes) > 1 else []


def nodes_with_details(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The machines that are shown and of which more is known than their names."""
    return [each for each in _shown_nodes(status) if isinstance(each.get("states"), dict)]


def processes_up(status: Mapping[str, Any]) -> tuple[int, int]:
    """How many of the processes that are known of run, and how many there are."""
    there = nodes_with_details(status)
    if not there and status.get("only") is None:
        containers = objects_in(status, "containers")
        return alive(containers), len(containers)
    return sum(map(_up, there)), sum(map(_total, there))


def _up(node: Mapping[str, Any]) -> int:
    up = node.get("up")
    return up if type(up) is int and 0 <= up < _ENDLESS else 0


def _total(node: Mapping[str, Any]) -> int:
    states = node.get("states")
    counts = states.values() if isinstance(states, dict) else ()
    return sum(number for number in counts if type(number) is int and 0 <= number < _ENDLESS)


def node_lines(status: Mapping[str, Any], width: int | None, most: int | None = None) -> list[Text]:
    """At most so many lines: those in trouble first then, and how many more there are."""
    waiting = status.get("waiting")
    if isinstance(waiting, dict):
        return [cut(_meeting(waiting), width)]
    nodes = _shown_nodes(status)
    if not nodes:
        return []
    if status.get("only") is None and not any(map(_was_asked, nodes)):
        names = (
            f"{text(each, 'rank')} {text(each, 'title')}{_mark_of_this_node(each, ' ({})')}" for each in nodes
        )
        known = Text("each node tells of its own processes", "dim")
        return [cut(each, width) for each in (Text(f"{len(nodes)} nodes: {', '.join(names)}"), known)]
    shown = nodes
    if most is not None and len(nodes) + 1 > most:
        usual = Counter(text(each, "state") for each in nodes).most_common(1)[0][0]
        shown = sorted(nodes, key=lambda each: _up(each) > 0 and text(each, "state") == usual)
        shown = shown[: max(1, most - 2)]
    left = len(nodes) - len(shown)
    rest = [cut(Text(f"... and {left} more nodes; --node N shows one of them", "dim"), width)] if left else []
    return [*table(_NODE_COLUMNS, [_node_row(each) for each in shown], width), *rest]


def _was_asked(node: Mapping[str, Any]) -> bool:
    """An older launcher asks nobody, and one that leaves the job neither."""
    return node.get("this") is not True and bool(node.get("silent") or node.get("states"))


def _meeting(waiting: Mapping[str, Any]) -> Text:
    missing = waiting.get("missing")
    names = ", ".join(map(str, missing)) if isinstance(missing, list) else ""
    said = f"{text(waiting, 'present')} of {text(waiting, 'wanted')} nodes"
    return Text(printable(said + (f", waiting for {names}" if names else "")), "cyan")


def _node_row(node: Mapping[str, Any]) -> list[Cell]:
    total, silent, state = _total(node), text(node, "silent"), text(node, "state")
    return [
        Cell(text(node, "rank")),
        Cell(text(node, "title")),
        Cell(silent, "yellow") if silent else Cell(state, STYLES.get(state, "")),
        Cell(f"{_up(node)} of {total} up" if total else ""),
        Cell(format_duration(figure(node, "elapsed"))),
        Cell(text(node, "pod")),
        Cell(written(format_count, figure(node, "step"))),
        Cell(written(format_short, figure(node, "rate"))),
        Cell(_mark_of_this_node(node, "{}") or text(node, "why"), "dim"),
    ]


def _mark_of_this_node(node: Mapping[str, Any], form: str) -> str:
    return form.format("here") if node.get("this") is True else ""


# ---- How a job stands, as lines of text for a width: who reads them at a terminal, in a pipe or again and
# again gets the same. Believes no word of an answer that has another form than it should.

COLUMNS = (
    Column("NODE", 8, right=True),
    Column("NAME"),
    Column("RANK", 6, right=True),
    Column("PID", 5, right=True),
    Column("STATE"),
    Column("UP", 8, right=True),
    Column("RESTARTS", 2, right=True),
    Column("CPU", 7, right=True),
    Column("MEM", 7, right=True),
    Column("GPU", 4, right=True),
    Column("GPUMEM", 3, right=True),
    Column("STEP", 8, right=True),
    Column("LOSS", 7, right=True),
    Column("SAMPLES/S", 6, right=True),
    Column("LAST LINE", 1, rest=True),
)
_Process = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""One, behind its machine's number and what that machine says of itself."""

_NO_NUMBERS = ("nan", "inf", "-inf")


def heading(
    status: Mapping[str, Any], width: int | None, most: int | None = None, *, places: bool = True
) -> list[Text]:
    """What is to be said of the job as a whole; of its machines in at most so many lines; without `places`
    not where it is.
    """
    state = text(status, "state")
    up, there = processes_up(status)
    said = [
        Text.assemble((text(status, "job"), "bold"), f" (pod {text(status, 'pod')})"),
        Text(text(status, "mode")),
        Text(state, STYLES.get(state, "")),
        *([Text(f"{up} of {there} process{'es' * (there != 1)} up")] if there else []),
        Text(format_duration(figure(status, "elapsed"))),
        Text(f"restarts: {text(status, 'restarts')} of {text(status, 'max_restart')}"),
    ]
    where = [
        Text(f"logs in {text(status, 'log_dir')}", "dim"),
        Text(f"started in {text(status, 'cwd')}", "dim"),
    ]
    why = [cut(each, width) for each in _why(status)]
    nodes = node_lines(status, width, most)
    return [*filled(said, width), *(filled(where, width) if places else []), *why, *nodes]


def _why(status: Mapping[str, Any]) -> list[Text]:
    why = text(status, "why")
    return [Text(why, "yellow")] if why else []


def processes(status: Mapping[str, Any], width: int | None, now: float | None = None) -> list[Text]:
    """A line for each, under a line of titles. `now`: seconds since the epoch, instead of the moment of which
    the answer tells.
    """
    return [*_table(_known(status), width, now), *_left_out(status, width)]


def _table(there: Sequence[_Process], width: int | None, now: float | None = None) -> list[Text]:
    rows = [_row(each, moment(of) if now is None else now, node) for node, of, each in there]
    if all(text(each, "rank") == text(each, "index") for _, _, each in there):  # the name says it
        rows = [[*row[:2], Cell(""), *row[3:]] for row in rows]
    return table(COLUMNS, rows, width) if rows else []


def _known(status: Mapping[str, Any]) -> list[_Process]:
    nodes = nodes_with_details(status)
    if not nodes:
        return [("", status, each) for each in objects_in(status, "containers")]
    return [(text(node, "rank"), node, each) for node in nodes for each in objects_in(node, "containers")]


def _left_out(status: Mapping[str, Any], width: int | None) -> list[Text]:
    return [
        cut(Text(f"{left:.0f} more of node {text(node, 'rank')} had no room in its answer", "dim"), width)
        for node in nodes_with_details(status)
        if (left := figure(node, "left_out"))
    ]


def moment(status: Mapping[str, Any]) -> float:
    """Of which the answer tells (seconds since the epoch): so no process is older than its job."""
    started, elapsed = figure(status, "started"), figure(status, "elapsed")
    return started + elapsed if started is not None and elapsed is not None else time.time()


def _row(one: Mapping[str, Any], now: float, node: str) -> list[Cell]:
    state = text(one, "state")
    started = figure(one, "started")
    up = now - started if started is not None and one.get("alive") is True else None
    attempt = figure(one, "attempt")
    return [
        Cell(node),
        Cell(text(one, "name")),
        Cell(text(one, "rank")),
        Cell(text(one, "pid")),
        Cell(_state(one), STYLES.get(state, "")),
        Cell(format_duration(up)),
        Cell(format_count(attempt) if attempt else ""),
        Cell(percent(figure(one, "cpu"))),
        Cell(size(figure(one, "memory"))),
        Cell(percent(figure(one, "gpu"))),
        Cell(size(figure(one, "gpu_memory"))),
        Cell(step_of(one)),
        Cell(loss_of(one), "red" if loss_of(one) in _NO_NUMBERS else ""),
        Cell(written(format_short, figure(one, "rate"))),
        Cell(said(one), "dim"),
    ]


def _state(one: Mapping[str, Any]) -> str:
    """Of one that ended, how."""
    code = one.get("exit")
    if text(one, "state") == "failed" and isinstance(code, int):
        return f"exit {code}" if code >= 0 else signal_name(-code)
    return text(one, "state")


def loss_of(one: Mapping[str, Any]) -> str:
    """One that is no number too."""
    said = one.get("loss")
    return str(said) if str(said) in _NO_NUMBERS else written(format_loss, figure(one, "loss"))


def step_of(one: Mapping[str, Any]) -> str:
    return written(format_count, figure(one, "step"))


def said(one: Mapping[str, Any]) -> str:
    """What it does beside steps, else the last that it printed."""
    activity = one.get("activity")
    if isinstance(activity, dict) and isinstance(activity.get("what"), str):
        done, of = figure(activity, "done"), figure(activity, "of")
        part = f" {format_short(done)}" if done is not None else ""
        return f"{activity['what']}:{part}{f' of {format_short(of)}' if of is not None else ''}".rstrip(":")
    return text(one, "last_line")


def last_lines(status: Mapping[str, Any], width: int | None, most: int | None = None) -> list[Text]:
    """One for each process that said something; for where the table has no room for them."""
    there = [each for each in objects_in(status, "containers") if said(each)]
    longest = max((len(text(each, "name")) for each in there), default=0)
    lines = [
        Text.assemble((f"{text(each, 'name'):{longest}}  ", "bold"), (printable(said(each)), "dim"))
        for each in there
    ]
    return [cut(each, width) for each in lines[:most]]


def picture(status: Mapping[str, Any], columns: int, rows: int, now: float, note: str = "") -> list[Text]:
    """The same for a screen of so many columns and rows. `note`: what is to be said of the picture itself."""
    there = _known(status)
    most = max(4, rows // 3)
    top = heading(status, columns, most)
    if len(top) + len(there) + 3 > rows:
        top = heading(status, columns, most, places=False)
    if note:
        top.append(cut(Text(note, "yellow"), columns))
    foot = cut(Text(f"q: quit    {time.strftime('%H:%M:%S', time.localtime(now))}", "dim"), columns)
    room = max(1, rows - len(top) - 2)
    if len(there) >= room:
        there.sort(key=lambda row: _calm(row[2]))
    middle = _first(_table(there, columns) + _left_out(status, columns), room, columns)
    room -= len(middle) + 1
    if room > 0 and not (middle and "LAST LINE" in middle[0].plain):
        middle += [Text(""), *last_lines(status, columns, room)]
    lines = [*top, Text(""), *middle]
    return [*lines[: rows - 1], *[Text("")] * (rows - 1 - len(lines)), foot]


def _calm(one: Mapping[str, Any]) -> bool:
    """Nothing is the matter with it: where there is no room for all, others are shown."""
    return text(one, "state") in ("ready", "running", "completed")


def _first(lines: list[Text], room: int, columns: int) -> list[Text]:
    """As many as there is room for, and how many more there are."""
    if len(lines) <= room:
        return lines
    kept = lines[: max(0, room - 1)]
    more = len(lines) - max(1, len(kept))
    return [*kept, cut(Text(f"... and {more} more; a taller window shows them", "dim"), columns)]
