"""The record of a launch on one machine: everything that happened, one JSON object a line, appended to
`log/<job>.<pod>.events.jsonl`. Knows no job; reading it is `history.py`'s.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fleetrun.record.appending import Appender

Event = dict[str, Any]
"""`time` (seconds since the epoch), `event` (its name), and what belongs to it; see docs/events.md."""

SUFFIX = ".events.jsonl"


def journal_path(log_dir: Path, job_id: str, pod: str) -> Path:
    return log_dir / f"{job_id}.{pod}{SUFFIX}"


class Journal:
    """Appends whole lines. What cannot be written is let go and counted: a full disk ends no job."""

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self.path = path
        self._wall = wall
        self._listeners: list[Callable[[Event], None]] = []
        self._file = Appender(path)
        self._lost = 0

    def listen(self, listener: Callable[[Event], None]) -> None:
        """From now on called with every event, whether it could be written or not."""
        self._listeners.append(listener)

    def write(self, event: str, **fields: Any) -> None:
        """Fields are JSON values; numbers that JSON does not have become "nan", "inf", "-inf"."""
        said = {"time": round(self._wall(), 3), "event": event, **fields}
        if self._lost:
            lost = {"time": said["time"], "event": "lost", "events": self._lost}
            self._lost = 0 if self._file.append(encoded(lost)) else self._lost
        self._lost += not self._file.append(encoded(said))
        for listener in self._listeners:
            listener(said)

    def close(self) -> None:
        """May be called twice; what is written after it reaches listeners only."""
        self._file.close()


def encoded(event: Event) -> bytes:
    """One line, without its end."""
    try:
        text = json.dumps(event, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(plain(event), ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace")


def plain(value: Any) -> Any:
    """What JSON does not have as a number, as a string: `nan`, `inf`, `-inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
