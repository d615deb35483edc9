"""Format the status of a job and its nodes as lines of text of a given width, for a terminal, a pipe or a
full screen.

The answer of a launcher is not trusted. Values of an unexpected type are not shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.text import Text

from fleetrun.aliases import Fields
from fleetrun.commands.find import script_names
from fleetrun.commands.output import Cell, columns, cut, filled, percent, size, table
from fleetrun.console.text import format_count, format_duration, format_loss, format_short, printable
from fleetrun.decoding import number_in
from fleetrun.envs.settings.parsing import plural
from fleetrun.pod.process import signal_name
from fleetrun.record.goodput import read_fields, share
from fleetrun.record.journal import objects_in

STYLES = {
    "running": "green",
    "completed": "green",
    "failed": "red",
    "terminating": "yellow",
    "restarting": "yellow",
    "ending": "yellow",
    "leaving": "yellow",
    "meeting": "cyan",
    "spare": "cyan",
    "starting": "cyan",
    "waiting": "cyan",
    "debugged": "cyan",
}
"""Colour of each state."""

_LONGEST = 4096  # characters of a value
_LARGEST_COUNT = 1 << 40  # of processes

# ---- Values in the answer of a launcher.


def text_of(one: Fields, name: str) -> str:
    """Return a field as printable text of limited length. Empty for missing or nested values."""
    value = one.get(name)
    return "" if value is None or isinstance(value, dict | list) else printable(str(value)[:_LONGEST])


def number_of(one: Fields, name: str) -> float | None:
    """Return a field as a finite number, else None."""
    return number_in(one.get(name))


def formatted(form: Callable[[float], str], value: float | None) -> str:
    """Apply `form` to a value. Empty for None."""
    return "" if value is None else form(value)


def count_alive(containers: Sequence[Fields]) -> int:
    """Count the processes that run, including the ones that are being stopped."""
    return sum(each.get("alive") is True for each in containers)


# ---- Nodes, one line each.

_NODE_COLUMNS = columns(
    "NODE:>",
    "HOST",
    "STATE",
    "PROCESSES:8",
    "UP:>5",
    "POD:4",
    "STEP:>7",
    "SAMPLES/S:>6",
    ":1*",
)


def _shown_nodes(status: Fields) -> list[Fields]:
    """Return the nodes to show. Empty for a job on one node. `only` is the rank of a single node."""
    nodes, only = objects_in(status, "nodes"), status.get("only")
    return [each for each in nodes if only in (None, each.get("rank"))] if len(nodes) > 1 else []


def nodes_with_details(status: Fields) -> list[Fields]:
    """Return the shown nodes that have answered with details."""
    return [each for each in _shown_nodes(status) if isinstance(each.get("states"), dict)]


def processes_up(status: Fields) -> tuple[int, int]:
    """Return how many processes are up, and how many exist."""
    there = nodes_with_details(status)
    if not there and status.get("only") is None:
        containers = objects_in(status, "containers")
        return count_alive(containers), len(containers)
    return sum(map(_up, there)), sum(map(_total, there))


def _up(node: Fields) -> int:
    return _count(node.get("up"))


def _total(node: Fields) -> int:
    states = node.get("states")
    return sum(map(_count, states.values())) if isinstance(states, dict) else 0


def _count(number: object) -> int:
    return number if type(number) is int and 0 <= number < _LARGEST_COUNT else 0


def node_lines(status: Fields, width: int | None) -> list[Text]:
    """Return a line for each node, or a line about the missing nodes."""
    waiting = status.get("waiting")
    if isinstance(waiting, dict):
        return [cut(waiting_text(status, waiting), width)]
    nodes = _shown_nodes(status)
    if not nodes:
        return []
    return table(_NODE_COLUMNS, [_node_row(each) for each in nodes], width)


def waiting_text(status: Fields, waiting: Fields) -> Text:
    """Describe the nodes that the job waits for. `waiting` is the field of the status."""
    if status.get("state") == "spare":
        return Text(printable(f"the job runs on {text_of(waiting, 'present')} other nodes"), "cyan")
    missing = waiting.get("missing")
    names = ", ".join(map(str, missing)) if isinstance(missing, list) else ""
    joined = f"{text_of(waiting, 'present')} of {text_of(waiting, 'wanted')} nodes"
    return Text(printable(joined + (f", waiting for {names}" if names else "")), "cyan")


def _node_row(node: Fields) -> list[Cell]:
    total, silent, state = _total(node), text_of(node, "silent"), text_of(node, "state")
    return [
        text_of(node, "rank"),
        text_of(node, "title"),
        (silent, "yellow") if silent else (state, STYLES.get(state, "")),
        f"{_up(node)} of {total} up" if total else "",
        format_duration(number_of(node, "elapsed")),
        text_of(node, "pod"),
        formatted(format_count, number_of(node, "step")),
        formatted(format_short, number_of(node, "rate")),
        ("here" if node.get("this") is True else text_of(node, "why"), "dim"),
    ]


# ---- The job and its processes.

COLUMNS = columns(
    "NODE:>8",
    "NAME",
    "RANK:>6",
    "PID:>5",
    "STATE",
    "UP:>8",
    "RESTARTS:>2",
    "CPU:>7",
    "MEM:>7",
    "GPU:>4",
    "GPUMEM:>3",
    "STEP:>8",
    "LOSS:>7",
    "SAMPLES/S:>6",
    "STEPS/S:>6",
    "LATE:>5",
    "LAST LINE:1*",
)
_Process = tuple[str, Fields, Fields]
"""The rank of the node, the answer about the node, and the process."""

NO_NUMBERS = ("nan", "inf", "-inf")


def heading_lines(status: Fields, width: int | None) -> list[Text]:
    """Return lines about the job, then about its nodes."""
    where = [
        Text(f"logs in {text_of(status, 'log_dir')}", "dim"),
        Text(f"started in {text_of(status, 'cwd')}", "dim"),
    ]
    why = text_of(status, "why")
    reason = [cut(Text(why, "yellow"), width)] if why else []
    return [
        *filled(heading_fields(status), width), *filled(where, width), *reason, *node_lines(status, width),
    ]  # fmt: skip


def heading_fields(status: Fields) -> list[Text]:
    """Describe the job in fields of a few words."""
    state = text_of(status, "state")
    up, there = processes_up(status)
    part = share(read_fields(status.get("goodput")))
    script = f"{script_names(text_of(status, 'script'))[0]}, " if status.get("script") else ""
    return [
        Text.assemble((text_of(status, "job"), "bold"), f" ({script}pod {text_of(status, 'pod')})"),
        Text(text_of(status, "mode")),
        Text(state, STYLES.get(state, "")),
        *([Text(f"{up} of {plural(there, 'process')} up")] if there else []),
        Text(format_duration(number_of(status, "elapsed"))),
        Text(f"restarts: {_restarts(status)}"),
        *([] if part is None else [Text(f"goodput {100 * part:.1f} %")]),
    ]


def _restarts(status: Fields) -> str:
    """Format the restarts. Progress resets the budget, so they may exceed --max_restart."""
    made, most = number_of(status, "restarts"), number_of(status, "max_restart")
    if made is not None and most is not None and made > most:
        return f"{made:g} (--max_restart {most:g})"
    return f"{text_of(status, 'restarts')} of {text_of(status, 'max_restart')}"


def process_lines(status: Fields, width: int | None) -> list[Text]:
    """Return a line of titles and a line for each process."""
    there = processes(status)
    rows = [_process_row(each, answer_time(answer), node) for node, answer, each in there]
    # Leave out the rank if the names include it.
    if all(text_of(each, "rank") == text_of(each, "index") for _, _, each in there):
        rows = [[*row[:2], "", *row[3:]] for row in rows]
    return [*(table(COLUMNS, rows, width) if rows else ()), *_left_out(status, width)]


def processes(status: Fields) -> list[_Process]:
    """Return the processes of all nodes, each with `late`, the share of time for which others wait for it."""
    nodes = nodes_with_details(status)
    late = {
        text_of(each, "rank"): number_of(each, "share")
        for answer in (status, *nodes)  # only one of them has it
        for each in objects_in(answer, "late")
    }
    parts = [(text_of(node, "rank"), node) for node in nodes] if nodes else [("", status)]
    return [
        (
            node,
            answer,
            {**each, "late": late.get(text_of(each, "rank")) if each.get("role") == "trainer" else None},
        )
        for node, answer in parts
        for each in objects_in(answer, "containers")
    ]


def _left_out(status: Fields, width: int | None) -> list[Text]:
    return [
        cut(
            Text(
                f"{left:.0f} more processes of node {text_of(node, 'rank')} did not fit in its answer", "dim"
            ),
            width,
        )
        for node in nodes_with_details(status)
        if (left := number_of(node, "left_out"))
    ]


def answer_time(status: Fields) -> float:
    """Return the time of the answer, in seconds since the epoch.

    It uses the launcher's clock, as the start times do.
    """
    started, elapsed = number_of(status, "started"), number_of(status, "elapsed")
    return started + elapsed if started is not None and elapsed is not None else time.time()


def _process_row(one: Fields, now: float, node: str) -> list[Cell]:
    started = number_of(one, "started")
    up = now - started if started is not None and one.get("alive") is True else None
    attempt = number_of(one, "attempt")
    return [
        node,
        text_of(one, "name"),
        text_of(one, "rank"),
        text_of(one, "pid"),
        state_cell(one),
        format_duration(up),
        format_count(attempt) if attempt else "",
        *usage_cells(one),
        step_of(one),
        loss_cell(one),
        formatted(format_short, number_of(one, "rate")),
        _steps_a_second(one),
        formatted("{:.0%}".format, number_of(one, "late")),
        (activity_or_last_line(one), "dim"),
    ]


def _steps_a_second(one: Fields) -> str:
    """Format the steps per second of a process that does not count samples."""
    seconds = number_of(one, "step_seconds")
    return format_short(1 / seconds) if seconds and number_of(one, "rate") is None else ""


def usage_cells(one: Fields) -> list[Cell]:
    """Return the cells of CPU, MEM, GPU and GPUMEM."""
    return [
        form(number_of(one, name))
        for form, name in ((percent, "cpu"), (size, "memory"), (percent, "gpu"), (size, "gpu_memory"))
    ]


def state_cell(one: Fields) -> Cell:
    """Return the cell of the state. A failed process shows its exit code or signal instead."""
    state, code = text_of(one, "state"), one.get("exit")
    shown = state
    if state == "failed" and isinstance(code, int):
        shown = f"exit {code}" if code >= 0 else signal_name(-code)
    return shown, STYLES.get(state, "")


def loss_of(one: Fields) -> str:
    """Format the loss. JSON has `nan` and `inf` as strings."""
    loss = one.get("loss")
    return str(loss) if str(loss) in NO_NUMBERS else formatted(format_loss, number_of(one, "loss"))


def loss_cell(one: Fields) -> Cell:
    loss = loss_of(one)
    return loss, "red" if loss in NO_NUMBERS else ""


def step_of(one: Fields) -> str:
    return formatted(format_count, number_of(one, "step"))


def activity_or_last_line(one: Fields) -> str:
    """Return the activity of the process besides steps, else its last line of output."""
    activity = one.get("activity")
    if isinstance(activity, dict) and isinstance(activity.get("what"), str):
        done, of = number_of(activity, "done"), number_of(activity, "of")
        part = f" {format_short(done)}" if done is not None else ""
        return f"{activity['what']}:{part}{f' of {format_short(of)}' if of is not None else ''}".rstrip(":")
    return text_of(one, "last_line")


def last_lines(status: Fields, width: int | None) -> list[Text]:
    """Return the last line of each process, for a table too narrow for the LAST LINE column."""
    there = [each for each in objects_in(status, "containers") if activity_or_last_line(each)]
    longest = max((len(text_of(each, "name")) for each in there), default=0)
    return [
        cut(
            Text.assemble(
                (f"{text_of(each, 'name'):{longest}}  ", "bold"),
                (printable(activity_or_last_line(each)), "dim"),
            ),
            width,
        )
        for each in there
    ]
