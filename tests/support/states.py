"""The record and the status of a launch agree: the status is what `State` makes of the record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleetrun.control.client import NoAnswer, ask
from fleetrun.record.history import UnreadableError, events_of
from fleetrun.record.journal import Event, journal_path
from fleetrun.record.state import State

_PATIENCE = 5.0
_SHOWN = ("started", "ended", "exit")


def lines_of(path: Path) -> list[Event]:
    try:
        return list(events_of(path))
    except UnreadableError:
        return []


def record_of(status: Mapping[str, Any]) -> Path:
    return journal_path(Path(status["log_dir"]), status["job"], status["pod"])


def seen(status: Mapping[str, Any]) -> dict[str, Any]:
    """What of an answer to `status` follows from the record."""
    store = status["store"]
    return {
        **{name: status[name] for name in ("state", "why", "restarts", "late")},
        # What other nodes answered is in there too.
        "nodes": [{name: each[name] for name in ("rank", "title", "this")} for each in status["nodes"]],
        "waiting": None,
        "store": store and store["name"],
        "containers": {
            each["name"]: {
                "rank": each["rank"],
                "pid": each["pid"],
                **{name: each[name] for name in _SHOWN},
            }
            for each in status["containers"]
            if each["role"] != "pre_hook"
        },
    }


def folded(lines: list[Event]) -> Iterator[dict[str, Any]]:
    """The same after the first line of a record, after the second, and so on."""
    state = State()
    for line in lines:
        state.handle(line)
        yield {
            "state": state.state,
            "why": state.why,
            "restarts": state.restarted,
            "nodes": state.nodes,
            "late": state.late,
            "waiting": state.waiting and state.waiting["missing"],
            "store": state.store and state.store["name"],
            "containers": {
                name: {
                    "rank": each.rank,
                    "pid": each.pid,
                    "started": each.started,
                    "ended": each.ended,
                    "exit": each.code,
                }
                for name, each in state.processes.items()
                if each.role != "pre_hook"
            },
        }


def check_status(status: Mapping[str, Any], since: int = 0) -> bool:
    """The answer is the state after one of the lines of the record from number `since` on: the last one that
    was there when the launcher answered. Returns whether that could be compared: the wait before the first
    meeting of nodes is not recorded, and a full disk loses lines.
    """
    lines = lines_of(record_of(status))
    if not lines or status["waiting"] or any(each["event"] == "lost" for each in lines):
        return False
    found = list(folded(lines))[max(0, since - 1) :]
    assert seen(status) in found, (
        f"{record_of(status)} does not lead to this answer:\n{json.dumps(seen(status))}\n"
        f"Its last line leads to:\n{json.dumps(found[-1])}"
    )
    return True


def check_running(sockets: Path) -> int:
    """Ask each launcher that runs here, and compare. Returns how many could be compared."""
    compared = 0
    for path in sorted(sockets.glob("*.sock")):
        try:
            known = ask(path, {"ask": "status"}, _PATIENCE)
            lines = len(lines_of(record_of(known)))
            compared += check_status(ask(path, {"ask": "status"}, _PATIENCE), lines)
        except NoAnswer:  # it is stopped, or ends
            continue
    return compared


def check_end(path: Path) -> bool:
    """At the end of a job that completed, no process is up, and the restarts are those of the last line.
    Returns whether that could be compared.
    """
    lines = lines_of(path)
    over = lines[-1] if lines else {}
    if over.get("event") != "over" or over["code"] or any(each["event"] == "lost" for each in lines):
        return False
    last = list(folded(lines))[-1]
    assert not [each for each in last["containers"].values() if each["pid"]], path
    assert last["restarts"] == over["restarts"], path
    return True
