"""What the launcher says to the process that exports: one JSON object a line. Both directions; standard
library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fleetrun.pod.spec import PodSpec
from fleetrun.progress.reports import Report

Line = dict[str, Any]
"""`is` tells what it is: `begin`, `pod`, `report`, or `event` (of the record)."""

_EVENTS = {
    "started": ("container", "pid", "attempt"),
    "exited": ("container", "pid", "attempt", "code", "asked"),
    "failed": ("container", "restart"),
    "hung": ("containers",),
    "over": ("code",),
}
"""Events of the record that are of interest here, and what of them."""


def begin(**how: Any) -> bytes:
    """The first line: what to export, and where to."""
    return _encoded({"is": "begin", **how})


def pod(spec: PodSpec) -> bytes:
    """Whose processes are next."""
    containers = [{"name": each.name, "role": str(each.role), "rank": each.rank} for each in spec.containers]
    return _encoded({"is": "pod", "containers": containers})


def event(said: Mapping[str, Any]) -> bytes | None:
    """None for an event that nobody exports."""
    fields = _EVENTS.get(said["event"])
    if fields is None:
        return None
    kept = {name: said.get(name) for name in ("time", *fields)}
    return _encoded({"is": "event", "event": said["event"], **kept})


def report(container: str, said: Report, rate: float | None) -> bytes:
    """`rate` is in samples per second."""
    activity = said.activity
    return _encoded(
        {
            "is": "report",
            "container": container,
            "step": said.step,
            "samples": said.samples,
            "loss": said.loss,
            "values": dict(said.values),
            "rate": rate,
            "activity": [activity.what, activity.done, activity.of] if activity is not None else None,
            "time": said.time,
        }
    )


def read(line: bytes) -> Line | None:
    """None for what is no line of this kind."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and isinstance(said.get("is"), str) else None


def warning(text: str) -> bytes:
    """The other direction: something that the user should know."""
    return _encoded({"warning": text})


def warned(line: bytes) -> str | None:
    """The text of a warning; None for other output."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    text = said.get("warning") if isinstance(said, dict) else None
    return text if isinstance(text, str) else None


def _encoded(line: Line) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
