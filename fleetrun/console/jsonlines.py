"""Print JSON lines for programs: one object for each event of the event log, each shown line of a process,
and each message of fleetrun. See docs/events.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from functools import partial

from fleetrun.console.console import Console, Follower, Listener
from fleetrun.console.text import printable_json

_PROGRESS = b'"event": "progress"'
_HEAD = 64  # bytes of a line that include the name of the event


class JsonConsole(Console):
    @property
    def listener(self) -> Listener:
        return self._write_event

    def _write_event(self, line: bytes) -> None:
        """Write an event. While nobody reads stdout, progress is dropped, because it would grow without
        limit.
        """
        if self.out.room or _PROGRESS not in line[:_HEAD]:
            self._write(line)

    def follower(self, name: str, width: int, number: int, *, alone: bool) -> Follower:
        return partial(self._write_lines, name), False

    def opening(self, text: str) -> None:
        """Print nothing, because a program gets the event `launch`."""

    def block(self, lines: Iterable[str], *, level: str = "INFO") -> None:
        if self.enabled(level):
            self._event("message", level=level, text="\n".join(lines))

    def _log(self, level: str, text: str, colour: str = "", *, timed: bool = True) -> None:
        if self.enabled(level):
            self._event("message", level=level, text=text)

    def _write_lines(self, name: str, data: bytes) -> None:
        for line in data.split(b"\n")[:-1]:
            shown = line.rstrip(b"\r").rpartition(b"\r")[2]  # the last state of a progress bar
            self._event("log", container=name, line=shown.decode("utf-8", "backslashreplace"))

    def _event(self, event: str, **fields: str) -> None:
        text = json.dumps({"time": round(time.time(), 3), "event": event, **fields}, ensure_ascii=False)
        self._write(text.encode("utf-8", "backslashreplace"))

    def _write(self, line: bytes) -> None:
        self.out.write(printable_json(line) + b"\n")
