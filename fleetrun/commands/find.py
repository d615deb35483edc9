"""Find the job that a command is about, by its name, run ID, script or directory. Find its processes by role
and rank.

The search covers the runs on this node and the event logs of ended runs. Shell completion takes its job names
from here too.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from datetime import time as clock_time
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

# ---- Jobs. A word matches a job by its name or run ID, by its script (`train.py`, `train`) or directory, or
# by the start of a name. Without a word, the job of this directory is used, else the only job.

Job = TypeVar("Job", "EndedJob", Running)

LOG_DIR = Path("log")
"""Default of --log_dir."""

_MOST_LISTED = 20


class NoSuchProcessError(UsageError):
    """This node has no process with these roles and ranks."""


class NoJobError(LaunchError):
    """The job does not exist."""

    exit_code = 1


@frozen_by_name
class EndedJob:
    """A run that has ended."""

    job: str
    pod: str
    log_dir: Path
    record: Path
    """Path of the event log."""
    written: float | None
    """Time of the last write to the event log, in seconds since the epoch."""
    script: str = ""
    cwd: str = ""


def find_running(word: str | None = None) -> Running:
    """Return the running job that `word` matches. Raises NoJobError if no job matches, UsageError if several
    do.

    If the launcher of the job does not answer, `silence` is set.
    """
    there = running_launches(os.environ)
    found = _running_match(word, there)
    if found is None:
        raise _none(word, there)
    return found


def find_ended(word: str | None = None, log_dir: Path | None = None) -> EndedJob:
    """Return the ended run that `word` matches, from the event logs in `log_dir` (default: `log`).

    If one job has several runs, the newest run is returned. Without a word, the newest run of all jobs is
    returned. Raises NoJobError and UsageError.
    """
    place = log_dir or LOG_DIR
    there = ended_jobs(place, {each.pod for each in running_launches(os.environ)})
    found = matching_jobs(word, there)
    if not found:
        raise NoJobError(
            f"no job {_quoted(word)}has an event log in {place}",
            hint=_listing(there) or "Use --log_dir to name the directory with the logs of the job.",
        )
    return found[0] if len({each.job for each in found}) == 1 or word is None else _only(word, found)


def find_any(word: str | None = None, log_dir: Path | None = None) -> EndedJob | Running:
    """Return the running job that `word` matches, else the ended job. `log_dir` limits the search to jobs
    whose logs are there. Raises NoJobError and UsageError.
    """
    there = _running_in(log_dir)
    found = _running_match(word, there, log_dir)
    if found is not None:
        return found
    try:
        return find_ended(word, log_dir)
    except NoJobError as none:
        where = (
            "" if log_dir else "Use --log_dir to name the directory with the logs of a job that has ended."
        )
        near = _did_you_mean(word, [*there, *ended_jobs(log_dir or LOG_DIR, set())])
        hint = "\n".join(filter(None, (near, _listing(there), where))) or None
        raise NoJobError(f"no such job is running here, and {none.message}", hint=hint) from None


def still_running(word: str | None, log_dir: Path | None) -> Running | None:
    """Return the running job that `word` matches, else None. Raises UsageError if several jobs match."""
    return _running_match(word, _running_in(log_dir), log_dir)


def _running_match(word: str | None, there: Sequence[Running], log_dir: Path | None = None) -> Running | None:
    """Return the running job that `word` matches, else None.

    The full name of an ended job takes precedence over a running job whose name starts with it. Without a
    word, a job that has ended here takes precedence over a job that runs elsewhere. If a job from elsewhere
    is chosen, a remark names it.
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
    """Return True if the job was started in the current directory, or has its logs there."""
    try:
        here = Path.cwd()
    except OSError:  # the directory was deleted
        return False
    return any(place.resolve() == here for place in (Path(job.cwd or "/"), job.log_dir.parent))


def job_title(job: Running) -> str:
    """Return the name of a job for messages, such as `default (train.py, pod abcdef)`."""
    return titled(job.job, job.script, job.pod)


def titled(job: str, script: str, pod: str) -> str:
    """Return the name of a job for messages, from its name, script and run ID."""
    name = f"{printable(script_names(script)[0])}, " if script else ""
    return f"{printable(job)} ({name}pod {pod})" if job else f"pod {pod}"


def describe_end(job: Running) -> str:
    """Describe how the job ended, such as `: got SIGTERM, exit code 143`.

    Return "" if the event log does not show it.
    """
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
    """Return the jobs that `word` matches. A full name takes precedence over the start of a name, and the
    name of a job over the name of its script or directory.
    """
    if word is None:
        return list(jobs)
    _check(word)
    if os.sep in word or word in (".", ".."):
        return [each for each in jobs if each.cwd and _same(Path(each.cwd), Path(word).expanduser())]
    scripts = [each for each in jobs if word in _scripts(each) or word == Path(each.cwd or "/").name]
    prefixed = [each for each in jobs if any(name.startswith(word) for name in _names(each))]
    return _whole(word, jobs) or scripts or prefixed


def named_jobs(word: str, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with this full name, run ID or script. Raises UsageError for an empty word."""
    _check(word)
    return [each for each in jobs if word in _names(each)]


def _names(job: EndedJob | Running) -> Strings:
    return (job.job, job.pod, *_scripts(job))


def _check(word: str) -> None:
    if not word:
        raise UsageError("JOB is empty", hint="Check that the shell variable behind it is set.")


def _scripts(job: EndedJob | Running) -> Strings:
    return script_names(job.script) if job.script else ()


def script_names(script: str) -> Strings:
    """Return the names of a script: `train.py` and `train` for `src/train.py`, `pkg.train` and `train` for a
    module.
    """
    name = script.rpartition("/")[2]
    return (name, name.removesuffix(".py") if name.endswith(".py") else name.rpartition(".")[2])


def _whole(word: str, jobs: Sequence[Job]) -> list[Job]:
    return [each for each in jobs if word in (each.job, each.pod)]


def _has_record(word: str, place: Path) -> bool:
    """Return True if a run with exactly this name or run ID has an event log in `place`."""
    return any(word in (names(path) or ()) for path in records(place))


def _running_in(log_dir: Path | None) -> list[Running]:
    there = running_launches(os.environ)
    return there if log_dir is None else [each for each in there if _same(each.log_dir, log_dir)]


def ended_jobs(place: Path, running_pods: set[str]) -> list[EndedJob]:
    """Return the ended jobs, newest first."""
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
                    **_started_as(path),
                )
            )
    return found


def _started_as(path: Path) -> dict[str, str]:
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
    fields = (("its pod", "pod"), ("script", "script"), ("directory", "cwd"))
    differ = [name for name, field in fields if len({getattr(each, field) for each in found}) == len(found)]
    raise UsageError(f"{what}; name one by {parsing.either(tuple(differ))}", hint=_list(found))


def _url(job: EndedJob | Running) -> str:
    """Return the URL of the job. It is the same for all launchers on this node that belong to one job."""
    return str(job.status.get("url") or "") if isinstance(job, Running) else ""


def _node(job: EndedJob | Running) -> int:
    nodes = job.status.get("nodes") if isinstance(job, Running) else None
    return next((each["rank"] for each in nodes or () if each["this"]), 0)


def _none(word: str | None, there: Sequence[Running]) -> NoJobError:
    what, shown = f"no job {_quoted(word)}is running here", ""
    if word is None and (past := records(LOG_DIR)):
        ago = describe_duration(time.time() - (modified(past[0]) or 0.0))
        what = f"the job of this directory ended {ago} ago"
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
    """Describe a job, as in `default (pod abcdef, since 2026-11-22 08:00:12, logs in /home/me/log)`."""
    at = job.started if isinstance(job, Running) else job.written
    stamp = "?" if at is None else format_date(at)
    word = "since" if isinstance(job, Running) else "until"
    script = f"{printable(job.script)}, " if job.script else ""
    where = printable(str(job.log_dir))
    return f"{printable(job.job) or '?'} ({script}pod {job.pod}, {word} {stamp}, logs in {where})"


# ---- Event logs.


def history_of(found: EndedJob | Running) -> History:
    """Read the event log of the job, without progress events. Raises NoJobError if it does not exist."""
    path = found.record
    if not found.job:  # the launcher does not answer, so only its run ID is available
        path = next((each for each in records(found.log_dir) if found.pod in (names(each) or ())[1:]), path)
    try:
        history = read(path)
    except UnreadableError as error:
        raise NoJobError(
            f"the event log of {found.job or found.pod} cannot be read: {error}",
            hint="The event log is in the directory of the logs, which --log_dir names.",
        ) from None
    if history.running is None and isinstance(found, Running):
        # The disk of the event log has no file locks, but the launcher answered.
        return replace(history, running=history.over is None)
    return history


# ---- Processes.


@frozen
class RemoteProcess:
    """A process of the job on another node. `node` is a title such as `node 1, h2 (10.0.0.2)`."""

    node: str
    role: str
    rank: int


def remote_processes(history: History) -> list[RemoteProcess]:
    """List the processes on other nodes, from the last rendezvous in the event log."""
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
_MOST_NODES = 8  # in a message


def choose_processes(
    there: Sequence[Known],
    role: str | None,
    rank: str | None,
    away: Callable[[], Sequence[RemoteProcess]] = tuple,
    command: str = "",
) -> list[Known]:
    """Return the processes of a job with these roles and ranks, by default all.

    Raises UsageError if no process matches. Its hint names the other nodes that have such processes (`away`),
    and the `command` to run there.
    """
    if not there:
        raise UsageError(
            "the event log of this job lists no processes", hint="Its logs are the files in --log_dir."
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
    """Write the ranks by role, such as `trainer 0-3, ps 0`."""
    by_role: dict[str, list[int]] = {}
    for each in there:
        by_role.setdefault(each.role, []).extend([] if each.rank is None else [each.rank])
    return ", ".join(f"{role} {parsing.written_ranks(ranks)}".strip() for role, ranks in by_role.items())


def _listed_by_node(others: Sequence[RemoteProcess]) -> str:
    """List the processes of each node on one line, such as `On node 1, h2 (10.0.0.2): trainer 2-3`."""
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
            f"--role {text}: this job has no such role", hint=f"This job has: {', '.join(sorted(there))}."
        )
    return roles


def _ranks(text: str) -> frozenset[int]:
    found = parsing.rank_set(text)
    if found is None:
        raise UsageError(f"--rank {text}: not a list of ranks, such as 0 or 0,3 or 0-2,5")
    return found


def parse_since(text: str, now: float) -> float:
    """Parse `10m` (ago), `07:15` (the last time of day) or `2026-11-22 07:15` into seconds since the epoch.

    Raises UsageError.
    """
    text = text.strip()
    with suppress(parsing.InvalidValue):
        return now - parsing.seconds(text.removesuffix("ago").rstrip())
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    with suppress(ValueError):
        clock = clock_time.fromisoformat(text if text[1:2] != ":" else f"0{text}")
        moment = datetime.combine(datetime.fromtimestamp(now), clock).timestamp()
        return moment if moment <= now else moment - 86400
    raise UsageError(f"--since {text}: use 30s, 10m, 2h or 1d (ago), 07:15, or '2026-11-22 07:15'")


# ---- Shell completion of JOB.

_COMPLETION_TIMEOUT = 1.0  # seconds
_NAME = re.compile(r"[\w.-]+")  # as --job_id allows


def complete_running_jobs(_: click.Context, __: click.Parameter, start: str) -> list[str]:
    """Complete the jobs that run on this node. Jobs that share a name are listed by their run IDs."""
    there = running_launches(os.environ, _COMPLETION_TIMEOUT)
    often = Counter(each.job for each in there)
    return _offered([each.job if each.job and often[each.job] == 1 else each.pod for each in there], start)


def complete_jobs(context: click.Context, parameter: click.Parameter, start: str) -> list[str]:
    """Complete running jobs, then the jobs that have an event log in --log_dir, newest first."""
    there = records(Path(context.params.get("log_dir") or "log"))
    ran = [known[0] for each in there if (known := names(each)) is not None]
    return _offered([*complete_running_jobs(context, parameter, start), *ran], start)


def _offered(words: list[str], start: str) -> list[str]:
    """List each name once. Drop names that a shell would not take literally, because fleetrun does not accept
    them as job names.
    """
    return [word for word in dict.fromkeys(words) if word.startswith(start) and _NAME.fullmatch(word)]


# ---- Arguments and options that several commands have.

running_job = click.argument("job", required=False, shell_complete=complete_running_jobs)
"""The JOB argument of a command for running jobs."""

any_job = click.argument("job", required=False, shell_complete=complete_jobs)
"""The JOB argument of a command for running and ended jobs."""


_log_dir_option = partial(
    click.option, "--log_dir", "--log-dir", type=click.Path(path_type=Path), metavar="DIR"
)
logs_of_job = _log_dir_option(help="Directory with the logs of the job.  [default: log]")
logs_of_launches = _log_dir_option(help="Directory with the logs of the jobs.  [default: log]")

interval_option = partial(
    click.option, "--interval", type=float, default=1.0, show_default=True, metavar="SECONDS"
)

json_option = partial(click.option, "--json", "in_json", is_flag=True, help="Print one JSON document.")
"""The --json option. `help` replaces its help text."""
