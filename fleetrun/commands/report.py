"""The `fleetrun report` command shows how a job ended and why, from its event log.

It prints the failure report and the events that led to the failure.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click

from fleetrun.aliases import Document
from fleetrun.commands.everywhere import (
    MOST_OF_RECORD,
    Nodes,
    node_options,
    nodes_at,
    nodes_of,
    read_where,
)
from fleetrun.commands.find import any_job, find_any, history_of, json_option, logs_of_job, titled
from fleetrun.commands.output import picked, print_json, write, write_lines
from fleetrun.console.text import describe_duration, format_date, printable, wrapped
from fleetrun.envs.settings.parsing import byte_size, plural, some
from fleetrun.errors import UsageError
from fleetrun.pod.events import HUNG
from fleetrun.record.goodput import Goodput, Kind, goodput_fields, read_fields, sentence, share
from fleetrun.record.history import (
    History,
    UnreadableError,
    events_of,
    names,
    number,
    read,
    records,
    was_stopped,
)
from fleetrun.record.journal import Event

_MOST_EVENTS = 40


def summary(history: History, now: float) -> list[str]:
    """Return the outcome, the events, and the failure report as it was printed.

    Text from the event log is not sanitized. The caller does that before showing it.
    """
    lines = [*_head(history, now), ""]
    exits = {_attempt(event): event for event in history.all("exited")}
    failed = {_attempt(event) for event in history.all("failed")}
    events = [  # failures, restarts, hangs, and the reason of a stop
        f"  {format_date(event['time'])}  {text}"
        for event in history.events
        if (text := _event_text(event, exits.get(_attempt(event), {}), _attempt(event) in failed))
    ]
    if len(events) > _MOST_EVENTS:
        left = len(events) - _MOST_EVENTS
        half = _MOST_EVENTS // 2
        events = [*events[:half], f"  ... {left} more ...", *events[-half:]]
    lines += [*events, ""] if events else []
    over = history.over
    report = over.get("report") if over is not None else None
    if isinstance(report, list):
        lines += [str(each) for each in report]
    if history.damaged:
        lines.append(f"Damaged lines of {history.path} that were skipped: {history.damaged}")
    return lines if lines[-1] else lines[:-1]


def outcome(history: History) -> str:
    """Describe the end of the job in a few words."""
    over = history.over
    if over is None:
        if history.running:
            return "running"
        if history.running is None:
            return "running, or ended without an exit code"
        return "ended without an exit code: its launcher was killed, or the node went down"
    code = over.get("code")
    if code == 0:
        return "completed"
    reason = str(over.get("reason") or "")
    if was_stopped(over):
        return f"stopped, {reason}, exit code {code}"
    return f"failed with exit code {code}{f', {reason}' if reason else ''}"


def as_json(history: History) -> Document:
    """Return the summary as a JSON document."""
    over = history.over or {}
    launch = history.launch
    return {
        "job": history.job,
        "pod": history.pod,
        "running": history.running,
        "outcome": outcome(history),
        **picked(over, "code", "reason", "restarts"),
        "began": history.began,
        "ended": history.ended,
        **picked(launch, "host", "cwd", "argv"),
        "record": str(history.path),
        "logs": {each.name: str(each.log) for each in history.containers},
        "verdict": _verdict(history),
        "goodput": goodput_fields(goodput_of(history, time.time())),
        "report": over.get("report") or [],
        "damaged": history.damaged,
    }


def _verdict(history: History) -> Document | None:
    """Return the last diagnosis, with the ranks that the others waited for."""
    found = history.last("verdict")
    if found is None:
        return None
    return picked(found, "time", "kind", "sentence", "ranks", "stack", "call")


def goodput_of(history: History, now: float) -> dict[Kind, float]:
    """Return the goodput that the launcher counted.

    While the job runs, or if its launcher was killed, count it from all events.
    """
    if history.over is not None and "goodput" in history.over:
        return read_fields(history.over["goodput"])
    return _recounted(history).seconds(now if history.running else history.ended)


def all_launches(histories: Sequence[History], now: float) -> list[str]:
    """Describe the runs of one job, oldest first: a line for each run, and the use of their total time.

    Steps that an earlier run has made count as repeated, unless the earlier run completed.
    """
    lines, whole = [], dict.fromkeys(Kind, 0.0)
    best: int | None = None
    between, until = 0.0, math.inf
    for history in histories:
        found = _recounted(history, best)
        best = None if history.over is not None and history.over.get("code") == 0 else found.best
        seconds = found.seconds(now if history.running else history.ended)
        whole = {kind: whole[kind] + seconds.get(kind, 0.0) for kind in Kind}
        began, ended = history.began or 0.0, now if history.running else history.ended or 0.0
        between += max(0.0, began - until)
        until = ended
        part = share(seconds)
        goodput = "" if part is None else f", goodput {100 * part:.1f} %"
        duration = describe_duration(ended - began)
        lines.append(f"  {format_date(began)}  {duration}, pod {history.pod}: {outcome(history)}{goodput}")
    goodput = sentence(whole, describe_duration)
    count = plural(len(histories), "launch")
    pauses = f", and {describe_duration(between)} between them" if between >= 1 else ""
    return [
        f"Job {histories[0].job}: {count}, {describe_duration(sum(whole.values()))}{pauses}",
        *([f"  goodput {goodput}"] if goodput else []),
        "",
        *lines,
    ]


def _recounted(history: History, best: int | None = None) -> Goodput:
    """Count the goodput from all events. `best` is the last step of the earlier runs."""
    found = Goodput(best)
    with suppress(UnreadableError):
        for event in events_of(history.path):
            found.take(event)
    return found


def _head(history: History, now: float) -> list[str]:
    launch = history.launch
    began, ended = history.began, history.ended
    title = titled(history.job, str(launch.get("script") or ""), history.pod)
    lines = [f"Job {title}: {outcome(history)}"]
    if began is not None:
        until = ended if ended is not None else now
        word = "ended" if history.over is not None else "last event" if ended is not None else "now"
        reached = (history.over or {}).get("reached") or describe_duration(until - began)
        lines.append(f"  started {format_date(began)}, {word} {format_date(until)}, {reached}")
    argv = launch.get("argv")
    if isinstance(argv, list):
        import shlex

        lines.append(f"  command: fleetrun {shlex.join(map(str, argv))}")
        lines.append(f"  on {launch.get('host')} in {launch.get('cwd')}")
    lines.append(f"  record: {history.path}")
    if goodput := sentence(goodput_of(history, now), describe_duration):
        lines.append(f"  goodput {goodput}")
    return lines


def _attempt(event: Event) -> tuple[str, str]:
    """Return the process and the attempt of the event."""
    return str(event.get("container")), str(event.get("attempt"))


def _event_text(event: Event, end: Event, failed: bool) -> str:
    """Describe an event.

    `end` is the `exited` event of the same attempt. `failed`: the attempt also has a `failed` event.
    """
    match event["event"]:
        case "failed":
            return f"{_exit_text(end or event)}; {_consequence(event)}"
        case "exited" if event.get("code") and event.get("asked") is None and not failed:
            return _exit_text(event)
        case "hung":
            silent = describe_duration(number(event.get("silent_for")) or 0.0)
            names = _joined(event.get("containers"))
            reason, hung, rest = str(event.get("reason") or "").partition(HUNG)  # the reason repeats the hang
            consequence = _consequence({**event, "reason": rest.removeprefix("; ") if hung else reason})
            return f"no activity for {silent}: {names}; {consequence}"
        case "restart_asked":
            return f"restart by {event.get('by')}: {_joined(event.get('containers'))}"
        case "restarting":
            return f"restarted: {_joined(event.get('containers'))}"
        case "ending":
            return str(event.get("reason"))
        case "paused":
            return "waiting for a change of the script (--watch)"
        case "node":
            return str(event.get("text"))
        case "lost":
            return f"{event.get('events')} events could not be written, perhaps because the disk was full"
    return ""


def _exit_text(event: Event) -> str:
    """Describe an exit, such as `trainer.0 exited with code 1: ValueError: bad input`."""
    error = str(event.get("error") or "").splitlines()[:1]
    exit = event.get("how") or "failed"
    memory = " for lack of memory" if event.get("out_of_memory") else ""
    peak = number(event.get("peak_memory")) if event.get("signal") == signal.SIGKILL else None
    used = f" (peak memory {byte_size(peak)})" if peak is not None else ""
    return f"{event.get('container')} {exit}{memory}{used}{''.join(f': {line}' for line in error)}"


def _consequence(event: Event) -> str:
    if event.get("restart"):
        count = f" {event['number']} of {event.get('limit')}" if event.get("number") else ""
        return f"restart{count}"
    return str(event.get("reason") or "no restart")


def _joined(names: object) -> str:
    return some([str(each) for each in names], 8) if isinstance(names, list) else "?"


_HELP = """Show how JOB ended, and why: the failure report as it was printed, and the failures, restarts and
hangs before it, from the event log log/JOB.POD.events.jsonl of this node.

JOB is a job's name, run ID (pod), script or directory. The default is the job that runs here, or else the
newest job in --log_dir. The command shows the newest run of the job, or with --all every run and how it spent
its time.

If a running job on several nodes has a token, the report includes the other nodes. --node chooses one node.
--job works from a host outside of the job.

\b
Examples:
  fleetrun report
  fleetrun report night --log_dir /data/log
  fleetrun report --json | jq .code
  fleetrun report night --all
  fleetrun report --job h1:6768/night --token_file secret

\b
Exit codes:
  0    the report is printed, even if the job failed
  1    no such job exists, or a node or the store of the job does not answer
  2    an option is wrong, or several jobs match JOB
"""


def _print(lines: Iterable[str]) -> None:
    """Print lines. On a terminal, they are wrapped to its width."""
    lines = map(printable, lines)
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        lines = (piece for line in lines for piece in (wrapped(line, width) if line else [line]))
    write_lines(lines)


def _launches_of(history: History) -> list[History]:
    """Return the runs of the same job that have their event logs in the same directory, oldest first."""
    found = []
    for path in records(history.path.parent):
        if (names(path) or ("", ""))[0] == history.job:
            with suppress(UnreadableError):
                found.append(read(path))
    return sorted(found, key=lambda each: each.began or 0.0)


@click.command(help=_HELP, context_settings={"max_content_width": 100})
@json_option()
@logs_of_job
@click.option("--all", "all_wanted", is_flag=True, help="Show all runs of the job, and their goodput.")
@node_options
@click.option("--record", is_flag=True, hidden=True)
@any_job
def command(
    job: str | None,
    in_json: bool,
    log_dir: Path | None,
    all_wanted: bool,
    record: bool,
    **options: object,
) -> int:
    where = read_where(options, {"JOB": job, "--log_dir": log_dir, "--all": all_wanted or None})
    if all_wanted and in_json:
        raise UsageError("--all and --json exclude each other; pass only one of them")
    if where.url is not None:
        return _show_others(nodes_at(where), None, in_json)
    found = find_any(job, log_dir)
    history = history_of(found)
    if record:
        _write_record(history.path)
        return 0
    nodes = nodes_of(found, where, secret=True) if not all_wanted else None
    own = where.includes_own(found)
    if nodes is not None:
        return _show_others(nodes, history if own else None, in_json)
    _show(history, in_json=in_json, all_wanted=all_wanted)
    return 0


def _write_record(path: Path) -> None:
    """Write the name of the event log and its contents.

    A long event log is reduced to its start and end, in whole lines.
    """
    out = sys.stdout.buffer
    out.write(path.name.encode(errors="surrogateescape") + b"\n")
    with path.open("rb") as file:
        out.writelines(iter(lambda: file.readline(_BEGINNING) if file.tell() < _BEGINNING else b"", b""))
        size = os.fstat(file.fileno()).st_size
        if size - file.tell() > MOST_OF_RECORD - _BEGINNING:
            file.seek(size - MOST_OF_RECORD + _BEGINNING)
            file.readline()
        shutil.copyfileobj(file, out)
    out.flush()


_BEGINNING = 1 << 20


def _show_others(nodes: Nodes, own: History | None, in_json: bool) -> int:
    """Show the event logs of other nodes, after the event log of this node."""
    with nodes, tempfile.TemporaryDirectory() as folder:
        found = nodes.records(Path(folder))
        titles = {rank: nodes.title(rank) for rank in found}
        missing = nodes.report()
        there = {rank: replace(read(path), running=True) for rank, path in found.items()}
        if in_json:
            more = [{"node": rank, **_named(as_json(each))} for rank, each in there.items()]
            print_json({**(as_json(own) if own is not None else {}), "nodes": more})
            return missing
        if own is not None:
            _print(summary(own, time.time()))
        for number, (rank, history) in enumerate(there.items()):
            lines = [line.replace(f"{history.path.parent}/", "") for line in summary(history, time.time())]
            write(f"{chr(10) if number or own is not None else ''}On {titles[rank]}:\n")
            _print(lines)
    return missing


def _named(document: Document) -> Document:
    """Reduce the files of another node to their names."""
    logs = {name: Path(log).name for name, log in document["logs"].items()}
    return {**document, "record": Path(document["record"]).name, "logs": logs}


def _show(history: History, *, in_json: bool, all_wanted: bool) -> None:
    if in_json:
        print_json(as_json(history))
    elif all_wanted:
        _print(all_launches(_launches_of(history), time.time()))
    else:
        _print(summary(history, time.time()))
