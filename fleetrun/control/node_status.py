"""Pack the status of a job on its other nodes into as few bytes as possible, and unpack it. Nothing in a
packed status is trusted, because another node may send anything.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping

from fleetrun.aliases import Document, Fields
from fleetrun.record.journal import objects_in, plain

Status = Document

MANY = 16
"""With more nodes than this, each node reports only the number of its processes, unless the user
wants more.
"""

_OF_A_NODE = ("pod", "pid", "log_dir", "started", "elapsed", "state", "why", "restarts")
_OF_A_CONTAINER = (
    "name", "role", "rank", "index", "state", "alive", "pid", "attempt", "started", "ended", "exit",
    "gpus", "step", "of", "left", "samples", "loss", "rate", "step_seconds",
    "activity",
)  # fmt: skip
_OF_A_SERVER = ("server", "tables", "hot")
_OF_A_LATE_RANK = ("rank", "share")
_LONGEST_WHY = 400
_UNPACKED = 4 << 20
_WRONG = (ValueError, RecursionError, zlib.error)


def summary(status: Fields) -> Status:
    """Summarize the status of one node.

    `states` counts the processes by state, and `up` the running ones. `step` is the step of the slowest
    process. `rate` is the samples per second of all processes.
    """
    containers = status["containers"]
    steps = [each["step"] for each in containers if each["step"] is not None]
    rates = [each["rate"] for each in containers if each["rate"] is not None]
    return {
        **{name: status[name] for name in _OF_A_NODE},
        "why": status["why"][:_LONGEST_WHY],
        "up": sum(each["alive"] is True for each in containers),
        "states": dict(Counter(each["state"] for each in containers)),
        "step": min(steps, default=None),
        "rate": sum(rates) if rates else None,
    }


def pack(status: Fields, brief: bool, most: int) -> bytes:
    """Pack the status of a node into at most `most` bytes. `left_out` counts the processes that did not fit.

    The tables of the node's servers are dropped first, then the lateness of the job's ranks.
    """
    containers = [_packed_container(each) for each in status["containers"]]
    said = summary(status)
    late = [{name: each[name] for name in _OF_A_LATE_RANK} for each in status.get("late") or ()]
    kept = 0 if brief else len(containers)
    while True:
        part = {"containers": containers[:kept], "left_out": len(containers) - kept, "late": late}
        text = json.dumps(plain(said if brief else {**said, **part}), separators=(",", ":"))
        data = zlib.compress(text.encode(), 1)
        if len(data) <= most:
            return data
        long = next((name for name in ("hot", "tables") if any(each.get(name) for each in containers)), None)
        if long is not None:  # before any process is dropped
            containers = [{**each, long: None} for each in containers]
            continue
        if late and not brief:
            late = []
            continue
        if not kept:
            return b""  # nothing fits
        kept = min(kept - 1, kept * most // len(data))


def _packed_container(container: Fields) -> Status:
    of_a_server = {name: container[name] for name in _OF_A_SERVER if container.get(name)}
    return {name: container[name] for name in _OF_A_CONTAINER} | of_a_server


def unpack(data: bytes) -> Status | None:
    """Unpack the known fields, each in a harmless form. Return None if no node can have sent this."""
    try:
        said = json.loads(zlib.decompressobj().decompress(data, _UNPACKED))
    except _WRONG:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("states"), dict):
        return None
    states = said["states"]
    found = {**_plain(said, (*_OF_A_NODE, "up", "step", "rate")), "states": _plain(states, states)}
    if isinstance(said.get("late"), list):
        found["late"] = [_plain(each, _OF_A_LATE_RANK) for each in objects_in(said, "late")]
    if not isinstance(said.get("containers"), list):
        return found
    there = [_container(each) for each in objects_in(said, "containers")]
    return {**found, "containers": there, **_plain(said, ("left_out",))}


def _container(said: Status) -> Status:
    activity = said.get("activity")
    doing = _plain(activity, ("what", "done", "of")) if isinstance(activity, dict) else None
    return {**_plain(said, _OF_A_CONTAINER), "activity": doing, **_of_a_server(said)}


def _of_a_server(said: Status) -> Status:
    found: Status = {}
    if isinstance(said.get("server"), dict):
        found["server"] = _numbers(said["server"])
    for name in ("tables", "hot"):
        if isinstance(said.get(name), dict):
            found[name] = {table: _numbers(it) for table, it in said[name].items() if isinstance(it, dict)}
    return found


def _numbers(said: Status) -> Status:
    return {
        name: number
        for name, number in said.items()
        if isinstance(number, int | float) and not isinstance(number, bool)
    }


def _plain(said: Status, names: Iterable[str]) -> Status:
    return {name: said[name] for name in names if name in said and not isinstance(said[name], dict | list)}


def with_answers(status: Status, found: Mapping[int, bytes | None], within: float) -> Status:
    """Return a status in which each node has its packed answer (`packed`), or the reason of its silence
    (`silent`).
    """
    silent = f"no answer within {within:g} s"
    nodes = []
    for node in status["nodes"]:
        if node["rank"] not in found:
            nodes.append(node)
        elif (data := found[node["rank"]]) is None:
            nodes.append({**node, "silent": silent})
        else:
            nodes.append({**node, "packed": base64.b64encode(data).decode()})
    return {**status, "nodes": nodes}


def unfolded(status: Fields) -> Status:
    """Unpack a status for the command that requested it: each node, this one too, gets its fields. Unknown
    fields stay unchanged.
    """
    return {**status, "nodes": [_unfolded(each, status) for each in objects_in(status, "nodes")]}


def _unfolded(node: Status, status: Fields) -> Status:
    node = dict(node)
    packed = node.pop("packed", None)
    if node.get("this") is True:
        said: Status | None = {
            **sound_summary(status),
            "containers": status.get("containers"),
            "left_out": 0,
        }
    elif isinstance(packed, str):
        said = _decoded(packed)
    else:
        return {**node, "silent": node.get("silent")}
    if said is None:
        return {**node, "silent": "it says what this fleetrun does not understand"}
    return {**said, **node, "silent": None}


def sound_summary(status: Fields) -> Status:
    """Return the `summary` of a status of any form, or an empty one."""
    try:
        return summary(status)
    except (LookupError, TypeError):
        return {}


def _decoded(packed: str) -> Status | None:
    try:
        return unpack(base64.b64decode(packed))
    except ValueError:
        return None
