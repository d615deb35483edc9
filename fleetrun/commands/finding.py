"""Which job a person means: by its name, its pod, the beginning of one, or because it is the only one.
Asks the launches that run here and looks for the records of those that ran.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fleetrun.console.tail import printable
from fleetrun.control.running import Running, running
from fleetrun.errors import LaunchError, UsageError
from fleetrun.record.history import UnreadableError, names, read, records

Job = TypeVar("Job", "Past", Running)

LOG_DIR = Path("log")
"""Where a launch puts its logs when nothing else is said."""

_MOST_LISTED = 20


class NoJobError(LaunchError):
    """There is no such job."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A launch that runs no more. `record` is its journal, `heard` when that was written to last (seconds
    since the epoch).
    """

    job: str
    pod: str
    log_dir: Path
    record: Path
    heard: float | None


def find_running(word: str | None = None) -> Running:
    """The running job that is meant. Raises NoJobError when there is none, UsageError when it may be several.

    It may be one that does not answer: `silence` says so.
    """
    there = running(os.environ)
    found = fitting(word, there)
    if not found:
        raise _none(word, there)
    return _only(word, found)


def find_past(word: str | None = None, log_dir: Path | None = None) -> Past:
    """The launch that is meant, of those with a record in `log_dir` (`log` unless told) that run no more.

    Of several launches of one job the newest is meant, and without a word the newest of all. Raises
    NoJobError and UsageError.
    """
    place = log_dir or LOG_DIR
    there = _past(place, {each.pod for each in running(os.environ)})
    found = fitting(word, there)
    if not found:
        raise NoJobError(
            f"no job {_quoted(word)}has a record in {place}" if word else f"no job has a record in {place}",
            hint=_among(there) or "--log_dir names the folder with the logs of a job.",
        )
    return found[0] if len({each.job for each in found}) == 1 or word is None else _only(word, found)


def find_any(word: str | None = None, log_dir: Path | None = None) -> Past | Running:
    """The same of those that run and those that ran: what runs comes first. With `log_dir` only what has its
    logs there is looked at. Raises NoJobError and UsageError.
    """
    there = _running_in(log_dir)
    found = _meant(word, there, log_dir)
    if found is not None:
        return found
    try:
        return find_past(word, log_dir)
    except NoJobError as none:
        where = None if log_dir is not None else "--log_dir names the folder with the logs of a job that ran."
        near = _near(word, [*there, *_past(log_dir or LOG_DIR, set())])
        hint = "\n".join(filter(None, (near, _among(there), where))) or None
        raise NoJobError(f"no such job runs here, and {none.message}", hint=hint) from None


def still_running(word: str | None, log_dir: Path | None = None) -> Running | None:
    """The same of those that run only; None when there is none. Raises UsageError when it may be several."""
    return _meant(word, _running_in(log_dir), log_dir)


def _meant(word: str | None, there: Sequence[Running], log_dir: Path | None) -> Running | None:
    """The whole name of one that ran is not the beginning of another's that runs."""
    found = fitting(word, there)
    if not found or (word is not None and not _whole(word, found) and _ran(word, log_dir or LOG_DIR)):
        return None
    return _only(word, found)


def named(job: Running) -> str:
    """For messages."""
    return f"{printable(job.job)} (pod {job.pod})" if job.job else f"pod {job.pod}"


def how(job: Running) -> str:
    """How it ended, as its record says: `: got SIGTERM, exit code 143`; empty when it does not."""
    try:
        history = read(job.record, but=("progress",))
    except UnreadableError:
        return ""
    over = history.over
    if over is None:
        return ": its launcher was killed" if history.running is False else ""
    if over.get("report"):
        place = "" if _same(job.log_dir, LOG_DIR) else f" --log_dir {shlex.quote(str(job.log_dir))}"
        return printable(f": exit code {over.get('code')}; `fleetrun report {job.pod}{place}` tells why")
    reason = printable(str(over.get("reason") or ""))
    return f": {f'{reason}, ' if reason else ''}exit code {over.get('code')}"


def fitting(word: str | None, jobs: Sequence[Job]) -> list[Job]:
    """Those that a word can mean: a whole name goes before the beginning of one."""
    if word is None:
        return list(jobs)
    begun = [each for each in jobs if each.job.startswith(word) or each.pod.startswith(word)]
    return _whole(word, jobs) or begun


def _whole(word: str, jobs: Sequence[Job]) -> list[Job]:
    return [each for each in jobs if word in (each.job, each.pod)]


def _ran(word: str, place: Path) -> bool:
    """Whether a launch with this very name, or pod, has a record there."""
    return any(word in (names(path) or ()) for path in records(place))


def _running_in(log_dir: Path | None) -> list[Running]:
    there = running(os.environ)
    return there if log_dir is None else [each for each in there if _same(each.log_dir, log_dir)]


def _past(place: Path, running_pods: set[str]) -> list[Past]:
    """The newest first."""
    found = []
    for path in records(place):
        known = names(path)
        if known is not None and known[1] not in running_pods:
            found.append(Past(job=known[0], pod=known[1], log_dir=place, record=path, heard=_heard(path)))
    return found


def _heard(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # just deleted
        return None


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _only(word: str | None, found: Sequence[Job]) -> Job:
    if len(found) == 1:
        return found[0]
    what = f"{_quoted(word)}fits {len(found)} jobs" if word else f"{len(found)} jobs run here"
    raise UsageError(f"{what}: say which", hint=_list(found))


def _none(word: str | None, there: Sequence[Running]) -> NoJobError:
    if word is None or not there:
        what = "no job runs here" if word is None else f"no job {_quoted(word)}runs here"
        asking = " ".join(filter(None, ("fleetrun report", word and shlex.quote(printable(word)))))
        return NoJobError(what, hint=f"`{asking}` tells how a job ended.")
    ended = f"`fleetrun report {shlex.quote(word)}` tells how it ended." if _ran(word, LOG_DIR) else None
    hint = ended or "\n".join(filter(None, (_near(word, there), _among(there))))
    return NoJobError(f"no job {_quoted(word)}runs here", hint=hint)


def _near(word: str | None, jobs: Sequence[Past | Running]) -> str | None:
    """The job whose name is almost this."""
    from difflib import get_close_matches

    found = get_close_matches(word, sorted({each.job for each in jobs}), 1, 0.7) if word else []
    return f"Did you mean {printable(found[0])}?" if found else None


def _quoted(word: str | None) -> str:
    return f"{printable(word)!r} " if word else ""


def _among(there: Sequence[Past | Running]) -> str | None:
    return f"There are:\n{_list(there)}" if there else None


def _list(jobs: Sequence[Past | Running]) -> str:
    lines = [_described(each) for each in jobs[:_MOST_LISTED]]
    if len(jobs) > _MOST_LISTED:
        lines.append(f"and {len(jobs) - _MOST_LISTED} more")
    return "\n".join(lines)


def _described(job: Past | Running) -> str:
    """`default (pod abcdef, since 2026-11-22 08:00:12, logs in /home/me/log)`"""
    moment = job.started if isinstance(job, Running) else job.heard
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment is not None else "?"
    word = "since" if isinstance(job, Running) else "until"
    return (
        f"{printable(job.job) or '?'} (pod {job.pod}, {word} {stamp}, logs in {printable(str(job.log_dir))})"
    )
