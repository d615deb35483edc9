"""How the machines of a job stand, a line each. Believes no word of what they say that has another form than
it should.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from fleetrun.commands.tables import Cell, Column, cut, table
from fleetrun.commands.values import STYLES, alive, figure, text, written
from fleetrun.console.figures import count, duration, short
from fleetrun.console.tail import printable
from fleetrun.control.observed import parts

_COLUMNS = (
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


def _chosen(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The machines that are shown, none of a job on one machine. `only`: the rank of the one meant."""
    nodes, only = parts(status, "nodes"), status.get("only")
    return [each for each in nodes if only in (None, each.get("rank"))] if len(nodes) > 1 else []


def told(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The machines that are shown and of which more is known than their names."""
    return [each for each in _chosen(status) if isinstance(each.get("states"), dict)]


def processes_up(status: Mapping[str, Any]) -> tuple[int, int]:
    """How many of the processes that are known of run, and how many there are."""
    there = told(status)
    if not there and status.get("only") is None:
        containers = parts(status, "containers")
        return alive(containers), len(containers)
    return sum(map(_up, there)), sum(map(_total, there))


def _up(node: Mapping[str, Any]) -> int:
    up = node.get("up")
    return up if type(up) is int and 0 <= up < _ENDLESS else 0


def _total(node: Mapping[str, Any]) -> int:
    states = node.get("states")
    counts = states.values() if isinstance(states, dict) else ()
    return sum(number for number in counts if type(number) is int and 0 <= number < _ENDLESS)


def lines(status: Mapping[str, Any], width: int | None, most: int | None = None) -> list[Text]:
    """At most so many lines: those in trouble first then, and how many more there are."""
    waiting = status.get("waiting")
    if isinstance(waiting, dict):
        return [cut(_meeting(waiting), width)]
    nodes = _chosen(status)
    if not nodes:
        return []
    if status.get("only") is None and not any(map(_was_asked, nodes)):
        names = (f"{text(each, 'rank')} {text(each, 'title')}{_here(each, ' ({})')}" for each in nodes)
        known = Text("each node tells of its own processes", "dim")
        return [cut(each, width) for each in (Text(f"{len(nodes)} nodes: {', '.join(names)}"), known)]
    shown = nodes
    if most is not None and len(nodes) + 1 > most:
        usual = Counter(text(each, "state") for each in nodes).most_common(1)[0][0]
        shown = sorted(nodes, key=lambda each: _up(each) > 0 and text(each, "state") == usual)
        shown = shown[: max(1, most - 2)]
    left = len(nodes) - len(shown)
    rest = [cut(Text(f"... and {left} more nodes; --node N shows one of them", "dim"), width)] if left else []
    return [*table(_COLUMNS, [_row(each) for each in shown], width), *rest]


def _was_asked(node: Mapping[str, Any]) -> bool:
    """An older launcher asks nobody, and one that leaves the job neither."""
    return node.get("this") is not True and bool(node.get("silent") or node.get("states"))


def _meeting(waiting: Mapping[str, Any]) -> Text:
    missing = waiting.get("missing")
    names = ", ".join(map(str, missing)) if isinstance(missing, list) else ""
    said = f"{text(waiting, 'present')} of {text(waiting, 'wanted')} nodes"
    return Text(printable(said + (f", waiting for {names}" if names else "")), "cyan")


def _row(node: Mapping[str, Any]) -> list[Cell]:
    total, silent, state = _total(node), text(node, "silent"), text(node, "state")
    return [
        Cell(text(node, "rank")),
        Cell(text(node, "title")),
        Cell(silent, "yellow") if silent else Cell(state, STYLES.get(state, "")),
        Cell(f"{_up(node)} of {total} up" if total else ""),
        Cell(duration(figure(node, "elapsed"))),
        Cell(text(node, "pod")),
        Cell(written(count, figure(node, "step"))),
        Cell(written(short, figure(node, "rate"))),
        Cell(_here(node, "{}") or text(node, "why"), "dim"),
    ]


def _here(node: Mapping[str, Any], form: str) -> str:
    return form.format("here") if node.get("this") is True else ""
