"""Finds the job that a command is about, by its name, pod, script or folder, and the processes that it is
about, by role and rank.

It looks at the launches that run on this machine and at the records of launches that have ended. Shell
completion gets its job names here too.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import click

from fleetrun.aliases import Strings
from fleetrun.commands.output import remark
from fleetrun.console.text import describe_duration, format_date, printable
from fleetrun.control.client import Running, running_launches
from fleetrun.envs.settings import parsing
from fleetrun.errors import LaunchError, UsageError, similar
from fleetrun.files import modified
from fleetrun.frozen import frozen, frozen_by_name
from fleetrun.record.history import History, Known, UnreadableError, glance, names, read, records

# ---- Jobs. A word names one by its job name or its pod, by its script (`train.py`, `train`) or its folder,
# or by the beginning of a name. Without a word the job of this folder is meant, else the only one.

Job = TypeVar("Job", "EndedJob", Running)

LOG_DIR = Path("log")
"""The default of --log_dir."""

_MOST_LISTED = 20


class NoSuchProcessError(UsageError):
    """This node has no process of these roles and ranks."""


class NoJobError(LaunchError):
    """There is no such job."""

    exit_code = 1


@frozen_by_name
class EndedJob:
    """A launch that has ended. `record` is its journal, `written` when that was last written to (seconds
    since the epoch).
    """

    job: str
    pod: str
    log_dir: Path
    record: Path
    written: float | None
    script: str = ""
    cwd: str = ""


def find_running(word: str | None = None) -> Running:
    """The running job that `word` names. Raises NoJobError if there is none, UsageError if several fit.

    The launcher of the job may not answer; then `silence` is set.
    """
    there = running_launches(os.environ)
    found = _running_match(word, there)
    if found is None:
        raise _none(word, there)
    return found


def find_ended(word: str | None = None, log_dir: Path | None = None) -> EndedJob:
    """The ended launch that `word` names, among the records in `log_dir` (default: `log`).

    Of several launches of one job the newest is meant, and without a word the newest of all. Raises
    NoJobError and UsageError.
    """
    place = log_dir or LOG_DIR
    there = ended_jobs(place, {each.pod for each in running_launches(os.environ)})
    found = matching_jobs(word, there)
    if not found:
        raise NoJobError(
            f"no job {_quoted(word)}has a record in {place}" if word else f"no job has a record in {place}",
            hint=_listing(there) or "Use --log_dir to name the folder with the logs of the job.",
        )
    return found[0] if len({each.job for each in found}) == 1 or word is None else _only(word, found)


def find_any(word: str | None = None, log_dir: Path | None = None) -> EndedJob | Running:
    """The running job that `word` names, else the ended one. With `log_dir` only jobs that have their logs
    there are considered. Raises NoJobError and UsageError.
    """
    there = _running_in(log_dir)
    found = _running_match(word, there, log_dir)
    if found is not None:
        return found
    try:
        return find_ended(word, log_dir)
    except NoJobError as none:
        where = "" if log_dir else "Use --log_dir to name the folder with the logs of a job that has ended."
        near = _did_you_mean(word, [*there, *ended_jobs(log_dir or LOG_DIR, set())])
        hint = "\n".join(filter(None, (near, _listing(there), where))) or None
        raise NoJobError(f"no such job is running here, and {none.message}", hint=hint) from None


def still_running(word: str | None, log_dir: Path | None = None) -> Running | None:
    """The running job that `word` names, None if there is none. Raises UsageError if several fit."""
    return _running_match(word, _running_in(log_dir), log_dir)


def _running_match(word: str | None, there: Sequence[Running], log_dir: Path | None = None) -> Running | None:
    """If `word` is the full name of an ended job, it does not abbreviate the name of a running one. Without a
    word a job that has ended here comes before one that runs elsewhere, which is named.
    """
    found = matching_jobs(word, there)
    if word is None and log_dir is None:
        here = list(filter(started_here, found))
        found = here or ([] if records(LOG_DIR) else found)
    if not found or (word is not None and not _whole(word, found) and _has_record(word, log_dir or LOG_DIR)):
        return None
    only = _only(word, found)
    if word is None and log_dir is None and not started_here(only):
        remark(f"fleetrun: {job_title(only)} was started in {printable(only.cwd)}")
    return only


def started_here(job: Running) -> bool:
    """Whether it was started in the current folder, or has its logs there."""
    try:
        here = Path.cwd()
    except OSError:  # it was deleted
        return False
    return any(place.resolve() == here for place in (Path(job.cwd or "/"), job.log_dir.parent))


def job_title(job: Running) -> str:
    """The name of a job in messages: `default (train.py, pod abcdef)`."""
    return titled(job.job, job.script, job.pod)


def titled(job: str, script: str, pod: str) -> str:
    name = f"{printable(script_names(script)[0])}, " if script else ""
    return f"{printable(job)} ({name}pod {pod})" if job else f"pod {pod}"


def describe_end(job: Running) -> str:
    """How it ended, by its record: `: got SIGTERM, exit code 143`; empty if the record does not tell."""
    try:
        history = read(job.record)
    except UnreadableError:
        return ""
    over = history.over
    if over is None:
        return ": its launcher was killed" if history.running is False else ""
    if over.get("report"):
        place = "" if _same(job.log_dir, LOG_DIR) else f" --log_dir {shlex.quote(str(job.log_dir))}"
        return printable(f": exit code {over.get('code')}; see `fleetrun report {job.pod}{place}`")
    reason = printable(str(over.get("reason") or ""))
    return f": {f'{reason}, ' if reason else ''}exit code {over.get('code')}"


def matching_jobs(word: str | None, jobs: Sequence[Job]) -> list[Job]:
    """The jobs that `word` can name. A full name takes precedence over the beginning of one, and the name of
    a job over that of its script or folder.
    """
    if word is None:
        return list(jobs)
    _check(word)
    if os.sep in word or word in (".", ".."):
        return [each for each in jobs if each.cwd and _same(Path(each.cwd), Path(word).expanduser())]
    scripts = [each for each in jobs if word in _scripts(each) or word == Path(each.cwd or "/").name]
    begun = [each for each in jobs if any(name.startswith(word) for name in _names(each))]
    return _whole(word, jobs) or scripts or begun


def named_jobs(word: str, jobs: Sequence[Job]) -> list[Job]:
    """Those with this whole name, pod or script. Raises UsageError for an empty word."""
    _check(word)
    return [each for each in jobs if word in _names(each)]


def _names(job: EndedJob | Running) -> Strings:
    return (job.job, job.pod, *_scripts(job))


def _check(word: str) -> None:
    if not word:
        raise UsageError("JOB is empty", hint="Is a variable of the shell not set?")


def _scripts(job: EndedJob | Running) -> Strings:
    return script_names(job.script) if job.script else ()


def script_names(script: str) -> Strings:
    """`train.py` and `train` of `src/train.py`; `pkg.train` and `train` of a module."""
    name = script.rpartition("/")[2]
    return (name, name.removesuffix(".py") if name.endswith(".py") else name.rpartition(".")[2])


def _whole(word: str, jobs: Sequence[Job]) -> list[Job]:
    return [each for each in jobs if word in (each.job, each.pod)]


def _has_record(word: str, place: Path) -> bool:
    """Whether a launch with exactly this name or pod has a record in `place`."""
    return any(word in (names(path) or ()) for path in records(place))


def _running_in(log_dir: Path | None) -> list[Running]:
    there = running_launches(os.environ)
    return there if log_dir is None else [each for each in there if _same(each.log_dir, log_dir)]


def ended_jobs(place: Path, running_pods: set[str]) -> list[EndedJob]:
    """Newest first."""
    found = []
    for path in records(place):
        known = names(path)
        if known is not None and known[1] not in running_pods:
            found.append(
                EndedJob(
                    job=known[0],
                    pod=known[1],
                    log_dir=place,
                    record=path,
                    written=modified(path),
                    **_begun_as(path),
                )
            )
    return found


def _begun_as(path: Path) -> dict[str, str]:
    try:
        launch = glance(path, end=False).launch
    except UnreadableError:
        return {}
    return {name: str(launch.get(name) or "") for name in ("script", "cwd")}


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _only(word: str | None, found: Sequence[Job]) -> Job:
    found = list({_url(each) or each.pod: each for each in sorted(found, key=_node, reverse=True)}.values())
    if len(found) == 1:
        return found[0]
    what = f"{_quoted(word)}fits {len(found)} jobs" if word else f"{len(found)} jobs are running here"
    fields = (("its pod", "pod"), ("script", "script"), ("folder", "cwd"))
    differ = [name for name, field in fields if len({getattr(each, field) for each in found}) == len(found)]
    raise UsageError(f"{what}; name one by {parsing.either(tuple(differ))}", hint=_list(found))


def _url(job: EndedJob | Running) -> str:
    """The same for launches that are nodes of one job, all of them on this machine."""
    return str(job.status.get("url") or "") if isinstance(job, Running) else ""


def _node(job: EndedJob | Running) -> int:
    nodes = job.status.get("nodes") if isinstance(job, Running) else None
    return next((each["rank"] for each in nodes or () if each["this"]), 0)


def _none(word: str | None, there: Sequence[Running]) -> NoJobError:
    what, shown = f"no job {_quoted(word)}is running here", ""
    if word is None and (past := records(LOG_DIR)):
        ago = describe_duration(time.time() - (modified(past[0]) or 0.0))
        what = f"the job of this folder ended {ago} ago"
    if word is None or not there or _has_record(word, LOG_DIR):
        report = " ".join(filter(None, ("fleetrun report", word and shlex.quote(printable(word)))))
        shown = f"`{report}` shows how a job ended."
    hints = filter(None, (shown, _did_you_mean(word, there), _listing(there)))
    return NoJobError(what, hint="\n".join(hints))


def _did_you_mean(word: str | None, jobs: Sequence[EndedJob | Running]) -> str | None:
    found = similar(word, sorted({each.job for each in jobs})) if word else []
    return f"Did you mean {printable(found[0])}?" if found else None


def _quoted(word: str | None) -> str:
    return f"{printable(word)!r} " if word else ""


def _listing(there: Sequence[EndedJob | Running]) -> str | None:
    return f"Jobs:\n{_list(there)}" if there else None


def _list(jobs: Sequence[EndedJob | Running]) -> str:
    lines = [_described(each) for each in jobs[:_MOST_LISTED]]
    if len(jobs) > _MOST_LISTED:
        lines.append(f"and {len(jobs) - _MOST_LISTED} more")
    return "\n".join(lines)


def _described(job: EndedJob | Running) -> str:
    """`default (pod abcdef, since 2026-11-22 08:00:12, logs in /home/me/log)`"""
    at = job.started if isinstance(job, Running) else job.written
    stamp = "?" if at is None else format_date(at)
    word = "since" if isinstance(job, Running) else "until"
    script = f"{printable(job.script)}, " if job.script else ""
    where = printable(str(job.log_dir))
    return f"{printable(job.job) or '?'} ({script}pod {job.pod}, {word} {stamp}, logs in {where})"


# ---- Records.


def history_of(found: EndedJob | Running) -> History:
    """The record of the job, without progress events. Raises NoJobError if there is none."""
    path = found.record
    if not found.job:  # a launcher that does not answer: only its pod is known
        path = next((each for each in records(found.log_dir) if found.pod in (names(each) or ())[1:]), path)
    try:
        history = read(path)
    except UnreadableError as error:
        raise NoJobError(
            f"the record of {found.job or found.pod} cannot be read: {error}",
            hint="It is in the folder of the logs, which --log_dir names.",
        ) from None
    if history.running is None and isinstance(found, Running):
        # The disk of the record has no file locks, but the launcher answered.
        return replace(history, running=history.over is None)
    return history


# ---- Processes.


@frozen
class RemoteProcess:
    """A process of the job on another machine. `node` names it: `node 1, h2 (10.0.0.2)`."""

    node: str
    role: str
    rank: int


def remote_processes(history: History) -> list[RemoteProcess]:
    """By the last rendezvous in the record."""
    for event in reversed(history.all("node")):
        nodes, placed = event.get("nodes"), event.get("processes")
        if isinstance(nodes, list) and isinstance(placed, list):
            return [
                RemoteProcess(f"node {number}, {printable(str(title))}", role, rank)
                for number, (title, here) in enumerate(zip(nodes, placed, strict=False))
                if number != event.get("rank") and isinstance(here, dict)
                for role, text in here.items()
                for rank in sorted(parsing.rank_set(str(text)) or ())
            ]
    return []


_ROLE_NAMES = {
    "server": "ps",
    "pserver": "ps",
    "worker": "trainer",
    "heter_worker": "heter",
    "hook": "pre_hook",
}
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "": 1}
_AGO = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(s|m|min|h|d|)(?:\s+ago)?", re.ASCII)
_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d")
_CLOCK = ("%H:%M:%S", "%H:%M")
_MOST_NODES = 8  # in a message


def choose_processes(
    there: Sequence[Known],
    role: str | None,
    rank: str | None,
    away: Callable[[], Sequence[RemoteProcess]] = tuple,
    command: str = "",
) -> list[Known]:
    """The processes of a job with these roles and ranks, by default all.

    Raises UsageError if there are none. Its hint names the other machines that have such processes (`away`),
    and the `command` to type there.
    """
    if not there:
        raise UsageError(
            "the record of this job lists no processes", hint="Its logs are the files in --log_dir."
        )
    roles = _roles(role, {each.role for each in there}) if role is not None else None
    if roles is None and rank is not None:
        roles = {"trainer"}
    ranks = _ranks(rank) if rank is not None else None

    def wanted(each: Known | RemoteProcess) -> bool:
        return (roles is None or each.role in roles) and (ranks is None or each.rank in ranks)

    found = [each for each in there if wanted(each)]
    if not found:
        asked = [f"--{name} {text}" for name, text in (("role", role), ("rank", rank)) if text is not None]
        others = [each for each in away() if wanted(each)]
        hint = f"This node has {list_ranks(there)}."
        if others:
            words = (
                f"--{name} {shlex.quote(text)}" for name, text in (("role", role), ("rank", rank)) if text
            )
            hint = f"{_listed_by_node(others)}\nRun there: {command} {' '.join(words)}\n{hint}"
        raise NoSuchProcessError(f"{' '.join(asked)}: this node has no such process", hint=hint)
    return found


def list_ranks(there: Iterable[Known | RemoteProcess]) -> str:
    """`trainer 0-3, ps 0`"""
    by_role: dict[str, list[int]] = {}
    for each in there:
        by_role.setdefault(each.role, []).extend([] if each.rank is None else [each.rank])
    return ", ".join(f"{role} {parsing.written_ranks(ranks)}".strip() for role, ranks in by_role.items())


def _listed_by_node(others: Sequence[RemoteProcess]) -> str:
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
    roles = {"ps" if word in ("p", "ps") else _ROLE_NAMES.get(word, word) for word in words}
    unknown = roles - there - {"trainer", "ps", "heter", "coordinator", "pre_hook", "evaluator"}
    if unknown:
        raise UsageError(
            f"--role {text}: there is no such role", hint=f"This job has: {', '.join(sorted(there))}."
        )
    return roles


def _ranks(text: str) -> frozenset[int]:
    found = parsing.rank_set(text)
    if found is None:
        raise UsageError(f"--rank {text}: not a list of ranks, such as 0 or 0,3 or 0-2,5")
    return found


def parse_ago(text: str, option: str) -> float:
    """Seconds of `30s`, `10m`, `2h`, `1d`. Raises UsageError."""
    ago = _AGO.fullmatch(text.strip())
    if ago is None:
        raise UsageError(f"{option} {text}: use a time such as 12h or 30d")
    return float(ago[1]) * _UNITS[ago[2]]


def parse_since(text: str, now: float) -> float:
    """Seconds since the epoch of `10m` (ago), `07:15` (the last time of day) or `2026-11-22 07:15`.

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
    raise UsageError(f"--since {text}: use 30s, 10m, 2h or 1d (ago), 07:15, or '2026-11-22 07:15'")


def _parsed(text: str, form: str) -> float | None:
    try:
        return time.mktime(time.strptime(text.strip(), form))
    except (ValueError, OverflowError):
        return None


# ---- Shell completion of JOB.

_COMPLETION_TIMEOUT = 1.0  # seconds
_NAME = re.compile(r"[\w.-]+")  # as --job_id allows


def complete_running_jobs(_: click.Context, __: click.Parameter, start: str) -> list[str]:
    """Jobs that run on this machine; those that share a name by their pods."""
    there = running_launches(os.environ, _COMPLETION_TIMEOUT)
    often = Counter(each.job for each in there)
    return _offered([each.job if each.job and often[each.job] == 1 else each.pod for each in there], start)


def complete_jobs(context: click.Context, parameter: click.Parameter, start: str) -> list[str]:
    """Running jobs, then the jobs that have a record in --log_dir, newest first."""
    there = records(Path(context.params.get("log_dir") or "log"))
    ran = [known[0] for each in there if (known := names(each)) is not None]
    return _offered([*complete_running_jobs(context, parameter, start), *ran], start)


def _offered(words: list[str], start: str) -> list[str]:
    """Each name once. Names that a shell would not take literally are not job names of fleetrun."""
    return [word for word in dict.fromkeys(words) if word.startswith(start) and _NAME.fullmatch(word)]


# ---- Arguments and options that several commands have.

running_job = click.argument("job", required=False, shell_complete=complete_running_jobs)
"""JOB, of a command for running jobs."""

any_job = click.argument("job", required=False, shell_complete=complete_jobs)
"""JOB, of a command for running jobs and for jobs that have ended."""


_log_dir_option = partial(
    click.option, "--log_dir", "--log-dir", type=click.Path(path_type=Path), metavar="DIR"
)
logs_of_job = _log_dir_option(help="The folder with the logs of the job.  [default: log]")
logs_of_launches = _log_dir_option(help="The --log_dir of the launches.  [default: log]")

interval_option = partial(
    click.option, "--interval", type=float, default=1.0, show_default=True, metavar="SECONDS"
)

json_option = partial(click.option, "--json", "in_json", is_flag=True, help="Print one JSON document.")
"""The option, or with `help` one that prints something else."""
