"""The console of a program that reads: one JSON object a line on stdout, for every event of the record, every
line of a container that is followed, and everything that fleetrun says. See docs/launch.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from functools import partial

from fleetrun.console.console import Console
from fleetrun.console.text import printable_json

_REPORT = b'"event": "progress"'
_HEAD = 64  # bytes of a line, in which the record says which event it is


class JsonConsole(Console):
    @property
    def listener(self) -> Callable[[bytes], None]:
        return self._heard

    def _heard(self, line: bytes) -> None:
        """Reports come without end: where nobody reads, they must not pile up."""
        if self.out.room or _REPORT not in line[:_HEAD]:
            self._write(line)

    def follower(
        self, name: str, width: int, number: int, *, alone: bool
    ) -> tuple[Callable[[bytes], None], bool]:
        return partial(self._lines, name), False

    def block(self, lines: Iterable[str], *, level: str = "INFO") -> None:
        if self.says(level):
            self._event("message", level=level, text="\n".join(lines))

    def _say(self, level: str, text: str, colour: str = "") -> None:
        if self.says(level):
            self._event("message", level=level, text=text)

    def _lines(self, name: str, data: bytes) -> None:
        for line in data.split(b"\n")[:-1]:
            shown = line.rstrip(b"\r").rpartition(b"\r")[2]  # of a progress bar its last state
            self._event("log", container=name, line=shown.decode("utf-8", "backslashreplace"))

    def _event(self, event: str, **fields: str) -> None:
        text = json.dumps({"time": round(time.time(), 3), "event": event, **fields}, ensure_ascii=False)
        self._write(text.encode("utf-8", "backslashreplace"))

    def _write(self, line: bytes) -> None:
        self.out.write(printable_json(line) + b"\n")
