"""The report of a job that hung: what stood still, where, and where to read on. Pure."""

from __future__ import annotations

from fleetrun.console.report import restarts_in_words
from fleetrun.console.tail import printable
from fleetrun.console.wrapping import wrapped
from fleetrun.pod.result import Hang


def hang_report(hang: Hang, restarts: int, width: int) -> list[str]:
    """The lines, none longer than `width` unless it is a word."""
    frame = "=" * min(width, 80)
    first = f"Hang: {hang.reason}"
    if restarts:
        first += f", {restarts_in_words(restarts)}"
    logs = sorted({str(each.log.parent) for each in hang.containers})
    return [
        frame,
        *wrapped(first, width),
        *places(hang, width),
        *[row for each in logs for row in wrapped(f"Logs, with the stacks: {printable(each)}", width)],
        frame,
    ]


def places(hang: Hang, width: int) -> list[str]:
    """Where its processes stand, what is alone at its place first."""
    lines = hang.stacks or ("Where its processes stand is not known.",)
    return [row for each in lines for row in wrapped(f"  {printable(each)}", width)]
