"""The failure report: which process failed first, how, when, its last words, and where to read on. One
screen. Pure.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from fleetrun.console.figures import lasted
from fleetrun.console.tail import Tail, printable
from fleetrun.console.wrapping import columns, wrapped
from fleetrun.pod.container import Ended
from fleetrun.pod.result import JobResult

_TRACEBACK_LINES = 16
_LOG_LINES = 10
_INDENT = 6
_HINTS = {
    "Address already in use": "fleetrun holds each port with a bound socket; a server must set SO_REUSEADDR.",
    "CUDA out of memory": "Fewer processes per GPU, a smaller batch, or another GPU with --gpus.",
    "No space left on device": "A disk is full; see `df -h`.",
}


def headline(ended: Ended) -> str:
    """`trainer 1 exited with code 3`: one failure in few words."""
    what = f"{ended.spec.title} {ended.exit}"
    if ended.stopped:
        what = f"{ended.spec.title} failed and did not end by itself"
    if ended.exit.ok:
        what += " before the trainers had ended"
    if ended.out_of_memory:
        what += " for lack of memory (the kernel's OOM killer)"
    return what


def one_line(ended: Ended, tail: Tail) -> str:
    """For a failure that is followed by a restart."""
    words = [headline(ended), f"after {lasted(ended.ended - ended.started)}"]
    message = error_line(ended, tail)
    return " ".join(words) + (f": {message}" if message else "")


def error_line(ended: Ended, tail: Tail) -> str:
    """The exception's own line, if there is one."""
    if ended.record is not None and ended.record.message:
        return printable(ended.record.message.splitlines()[0])
    if tail.traceback:
        return next((line for line in reversed(tail.traceback) if line and not line.startswith(" ")), "")
    return ""


def report(result: JobResult, tail: Tail, *, width: int, log_full: bool = False) -> list[str]:
    """The lines of the report for `result.cause`, whose log ends in `tail`; none is longer than `width`
    unless it is a path or a word."""
    ended = result.cause
    assert ended is not None, "a report needs a cause"
    first = f"First failure: {headline(ended)}, after {lasted(ended.ended - ended.started)}"
    facts = [
        f"pid {ended.pid}",
        f"at {_clock(ended.failed_at)}",
        *_attempts(result),
    ]
    lines = ["=" * min(width, 80), *wrapped(first, width), *wrapped(f"  {', '.join(facts)}", width)]
    lines += _last_words(ended, tail, width)
    lines += wrapped(_others(result.others), width) if result.others else []
    lines += [row for hint in _hints(ended, tail, log_full) for row in wrapped(f"Hint: {hint}", width)]
    lines += [f"Log: {_short_path(ended.spec.log)}", "=" * min(width, 80)]
    return lines


def _attempts(result: JobResult) -> list[str]:
    if not result.restarts:
        return [result.reason] if result.reason else []
    times = restarts_in_words(result.restarts)
    return [f"{times} ({result.reason})" if result.reason else times]


def restarts_in_words(number: int) -> str:
    return f"after {number} restart{'s' if number > 1 else ''}"


def _last_words(ended: Ended, tail: Tail, width: int) -> list[str]:
    traceback: Sequence[str] = tail.traceback
    if ended.record is not None and ended.record.traceback:
        traceback = [printable(line) for line in ended.record.traceback.rstrip().splitlines()]
    traceback = [
        line for line in traceback if line.strip(" ^~")
    ]  # Python's underlining takes a line of the screen each
    if not traceback:
        shown = _rows([*tail.before, *tail.after], width)[-(_LOG_LINES + 5) :]
        return ["Its last lines:", *shown] if shown else ["It printed nothing."]
    rows = _middle_out(_rows(traceback, width), _TRACEBACK_LINES)
    after = _rows([line for line in tail.after if line.strip()], width)[-_LOG_LINES // 2 :]
    return [*rows, *(["After that:", *after] if after else [])]


def _rows(lines: Sequence[str], width: int) -> list[str]:
    """Lines of a log as rows of the screen: three for each at most."""
    most = 3 * (width - _INDENT)
    cut = (line if columns(line) <= most else f"{line[: most // 2]} ..." for line in lines)
    return [f"  {row}" for line in cut for row in wrapped(line, width - 2)]


def _middle_out(lines: Sequence[str], most: int) -> list[str]:
    """The ends of something long: a traceback begins with where the script was and ends with what went
    wrong.
    """
    if len(lines) <= most:
        return list(lines)
    head = 3
    return [*lines[:head], f"  ... {len(lines) - most + 1} lines ...", *lines[-(most - head - 1) :]]


def _others(others: Iterable[Ended]) -> str:
    words = [f"{headline(other)} {_later(other)}" for other in others]
    more = f" and {len(words) - 4} more" if len(words) > 5 else ""
    return f"Then: {'; '.join(words[:4] if more else words)}{more}"


def _later(ended: Ended) -> str:
    return f"at {_clock(ended.failed_at)}"


def _hints(ended: Ended, tail: Tail, log_full: bool) -> list[str]:
    text = "\n".join([*tail.before[-_LOG_LINES:], *tail.traceback, *tail.after])
    if ended.record is not None:
        text += ended.record.message
    hints = [hint for sign, hint in _HINTS.items() if sign in text]
    if log_full:
        hints.append(f"The disk of {ended.spec.log.parent} is full: output may be lost, or be what ended it.")
    return hints


def _clock(moment: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(moment))}.{int(moment % 1 * 1000):03d}"


def _short_path(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
