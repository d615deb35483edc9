"""What `fleetrun.run` shows of a job in the caller's process: lines, and in a notebook one more that says how
far the job is, redrawn in its place.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from fleetrun.aliases import Fields
from fleetrun.console.status_text import StatusFields, status_fields, status_row
from fleetrun.errors import LaunchError, UsageError

_WIDTH = 100  # columns of the line in a notebook
_INTERVAL = 1.0  # seconds between two states of it

Status = Callable[[], Fields]
"""Asks the launcher for the state of the job. Raises LaunchError."""


class Display:
    """Shows nothing."""

    def event(self, event: Fields) -> None:
        """The next event of the job."""

    def progress(self, ask: Status) -> None:
        """Called when all events that have come are shown, and once a second when there is none."""

    def close(self) -> None:
        """The job has ended."""


class Lines(Display):
    """Output of processes to stdout, warnings and errors of fleetrun to stderr. With `labelled`, each line
    begins with the name of its process.
    """

    def __init__(self, labelled: bool) -> None:
        self._labelled = labelled

    def event(self, event: Fields) -> None:
        # The streams of this moment: notebooks and tests replace them.
        if event["event"] == "log":
            label = f"{event['container']} | " if self._labelled and event["container"] else ""
            sys.stdout.write(f"{label}{event['line']}\n")
        elif event["event"] == "message":
            sys.stderr.write(f"fleetrun: {event['text']}\n")

    def progress(self, ask: Status) -> None:
        sys.stdout.flush()
        sys.stderr.flush()


class NotebookLines(Lines):
    """The same, with a line of progress above what is printed."""

    def __init__(self, labelled: bool) -> None:
        super().__init__(labelled)
        self._handle: Any = None
        self._due = time.monotonic() + _INTERVAL
        self._newest = StatusFields()

    def progress(self, ask: Status) -> None:
        super().progress(ask)
        if time.monotonic() < self._due:
            return
        try:
            self._newest = status_fields(ask())
        except LaunchError:  # it is about to end, or very busy
            return
        finally:
            self._due = time.monotonic() + _INTERVAL
        self._draw(self._newest)

    def close(self) -> None:
        if self._handle is not None:
            self._draw(replace(self._newest, up=(), state="ended", activity=None))

    def _draw(self, fields: StatusFields) -> None:
        data = {"text/plain": status_row(fields, _WIDTH)}
        if self._handle is None:
            display: Any = import_module("IPython.display").display
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def display_of(name: str, *, labelled: bool) -> Display:
    """auto, plain or quiet. Raises UsageError for another name."""
    if name == "quiet":
        return Display()
    if name == "auto" and _in_notebook():
        return NotebookLines(labelled)
    if name in ("auto", "plain"):
        return Lines(labelled)
    raise UsageError(f"display is {name!r}; it must be auto, plain or quiet")


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, not a shell or a script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")
