"""The channels between a launcher and a process that it started: the error file, the stop notice, progress
reports, the signal for stacks, the probe and standbys. Formats, limits and variable names for both sides;
opens no file and no socket.

| channel      | written by   | how it gets there                                                         |
|--------------|--------------|---------------------------------------------------------------------------|
| error file   | process      | JSON in the file of FLEETRUN_ERROR_FILE, when the process fails           |
| stop notice  | launcher     | JSON in the file of FLEETRUN_NOTICE, before SIGTERM                       |
| progress     | process      | JSON datagrams to the unix socket of FLEETRUN_PROGRESS                    |
| stacks       | process      | text in its log, when the launcher sends STACKS_SIGNAL                    |
| probe        | process      | JSON on the unix socket of FLEETRUN_PROBE_SOCKET, when the launcher asks  |
| imports      | process      | JSON in a file beside that socket, where FLEETRUN_STANDBY is `note`       |
| memory       | both         | descriptors on the unix socket of FLEETRUN_MEMORY: `pod/memory.py`        |
| standby      | both         | JSON on the unix socket whose descriptor FLEETRUN_STANDBY begins with     |

Standard library only, and little of it: every script that imports `trainers` loads this module.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fleetrun.aliases import Document, Environ
from fleetrun.values import frozen

CONTAINER_VARIABLE = "FLEETRUN_CONTAINER"
"""The container of a process: `pod.role.rank`. Everything that the process starts inherits it."""

NOTICE_VARIABLE = "FLEETRUN_NOTICE"
PROGRESS_VARIABLE = "FLEETRUN_PROGRESS"
PROBE_VARIABLE = "FLEETRUN_PROBE_SOCKET"
MEMORY_VARIABLE = "FLEETRUN_MEMORY"
STANDBY_VARIABLE = "FLEETRUN_STANDBY"
"""`note`: the probe leaves a list of imports for a standby. `7 NAME,NAME`: this process is one, the number is
the descriptor on which it hears from the launcher, and it watches which of its imports read these variables.
"""
IMPORTS_SUFFIX = ".imports"
"""What the file with that list has after the path of PROBE_VARIABLE."""
ERROR_FILE_VARIABLES = ("FLEETRUN_ERROR_FILE", "TORCHELASTIC_ERROR_FILE")
"""fleetrun's variable wins over torchrun's."""


def container_id(pod: str, role: str, rank: int) -> str:
    """The value of CONTAINER_VARIABLE."""
    return f"{pod}.{role}.{rank}"


def inside_container(environ: Environ) -> str | None:
    """`pod.role.rank` when this process was started by fleetrun, else None."""
    return environ.get(CONTAINER_VARIABLE) or None


def tell_probe(name: str, ask: Callable[[], object]) -> None:
    """Have the probe, if this process has one, answer the launcher with what `ask` returns, too: JSON, under
    this name. Another thread calls it.
    """
    probe = sys.modules.get("fleetrun_probe")
    if probe is not None:
        probe.also(name, ask)


def take_steps(take: Callable[[int], None], last: Callable[[], object]) -> None:
    """Have the probe, if this process has one, hand the number of each step of torch's optimizers to `take`
    instead of reporting it, and answer the launcher with `last`: the number of the last step, how many
    seconds ago it ended, and how many it took (None: not known); None if there was none.
    """
    probe = sys.modules.get("fleetrun_probe")
    if probe is not None:
        probe.hand_steps(take, last)


def take_mark(take: Callable[[str], None]) -> None:
    """Have the probe, if this process has one, hand the value of CONTAINER_VARIABLE to `take` if that changes
    once: in a standby, which may have imported this caller before its place in the job was known.
    """
    probe = sys.modules.get("fleetrun_probe")
    if probe is not None:
        probe.take_mark(take)


def note_imports() -> None:
    """Have the probe, if this process has one, leave the list of its imports for a standby."""
    probe = sys.modules.get("fleetrun_probe")
    if probe is not None:
        probe.note_imports()


# ---- Error file, in torchrun's shape (torch.distributed.elastic.multiprocessing.errors.ErrorHandler), and
# with `time_ns`: the launcher orders failures by it, and whole seconds are too coarse for that.

LARGEST_ERROR_FILE = 1 << 20
"""Bytes that the launcher reads."""

_DISMISSED = {"dismissed": True}
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@frozen
class ErrorRecord:
    """The first line of `message` is such as `ValueError: bad input`; `time` is when it was raised, seconds
    since the epoch. `restart_helps` is False when the process knows that its next attempt would fail in the
    same way.
    """

    message: str
    traceback: str
    time: float
    restart_helps: bool = True


_BEFORE_CAUSE = (
    r"(?m)^([ |]*+).*\(most recent call last\):\n(?:\1(?: .*)?\n)*(?=\1\S)"  # the calls that led to it
    r"| 1 -{16}\n"  # in a group of exceptions
    r"|^Error Message Summary:\n-+\n"  # in a report of Paddle
)
NEXT_OF_GROUP = r"[ |]+\+-{16}(?! 1 )"
"""The line after the first exception of a group."""
ASIDE = r"Exception ignored |Error in atexit|--- Logging error"
"""What comes before the traceback of an exception that ends no process."""
_NCCL = "Last error:"


def cause_in(text: str) -> str:
    """Return in one line what went wrong, from an exception's message, perhaps after its traceback.

    If the message has the traceback of another exception, as the messages of torch's data loader workers and
    spawned processes have, then that exception is the cause. Of a group it is the first one.
    """
    cause = re.split(_BEFORE_CAUSE, re.split(rf"\n(?:{NEXT_OF_GROUP}|{ASIDE})", text)[0])[-1]
    first, *rest = [line.strip(" |\t") for line in cause.splitlines()] or [""]
    if "NCCL error" in first and _NCCL in rest[:-1]:  # the first line has no cause
        return f"{first.partition(':')[0]}: {rest[rest.index(_NCCL) + 1]}"
    if first.endswith(":"):
        first = f"{first} {next((line for line in rest if line.strip('=-')), '')}".rstrip(": ")
    return first


def error_file(environ: Environ) -> str:
    """The file that the launcher reads, or an empty string."""
    return next((environ[name] for name in ERROR_FILE_VARIABLES if environ.get(name)), "")


def write_error(message: str, traceback: str, now_ns: int, *, restart_helps: bool = True) -> str:
    """The text of an error file: `{"message": {"message": ..., "extraInfo": {"py_callstack", "timestamp",
    "time_ns"}}}`. If a restart will not help, `extraInfo` has `"restart_helps": false` too.
    """
    whole = str(now_ns // 1_000_000_000)
    extra: Document = {"py_callstack": traceback, "timestamp": whole, "time_ns": now_ns}
    if not restart_helps:
        extra["restart_helps"] = False
    return json.dumps({"message": {"message": message, "extraInfo": extra}})


def read_error(text: bytes, written: float) -> ErrorRecord | None:
    """The record in an error file that was last written at `written` (seconds since the epoch); None for
    anything malformed: a report must not fail because of it.

    torch's own timestamp has whole seconds, too coarse to tell which rank failed first: without `time_ns`
    the time of the file counts. If another exception is the cause, the message begins with that one.
    """
    try:
        message = json.loads(text)["message"]
        if isinstance(message, str):
            return ErrorRecord(message, "", written)
        extra = message["extraInfo"]
        nanoseconds = extra.get("time_ns")
        when = int(nanoseconds) / 1e9 if nanoseconds is not None else written
        if not 0 <= when <= written + 1:
            when = written  # the file cannot have been written at that time
        helps = extra.get("restart_helps") is not False
        said, traceback = str(message["message"]), str(extra["py_callstack"])
        cause = cause_in(traceback if re.match(r".* sub-exceptions?\)", said) else said)
        return ErrorRecord(said if said.startswith(cause) else f"{cause}\n{said}", traceback, when, helps)
    except _MALFORMED:
        return None


def write_dismissed() -> str:
    """The text that a server leaves in its error file when its trainers have dismissed it: the launcher must
    not take its exit for a failure.
    """
    return json.dumps(_DISMISSED)


def read_dismissed(text: bytes) -> bool:
    """Whether this is what `write_dismissed` returns."""
    return _is(text, _DISMISSED)


def read_finished(text: bytes, pid: int, program: str) -> bool:
    """Whether this is what the process `pid` leaves in its error file when its script has run to its end: a
    crash after that, in the exit of the interpreter, is not a failure. The probe writes it (`probe/inside`).
    Or a child of `pid` left it, whose end that process, the same `program` still, has made its own, as
    `timeout` does. Another program of the same command, run before, may have left it too.
    """
    try:
        said = json.loads(text)
        return bool(pid == said["finished"] or [pid, program] == said["below"])
    except _MALFORMED:
        return False


def _is(text: bytes, what: Mapping[str, object]) -> bool:
    try:
        return bool(json.loads(text) == what)
    except _MALFORMED:
        return False


# ---- Stop notice: why a process is asked to end, and when it will be killed.


def write_notice(why: str, deadline: float) -> str:
    """The text of a notice file; `deadline` in seconds since the epoch."""
    return json.dumps({"why": why, "deadline": deadline})


def read_notice(text: bytes) -> tuple[str, float] | None:
    """`(why, deadline)`; None for what `write_notice` has not made."""
    try:
        notice: Any = json.loads(text)
        return str(notice["why"]), float(notice["deadline"])
    except (ValueError, KeyError, TypeError):
        return None


# ---- Limits of progress reports; `fleetrun.envs.progress_report` writes and reads them

LARGEST_DATAGRAM = 8192
"""Bytes of a report; the receiver ignores a longer one."""
MOST_VALUES = 200
"""Names of values in one datagram, and of those that are kept of one process."""
LONGEST_NAME = 100
"""Characters of the name of a value."""
LONGEST_ACTIVITY = 120
"""Characters of the description of an activity."""
LONGEST_TABLE = 200
"""Characters of the name of a table."""
MOST_TABLES = 4096
"""Tables that are kept of one server."""


# ---- Memory that outlives a process

LARGEST_MEMORY_MESSAGE = 1 << 16
"""Bytes of a request and of an answer."""
MEMORY_AT_ONCE = 32
"""Descriptors in an answer."""


# ---- Stacks

STACKS_SIGNAL = signal.SIGRTMIN + 12
"""At this signal a process writes the stacks of all its threads to its log. SIGUSR1 and SIGUSR2 are left to
the scripts.
"""
