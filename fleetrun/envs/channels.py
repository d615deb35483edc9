"""Define the channels between a launcher and the processes that it starts.

The module holds formats, limits and variable names for both sides. Files and sockets are left to these sides.

| channel      | written by   | how it arrives                                                            |
|--------------|--------------|---------------------------------------------------------------------------|
| error file   | process      | JSON in the file of FLEETRUN_ERROR_FILE, when the process fails           |
| stop notice  | launcher     | JSON in the file of FLEETRUN_NOTICE, before SIGTERM                       |
| progress     | process      | JSON datagrams to the unix socket of FLEETRUN_PROGRESS                    |
| stacks       | process      | text in its log, when the launcher sends STACKS_SIGNAL                    |
| probe        | process      | JSON on the unix socket of FLEETRUN_PROBE_SOCKET, on request              |
| debugger     | both         | lines of JSON on a unix socket beside that socket: `probe/inside`         |
| imports      | process      | JSON in a file beside that socket, if FLEETRUN_ZYGOTE is `note`           |
| own modules  | process      | lines in another file there                                               |
| memory       | both         | descriptors on the unix socket of FLEETRUN_MEMORY: `pod/memory.py`        |
| zygote       | both         | JSON and descriptors on the unix socket with the descriptor FLEETRUN_ZYGOTE|

Every script that imports `trainers` loads this module. It therefore imports only a small part of the standard
library.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from fleetrun.aliases import Environ
from fleetrun.values import frozen

CONTAINER_VARIABLE = "FLEETRUN_CONTAINER"
"""The name of a process, `pod.role.rank`. All its child processes inherit the variable."""

NOTICE_VARIABLE = "FLEETRUN_NOTICE"
PROGRESS_VARIABLE = "FLEETRUN_PROGRESS"
PROBE_VARIABLE = "FLEETRUN_PROBE_SOCKET"
MEMORY_VARIABLE = "FLEETRUN_MEMORY"
ZYGOTE_VARIABLE = "FLEETRUN_ZYGOTE"
"""With `note`, the probe leaves a list of imports. With a number, this process is a zygote, and the launcher
sends its orders on this descriptor.
"""
BREAKPOINT = "waits for `fleetrun debug"
"""The start of the activity of a process that waits for a debugger."""
DEBUGGED = (BREAKPOINT, "is debugged at ")
"""Starts of the activity of a process that a debugger stops."""
IMPORTS_SUFFIX = ".imports"
"""Added to the path of PROBE_VARIABLE, it gives the path of the list of imports."""
FILES_SUFFIX = ".files"
"""In the same way, the path of the list of the user's modules: lines of modification time and path."""
TREE_VARIABLE = "FLEETRUN_TREE"
"""The copy of the working tree in which a launcher runs (`--sync`). Its processes do not get the variable."""
ERROR_FILE_VARIABLES = ("FLEETRUN_ERROR_FILE", "TORCHELASTIC_ERROR_FILE")
"""fleetrun's variable has priority over torchrun's."""


def container_id(pod: str, role: str, rank: int) -> str:
    """Return the value of CONTAINER_VARIABLE."""
    return f"{pod}.{role}.{rank}"


def inside_container(environ: Environ) -> str | None:
    """Return `pod.role.rank` if fleetrun started this process, else None."""
    return environ.get(CONTAINER_VARIABLE) or None


def offer_to_probe(name: str, ask: Callable[[], object]) -> None:
    """Let the probe, if this process has one, add the result of `ask` to its answers to the launcher.

    The result is sent as JSON under `name`. Another thread calls `ask`.
    """
    probe = sys.modules.get("fleetrun_probe")
    if probe is not None:
        probe.also(name, ask)


def take_steps(take: Callable[[int], None], last: Callable[[], object]) -> None:
    """Let the probe, if this process has one, pass the number of each step of torch's optimizers to `take`.

    The probe then stops reporting these steps itself. It answers the launcher with `last()`. The answer holds
    the number of the last step, the seconds since it ended, and its duration in seconds (None if unknown). It
    is None before the first step.
    """
    probe = sys.modules.get("fleetrun_probe")
    if probe is not None:
        probe.hand_steps(take, last)


def take_mark(take: Callable[[str], None]) -> None:
    """Let the probe, if this process has one, pass a changed value of CONTAINER_VARIABLE to `take`, once.

    The value changes in a process that a zygote forks after it has imported the caller.
    """
    probe = sys.modules.get("fleetrun_probe")
    if probe is not None:
        probe.take_mark(take)


def note_imports() -> None:
    """Let the probe, if this process has one, write the list of its imports for a zygote."""
    probe = sys.modules.get("fleetrun_probe")
    if probe is not None:
        probe.note_imports()


# ---- Error file, in torchrun's shape (torch.distributed.elastic.multiprocessing.errors.ErrorHandler), plus
# `time_ns`. The launcher orders failures by `time_ns`, because whole seconds are too coarse.

LARGEST_ERROR_FILE = 1 << 20
"""Bytes of an error file that the launcher reads at most."""

_DISMISSED = {"dismissed": True}
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@frozen
class ErrorRecord:
    """The failure that a process reports.

    `message` starts with a line such as `ValueError: bad input`. `time` is when the exception was raised, in
    seconds since the epoch. `restart_helps` is False if the next attempt is certain to fail in the same way.
    """

    message: str
    traceback: str
    time: float
    restart_helps: bool = True


_BEFORE_CAUSE = (
    # the calls that led to the exception
    r"(?m)^([ |]*+).*\(most recent call last\):\n(?:\1(?: .*)?\n)*(?=\1\S)"
    r"| 1 -{16}\n"  # in a group of exceptions
    r"|^Error Message Summary:\n-+\n"  # in a report of Paddle
)
NEXT_OF_GROUP = r"[ |]+\+-{16}(?! 1 )"
"""Matches the line after the first exception of a group."""
ASIDE = r"Exception ignored |Error in atexit|--- Logging error"
"""Matches the start of a traceback whose exception does not end the process."""
_NCCL = "Last error:"


def cause_in(text: str) -> str:
    """Return the cause of a failure in one line, from an exception's message, perhaps with its traceback.

    Messages of torch's data loader workers and spawned processes contain the traceback of another exception.
    That exception is then the cause. In a group of exceptions, the first one is the cause.
    """
    cause = re.split(_BEFORE_CAUSE, re.split(rf"\n(?:{NEXT_OF_GROUP}|{ASIDE})", text)[0])[-1]
    first, *rest = [line.strip(" |\t") for line in cause.splitlines()] or [""]
    if "NCCL error" in first and _NCCL in rest[:-1]:  # the cause is in a later line
        return f"{first.partition(':')[0]}: {rest[rest.index(_NCCL) + 1]}"
    if first.endswith(":"):
        first = f"{first} {next((line for line in rest if line.strip('=-')), '')}".rstrip(": ")
    return first


def error_file(environ: Environ) -> str:
    """Return the path of the error file that the launcher reads, or an empty string."""
    return next((environ[name] for name in ERROR_FILE_VARIABLES if environ.get(name)), "")


def write_error(message: str, traceback: str, now_ns: int, *, restart_helps: bool = True) -> str:
    """Return the text of an error file.

    The format is `{"message": {"message": ..., "extraInfo": {"py_callstack", "timestamp", "time_ns"}}}`. If a
    restart will not help, `extraInfo` also has `"restart_helps": false`.
    """
    whole = str(now_ns // 1_000_000_000)
    extra = {"py_callstack": traceback, "timestamp": whole, "time_ns": now_ns}
    if not restart_helps:
        extra["restart_helps"] = False
    return json.dumps({"message": {"message": message, "extraInfo": extra}})


def read_error(text: bytes, written: float) -> ErrorRecord | None:
    """Return the record in an error file that was last written at `written` (seconds since the epoch).

    Return None for malformed text, so that a bad error file cannot break the report. The timestamp of torch
    has whole seconds, which is too coarse to find the rank that failed first. Without `time_ns` the function
    therefore uses `written`. If another exception is the cause, the message starts with its line.
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
        words, traceback = str(message["message"]), str(extra["py_callstack"])
        cause = cause_in(traceback if re.match(r".* sub-exceptions?\)", words) else words)
        return ErrorRecord(words if words.startswith(cause) else f"{cause}\n{words}", traceback, when, helps)
    except _MALFORMED:
        return None


def write_dismissed() -> str:
    """Return the text that a server leaves in its error file after its trainers dismissed it.

    With this text, the launcher does not treat the server's exit as a failure.
    """
    return json.dumps(_DISMISSED)


def read_dismissed(text: bytes) -> bool:
    """Return True if `text` is the result of `write_dismissed`."""
    try:
        return bool(json.loads(text) == _DISMISSED)
    except _MALFORMED:
        return False


def read_finished(text: bytes, pid: int, program: str) -> bool:
    """Return True if `text` shows that the script of process `pid` ran to its end.

    A later crash, while the interpreter exits, is then not a failure. The probe writes the text
    (`probe/inside`). A child of `pid` may also have written it, if `pid` exits with the child's status, as
    `timeout` does. `program` must then still match, because an earlier program of the same command may have
    left the text.
    """
    try:
        fields = json.loads(text)
        return bool(pid == fields["finished"] or [pid, program] == fields["below"])
    except _MALFORMED:
        return False


# ---- Stop notice: the reason for a stop, and the time of the kill


def write_notice(why: str, deadline: float) -> str:
    """Return the text of a notice file. `deadline` is in seconds since the epoch."""
    return json.dumps({"why": why, "deadline": deadline})


def read_notice(text: bytes) -> tuple[str, float] | None:
    """Return `(why, deadline)`, or None if `write_notice` did not write the text."""
    try:
        notice: Any = json.loads(text)
        return str(notice["why"]), float(notice["deadline"])
    except (ValueError, KeyError, TypeError):
        return None


# ---- Limits of progress reports, for `fleetrun.envs.progress_report`

LARGEST_DATAGRAM = 8192
"""Bytes of a report. The receiver ignores longer reports."""
MOST_VALUES = 200
"""Names of values in one datagram, and names that the launcher keeps per process."""
LONGEST_NAME = 100
"""Characters of the name of a value."""
LONGEST_ACTIVITY = 120
"""Characters of the description of an activity."""
LONGEST_TABLE = 200
"""Characters of the name of a table."""
MOST_TABLES = 4096
"""Tables that the launcher keeps per server."""


# ---- Memory that outlives a process

LARGEST_MEMORY_MESSAGE = 1 << 16
"""Bytes of a request, and of an answer."""
MEMORY_AT_ONCE = 32
"""Descriptors in an answer."""


# ---- Stacks

DEBUG_SIGNAL = signal.SIGRTMIN + 13
"""On this signal, the main thread of a process stops in the debugger at its next line."""
STACKS_SIGNAL = signal.SIGRTMIN + 12
"""On this signal, a process writes the stacks of all its threads to its log. SIGUSR1 and SIGUSR2 stay free
for scripts.
"""
