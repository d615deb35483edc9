"""The record of a launch on one machine: everything that happened, one JSON object a line, appended to
`log/<job>.<pod>.events.jsonl`. Knows no job.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
"""`time` (seconds since the epoch), `event` (its name), and what belongs to it; see docs/events.md."""


def journal_path(log_dir: Path, job_id: str, pod: str) -> Path:
    return log_dir / f"{job_id}.{pod}.events.jsonl"


class Journal:
    """Appends whole lines; readable by its owner only. What cannot be written is let go: a full disk ends no
    job.
    """

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self.path = path
        self._wall = wall
        self._listeners: list[Callable[[Event], None]] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError:
            self._fd = -1

    def listen(self, listener: Callable[[Event], None]) -> None:
        """From now on called with every event, whether it could be written or not."""
        self._listeners.append(listener)

    def write(self, event: str, **fields: Any) -> None:
        said = {"time": round(self._wall(), 3), "event": event, **fields}
        line = json.dumps(said, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, line)
        for listener in self._listeners:
            listener(said)
