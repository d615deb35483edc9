"""What a process wrote about its failure, in the shape of torch's error files. Reads; the runtime writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fleetrun.files import open_plain
from fleetrun.values import dataclass

_MAX_BYTES = 1 << 20
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """`message` is one line such as `ValueError: bad input`; `time` is when it was raised, seconds since the
    epoch.
    """

    message: str
    traceback: str
    time: float


def read_error(path: Path | None) -> ErrorRecord | None:
    """The record in `path`, or None when there is none or it is not one: a report must never fail over it."""
    if path is None:
        return None
    try:
        return _parse(*_read(path))
    except (OSError, *_MALFORMED):
        return None


def read_dismissed(path: Path | None) -> bool:
    """Whether a server wrote that its trainers let it go: then it may end before they do."""
    try:
        return path is not None and _read(path)[0] == {"dismissed": True}
    except (OSError, *_MALFORMED):
        return False


def _read(path: Path) -> tuple[Any, float]:
    """What is in it, and when it was written."""
    with os.fdopen(open_plain(path), "rb") as file:
        return json.loads(file.read(_MAX_BYTES)), os.fstat(file.fileno()).st_mtime


def _parse(document: Any, written: float) -> ErrorRecord:
    """torch's own timestamp has whole seconds only, too coarse to tell which rank was first: the file's time
    is better.
    """
    message = document["message"]
    if isinstance(message, str):
        return ErrorRecord(message, "", written)
    extra = message["extraInfo"]
    nanoseconds = extra.get("time_ns")
    when = int(nanoseconds) / 1e9 if nanoseconds is not None else written
    if not 0 <= when <= written + 1:
        when = written  # no moment at which this file can have been about to be written
    return ErrorRecord(str(message["message"]), str(extra["py_callstack"]), when)
