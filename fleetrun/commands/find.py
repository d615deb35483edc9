"""Which job a command is about, and which of its processes: by name, pod, role and rank.

Looks at the launches that run on this machine and at the records of those that have ended. Also offers job
names to the completion of a shell.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from fleetrun.console.text import printable
from fleetrun.control.client import Running, running_launches
from fleetrun.envs.settings import parsing
from fleetrun.errors import LaunchError, UsageError
from fleetrun.record.history import History, Known, UnreadableError, names, read, records

# ---- Which job a person means: by its name, its pod, the beginning of one, or because it is the only one.
# Asks the launches that run here and looks for the records of those that ran.

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
    there = running_launches(os.environ)
    found = matching_jobs(word, there)
    if not found:
        raise _none(word, there)
    return _only(word, found)


def find_past(word: str | None = None, log_dir: Path | None = None) -> Past:
    """The launch that is meant, of those with a record in `log_dir` (`log` unless told) that run no more.

    Of several launches of one job the newest is meant, and without a word the newest of all. Raises
    NoJobError and UsageError.
    """
    place = log_dir or LOG_DIR
    there = _past(place, {each.pod for each in running_launches(os.environ)})
    found = matching_jobs(word, there)
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
    found = matching_jobs(word, there)
    if not found or (word is not None and not _whole(word, found) and _ran(word, log_dir or LOG_DIR)):
        return None
    return _only(word, found)


def job_title(job: Running) -> str:
    """For messages."""
    return f"{printable(job.job)} (pod {job.pod})" if job.job else f"pod {job.pod}"


def describe_end(job: Running) -> str:
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


def matching_jobs(word: str | None, jobs: Sequence[Job]) -> list[Job]:
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
    there = running_launches(os.environ)
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


# ---- From a job that was found to its record.


def history_of(found: Past | Running) -> History:
    """What is on record of it, without its progress. Raises NoJobError when there is nothing."""
    path = found.record if found.job else _of_pod(found.log_dir, found.pod) or found.record
    try:
        history = read(path, but=("progress",))
    except UnreadableError as error:
        raise NoJobError(
            f"the record of {found.job or found.pod} cannot be used: {error}",
            hint="It lies beside the logs: --log_dir names their folder.",
        ) from None
    if history.running is None and isinstance(found, Running):  # no locks there, but its launcher was heard
        return replace(history, running=history.over is None)
    return history


def _of_pod(log_dir: Path, pod: str) -> Path | None:
    """One whose launcher does not answer is known by its pod only."""
    return next((path for path in records(log_dir) if (names(path) or ("", ""))[1] == pod), None)


# ---- The processes of a job that are on other machines, as far as the record of this one knows of them.


@dataclass(frozen=True, slots=True)
class Away:
    """One of them. `node` is its machine: `node 1, h2 (10.0.0.2)`."""

    node: str
    role: str
    rank: int


def processes_elsewhere(history: History) -> list[Away]:
    """As the machines met last."""
    for event in reversed(history.all("node")):
        nodes, placed = event.get("nodes"), event.get("processes")
        if isinstance(nodes, list) and isinstance(placed, list):
            return [
                each
                for number, (title, here) in enumerate(zip(nodes, placed, strict=False))
                if number != event.get("rank") and isinstance(here, dict)
                for each in _processes_on(f"node {number}, {printable(str(title))}", here)
            ]
    return []


def _processes_on(node: str, here: Mapping[str, Any]) -> Iterator[Away]:
    for role, text in here.items():
        for rank in sorted(parsing.rank_set(str(text)) or ()):
            yield Away(node, role, rank)


# ---- Which processes of a job a person means, and which moment. Pure.

Chosen = Known

_WORDS = {"server": "ps", "pserver": "ps", "worker": "trainer", "heter_worker": "heter", "hook": "pre_hook"}
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "": 1}
_AGO = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(s|m|min|h|d|)(?:\s+ago)?", re.ASCII)
_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d")
_CLOCK = ("%H:%M:%S", "%H:%M")
_MOST_NODES = 8


def choose_processes(
    there: Sequence[Known],
    role: str | None,
    rank: str | None,
    away: Callable[[], Sequence[Away]] = tuple,
    command: str = "",
) -> list[Known]:
    """Of the processes of a job those with these roles and ranks; all without either. Raises UsageError when
    that is none. It says then which other machine has them, and to type `command` there.
    """
    if not there:
        raise UsageError("the record of this job names no processes", hint="Its logs are files in --log_dir.")
    roles = _roles(role, {each.role for each in there}) if role is not None else None
    if roles is None and rank is not None:
        roles = {"trainer"}
    ranks = _ranks(rank) if rank is not None else None

    def wanted(each: Known | Away) -> bool:
        return (roles is None or each.role in roles) and (ranks is None or each.rank in ranks)

    found = [each for each in there if wanted(each)]
    if not found:
        asked = [f"--{name} {text}" for name, text in (("role", role), ("rank", rank)) if text is not None]
        others = [each for each in away() if wanted(each)]
        hint = f"There are {list_ranks(there)}."
        if others:
            words = (
                f"--{name} {shlex.quote(text)}" for name, text in (("role", role), ("rank", rank)) if text
            )
            hint = f"{_where(others)}\nType there: {command} {' '.join(words)}\nHere are {list_ranks(there)}."
        raise UsageError(f"{' '.join(asked)}: there is no such process here", hint=hint)
    return found


def list_ranks(there: Iterable[Known | Away]) -> str:
    """`trainer 0-3, ps 0`"""
    by_role: dict[str, list[int]] = {}
    for each in there:
        by_role.setdefault(each.role, []).extend([] if each.rank is None else [each.rank])
    return ", ".join(f"{role} {parsing.written_ranks(ranks)}".strip() for role, ranks in by_role.items())


def _where(others: Sequence[Away]) -> str:
    """`On node 1, h2 (10.0.0.2): trainer 2-3`, a line for each machine."""
    nodes = list(dict.fromkeys(each.node for each in others))
    lines = [
        f"On {node}: {list_ranks(each for each in others if each.node == node)}"
        for node in nodes[:_MOST_NODES]
    ]
    if len(nodes) > _MOST_NODES:
        lines.append(f"and on {len(nodes) - _MOST_NODES} more")
    return "\n".join(lines)


def _roles(text: str, there: set[str]) -> set[str]:
    words = {word.strip().lower().rstrip("s") or word for word in text.split(",")}
    roles = {"ps" if word in ("p", "ps") else _WORDS.get(word, word) for word in words}
    unknown = roles - there - {"trainer", "ps", "heter", "coordinator", "pre_hook", "evaluator"}
    if unknown:
        raise UsageError(
            f"--role {text}: there is no such role", hint=f"Roles here: {', '.join(sorted(there))}."
        )
    return roles


def _ranks(text: str) -> frozenset[int]:
    found = parsing.rank_set(text)
    if found is None:
        raise UsageError(f"--rank {text}: it must be ranks, such as 0, 0,3 or 0-2,5")
    return found


def moment(text: str, now: float) -> float:
    """`10m` (ago), `07:15` (the last time it was that late), `2026-11-22 07:15`: seconds since the epoch.

    Raises UsageError.
    """
    ago = _AGO.fullmatch(text.strip())
    if ago is not None:
        return now - float(ago[1]) * _UNITS[ago[2]]
    for form in _FORMATS:
        parsed = _parsed(text, form)
        if parsed is not None:
            return parsed
    today = time.strftime("%Y-%m-%d", time.localtime(now))
    for form in _CLOCK:
        parsed = _parsed(f"{today} {text}", f"%Y-%m-%d {form}")
        if parsed is not None:
            return parsed if parsed <= now else parsed - 86400
    raise UsageError(f"--since {text}: it must be 30s, 10m, 2h or 1d (ago), or 07:15, or 2026-11-22 07:15")


def _parsed(text: str, form: str) -> float | None:
    try:
        return time.mktime(time.strptime(text.strip(), form))
    except (ValueError, OverflowError):
        return None


# ---- The names of jobs that a shell offers for JOB (Tab): of those that run, and of those that ran here.

_PATIENCE = 1.0  # seconds that Tab may take
_NAME = re.compile(r"[\w.-]+")  # that of a job, --job_id


def of_running(_: click.Context, __: click.Parameter, start: str) -> list[str]:
    """Jobs that run on this machine. Several of one name: their pods."""
    there = running_launches(os.environ, _PATIENCE)
    often = Counter(each.job for each in there)
    return _offered([each.job if each.job and often[each.job] == 1 else each.pod for each in there], start)


def of_any(context: click.Context, parameter: click.Parameter, start: str) -> list[str]:
    """Those, and the jobs that have a record in --log_dir, the newest first."""
    there = records(Path(context.params.get("log_dir") or "log"))
    ran = [known[0] for each in there if (known := names(each)) is not None]
    return _offered([*of_running(context, parameter, start), *ran], start)


def _offered(words: list[str], start: str) -> list[str]:
    """Each once; of files that are no records of ours none that a shell would not take as it is."""
    return [word for word in dict.fromkeys(words) if word.startswith(start) and _NAME.fullmatch(word)]
