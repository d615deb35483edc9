"""The text of the status line. It shows the state of a job, taken from the launcher's answer to `status`, in
one row that fits the terminal.

`0:12:31 | trainers 2/2 | servers 1/1 | step 1,234 | loss 0.0231 | 12.3k samples/s | 1 restart`
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleetrun.aliases import Fields
from fleetrun.console.text import (
    columns,
    cut,
    format_clock,
    format_count,
    format_duration,
    format_loss,
    format_short,
    format_speed,
    printable,
)
from fleetrun.frozen import frozen

_SHOWN_STATES = ("starting", "restarting", "leaving", "ending", "waiting")
_MISSING_NODES_SHOWN = 2
_SEPARATOR = " | "
_BAR_WIDTH = 10
_LONGEST_ACTIVITY = 60
_SILENT = 20.0  # seconds
_STOP_SHOWN_AFTER = 2.0
_ROLES = {
    "node": "nodes",
    "ps": "servers",
    "trainer": "trainers",
    "heter": "heter trainers",
    "coordinator": "coordinators",
    "evaluator": "evaluators",
}


@frozen
class CurrentActivity:
    """A long activity. `done` of `of` parts are complete. Each is None if unknown."""

    what: str
    done: float | None = None
    of: float | None = None


@frozen(kw_only=True)
class StatusFields:
    """The fields of the status line."""

    elapsed: float = 0.0
    """In seconds."""
    up: tuple[tuple[str, int, int], ...] = ()
    """(role, running processes, all processes) on one node, else ("node", joined nodes, most nodes)."""
    step: int | None = None
    of: int | None = None
    left: float | None = None
    loss: float | None = None
    speed: str = ""
    """Speed of all trainers of this node together."""
    restarts: int = 0
    state: str = ""
    """Empty while the job simply runs."""
    activity: CurrentActivity | None = None
    silent_for: float | None = None
    waits_for: str = ""


def status_fields(
    status: Fields,
    most_nodes: int = 1,
    silent_for: float | None = None,
    stopping_for: float | None = None,
    waits_for: str = "",
) -> StatusFields:
    """Select the fields of the status line from a launcher's answer.

    `silent_for`: seconds without activity of any trainer. They are shown if they are many and unexplained.
    `stopping_for`: seconds since the stop of processes began. Step and loss come from the trainer with the
    highest step. If that trainer reports no loss, the loss comes from the first trainer that does.
    """
    containers = status["containers"]
    waiting, store = status["waiting"], status["store"]
    trainers = [each for each in containers if each["role"] == "trainer"]
    newest: Fields = max(
        (each for each in trainers if each["step"] is not None), key=lambda each: each["step"], default={}
    )
    activity: CurrentActivity | None
    if store:
        activity = CurrentActivity(f"waiting for {store['name']}{_time_left(store)}")
    elif waiting:
        missing = waiting["missing"]
        names = ", ".join(missing[:_MISSING_NODES_SHOWN])
        names += " ..." if len(missing) > _MISSING_NODES_SHOWN else ""
        activity = CurrentActivity(
            f"{waiting['present']} of {waiting['wanted']} nodes, waiting for {names or 'more'}"
            f"{_time_left(waiting)}"
        )
    elif (stopping_for or 0.0) >= _STOP_SHOWN_AFTER:
        activity = _waiting_for_ends(containers, stopping_for or 0.0)
    else:
        found = next((each["activity"] for each in [*trainers, *containers] if each["activity"]), None)
        activity = CurrentActivity(found["what"], found["done"], found["of"]) if found else None
    losses = (each["loss"] for each in (newest, *trainers) if each)
    return StatusFields(
        elapsed=status["elapsed"],
        up=() if waiting else _nodes_up(status["nodes"], most_nodes) or _processes_up(containers),
        step=newest.get("step"),
        of=newest.get("of"),
        left=newest.get("left"),
        loss=next((loss for loss in losses if loss is not None), None),
        speed=format_speed((each["rate"] for each in trainers), newest.get("step_seconds")),
        restarts=status["restarts"],
        state=status["state"] if status["state"] in _SHOWN_STATES else "",
        activity=activity,
        silent_for=silent_for if activity is None and (silent_for or 0.0) >= _SILENT else None,
        waits_for=waits_for,
    )


def _nodes_up(nodes: Sequence[Fields], most: int) -> tuple[tuple[str, int, int], ...]:
    """Return the joined nodes and the most nodes. Empty for a job on one node."""
    most = max(most, len(nodes))
    return (("node", len(nodes), most),) if nodes and most > 1 else ()


def _processes_up(containers: Sequence[Fields]) -> tuple[tuple[str, int, int], ...]:
    """Return the processes by role, trainers first."""
    roles = sorted(dict.fromkeys(each["role"] for each in containers), key=lambda role: role != "trainer")
    groups = [(role, [each for each in containers if each["role"] == role]) for role in roles]
    return tuple((role, sum(each["pid"] is not None for each in group), len(group)) for role, group in groups)


def _waiting_for_ends(containers: Sequence[Fields], seconds: float) -> CurrentActivity | None:
    alive = [each for each in containers if each["pid"] is not None]
    if not alive:
        return None
    role = {"ps": "server"}.get(alive[0]["role"], alive[0]["role"])
    names = f"{role} {alive[0]['rank']}" if len(alive) == 1 else f"{len(alive)} processes"
    return CurrentActivity(f"waiting for {names} to end, {format_duration(seconds)}")


def _time_left(waiting: Fields) -> str:
    """Format the remaining time, such as `, 9:30 left`."""
    if waiting["left"] is None:
        return ""
    minutes, seconds = divmod(int(waiting["left"]), 60)
    return f", {minutes}:{seconds:02} left"


def status_row(status: StatusFields, width: int) -> str:
    """Return the row, at most `width` columns wide.

    The least important fields are dropped first, then the end is cut.
    """
    fields = _prioritized_fields(status)
    while len(fields) > 1 and columns(_joined(fields)) > width:
        fields.remove(max(fields))
    return cut(_joined(fields), width)


def _joined(fields: Sequence[tuple[int, int, str]]) -> str:
    return _SEPARATOR.join(text for _, _, text in fields)


def _prioritized_fields(status: StatusFields) -> list[tuple[int, int, str]]:
    """Return the fields in the order of the row, each as (importance, position, text).

    Importance 0 is the highest.
    """
    texts = [(0, format_clock(status.elapsed))]
    if status.state:
        texts.append((1, status.state))
    texts += [(6, f"{_ROLES.get(role, role)} {up}/{total}") for role, up, total in status.up if total]
    if status.step is not None:
        of = "" if status.of is None else f"/{format_count(status.of)}"
        texts.append((3, f"step {format_count(status.step)}{of}"))
    if status.left is not None:
        texts.append((4, f"{format_duration(status.left)} left"))
    if status.loss is not None:
        texts.append((5, f"loss {format_loss(status.loss)}"))
    if status.speed:
        texts.append((7, status.speed))
    if status.restarts:
        texts.append((4, f"{status.restarts} restart{'s' if status.restarts > 1 else ''}"))
    if status.silent_for is not None:
        duration = (
            format_duration(status.silent_for) if status.silent_for >= 60 else f"{status.silent_for:.0f} s"
        )
        texts.append((1, f"no activity for {duration}: {status.waits_for or 'fleetrun stacks'}"))
    if status.activity is not None:
        texts.append((2, activity_text(status.activity)))
    return [(rank, position, text) for position, (rank, text) in enumerate(texts)]


def activity_text(activity: CurrentActivity) -> str:
    """Format an activity, such as `loading tables [####......] 4/10`."""
    name = printable(activity.what)
    done, of = activity.done, activity.of
    if columns(name) > _LONGEST_ACTIVITY:
        name = cut(name, _LONGEST_ACTIVITY - 3) + "..."
    if done is None or not math.isfinite(done):
        return name
    if of is None or not math.isfinite(of) or of <= 0:
        return f"{name} {format_short(done)}"
    full = int(_BAR_WIDTH * min(1.0, max(0.0, done / of)))
    return f"{name} [{'#' * full}{'.' * (_BAR_WIDTH - full)}] {format_short(done)}/{format_short(of)}"
