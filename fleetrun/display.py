"""Show a job in the process that called `fleetrun.run`. Print lines of output, and in a notebook redraw a
progress line in place.
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

_WIDTH = 100  # columns of the progress line in a notebook
_INTERVAL = 1.0  # seconds between two states of the progress line

Status = Callable[[], Fields]
"""A function that requests the state of the job from the launcher. Raises LaunchError."""


class Display:
    """The quiet display, and the base of the others."""

    def event(self, event: Fields) -> None:
        """Show the next event of the job."""

    def progress(self, ask: Status) -> None:
        """Show the progress. Called after all received events are shown, and once a second while no event
        arrives.
        """

    def close(self) -> None:
        """Finish the display, because the job has ended."""


class Lines(Display):
    """Print the output of processes to stdout, and warnings and errors of fleetrun to stderr. With
    `labelled`, each line starts with the name of its process.
    """

    def __init__(self, labelled: bool) -> None:
        self._labelled = labelled

    def event(self, event: Fields) -> None:
        # Look up the streams at each event, because notebooks and tests replace them.
        if event["event"] == "log":
            label = f"{event['container']} | " if self._labelled and event["container"] else ""
            sys.stdout.write(f"{label}{event['line']}\n")
        elif event["event"] == "message":
            sys.stderr.write(f"fleetrun: {event['text']}\n")

    def progress(self, ask: Status) -> None:
        sys.stdout.flush()
        sys.stderr.flush()


class NotebookLines(Lines):
    """Print the same lines, below a line of progress."""

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
        except LaunchError:  # the job is about to end, or the launcher is very busy
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
    """Return the display called auto, plain or quiet. Raises UsageError for another name."""
    if name == "quiet":
        return Display()
    if name == "auto" and _in_notebook():
        return NotebookLines(labelled)
    if name in ("auto", "plain"):
        return Lines(labelled)
    raise UsageError(f"display is {name!r}; it must be auto, plain or quiet")


def _in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")
