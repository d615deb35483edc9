"""A record made by hand: events of a job as a launch writes them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fleetrun.plots.course import Course
from fleetrun.record.history import read

Event = dict[str, Any]
BEGIN = 1_795_300_000.0


def event(at: float, name: str, **fields: Any) -> Event:
    """So many seconds after the beginning."""
    return {"time": BEGIN + at, "event": name, **fields}


def containers(*names: str) -> list[Event]:
    return [
        {"name": name, "role": role, "rank": int(rank), "index": int(rank), "log": f"/log/{name}.log"}
        for name in names
        for role, _, rank in [name.rpartition(".")]
    ]


def launch(*names: str, **fields: Any) -> Event:
    return event(
        0, "launch", job="ads", pod="abcdef", mode="ps", host="node1", containers=containers(*names), **fields
    )


def started(at: float, name: str, attempt: int = 0) -> Event:
    return event(at, "started", container=name, rank=int(name.rpartition(".")[2]), pid=7, attempt=attempt)


def exited(at: float, name: str, code: int = 0, asked: int | None = None) -> Event:
    rank = int(name.rpartition(".")[2])
    return event(at, "exited", container=name, rank=rank, code=code, asked=asked, how=f"code {code}")


def progress(at: float, name: str, **fields: Any) -> Event:
    said = {"step": None, "samples": None, "loss": None, "values": {}, "rate": None}
    return event(at, "progress", container=name, rank=int(name.rpartition(".")[2]), **said | fields)


def over(at: float, code: int = 0, reason: str = "") -> Event:
    return event(at, "over", code=code, reason=reason, restarts=0, report=[])


def training(names: Sequence[str], seconds: int = 100) -> list[Event]:
    """All of these train well; the record of it."""
    said = [launch(*names), *(started(0.5, name) for name in names)]
    for at in range(1, seconds, 10):
        said += [progress(at, name, step=at, samples=32 * at, loss=1 / at, rate=32.0) for name in names]
    return [*said, *(exited(seconds, name) for name in names), over(seconds + 1)]


def write(folder: Path, events: Iterable[Event], job: str = "ads", pod: str = "abcdef") -> Path:
    """As the file of a record."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{job}.{pod}.events.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in events))
    return path


def course(
    events: Iterable[Event], now: float | None = None, others: Sequence[Iterable[Event]] = ()
) -> Course:
    """As what a plot draws of a record, and of those of other nodes."""
    with tempfile.TemporaryDirectory() as folder:
        first, *more = (write(Path(folder) / str(node), each) for node, each in enumerate([events, *others]))
        return Course(read(first), now, more)
