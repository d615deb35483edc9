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
from fleetrun.decoding import number_in
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
    fields = summary(status)
    late = [{name: each[name] for name in _OF_A_LATE_RANK} for each in status.get("late") or ()]
    kept = 0 if brief else len(containers)
    while True:
        part = {"containers": containers[:kept], "left_out": len(containers) - kept, "late": late}
        text = json.dumps(plain(fields if brief else {**fields, **part}), separators=(",", ":"))
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
        fields = json.loads(zlib.decompressobj().decompress(data, _UNPACKED))
    except _WRONG:
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("states"), dict):
        return None
    states = fields["states"]
    found = {**_plain(fields, (*_OF_A_NODE, "up", "step", "rate")), "states": _plain(states, states)}
    if isinstance(fields.get("late"), list):
        found["late"] = [_plain(each, _OF_A_LATE_RANK) for each in objects_in(fields, "late")]
    if not isinstance(fields.get("containers"), list):
        return found
    there = [_container(each) for each in objects_in(fields, "containers")]
    return {**found, "containers": there, **_plain(fields, ("left_out",))}


def _container(fields: Status) -> Status:
    activity = fields.get("activity")
    doing = _plain(activity, ("what", "done", "of")) if isinstance(activity, dict) else None
    return {**_plain(fields, _OF_A_CONTAINER), "activity": doing, **_of_a_server(fields)}


def _of_a_server(fields: Status) -> Status:
    found: Status = {}
    if isinstance(fields.get("server"), dict):
        found["server"] = _numbers(fields["server"])
    for name in ("tables", "hot"):
        if isinstance(fields.get(name), dict):
            found[name] = {table: _numbers(it) for table, it in fields[name].items() if isinstance(it, dict)}
    return found


def _numbers(fields: Status) -> Status:
    return {name: number for name, number in fields.items() if number_in(number) is not None}


def _plain(fields: Status, names: Iterable[str]) -> Status:
    return {
        name: fields[name] for name in names if name in fields and not isinstance(fields[name], dict | list)
    }


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
        fields: Status | None = {
            **sound_summary(status),
            "containers": status.get("containers"),
            "left_out": 0,
        }
    elif isinstance(packed, str):
        fields = _decoded(packed)
    else:
        return {**node, "silent": node.get("silent")}
    if fields is None:
        return {**node, "silent": "this fleetrun does not understand its answer"}
    return {**fields, **node, "silent": None}


def sound_summary(status: Fields) -> Status:
    """Return the `summary` of a status, or an empty one if the status is malformed."""
    try:
        return summary(status)
    except (LookupError, TypeError):
        return {}


def _decoded(packed: str) -> Status | None:
    try:
        return unpack(base64.b64decode(packed))
    except ValueError:
        return None
