"""`fleetrun report`: how a job ended and why, from its record: the failure report again, and what led
to it.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click

from fleetrun.commands.find import find_any, history_of, of_any
from fleetrun.commands.output import print_json, write
from fleetrun.console.text import lasted, printable, wrapped
from fleetrun.pod.events import HUNG
from fleetrun.record.history import History, number
from fleetrun.record.journal import Event

# ---- What became of a job, told from its record: the failure report again, and the way to it. Pure; lines of
# text.

_MOST_EVENTS = 40


def summary(history: History, now: float) -> list[str]:
    """A head, what happened in between, and the report as it was printed then. As it stands in the record:
    whoever shows it sees to what a terminal would do of it.
    """
    lines = [*_head(history, now), ""]
    story = _story(history)
    if len(story) > _MOST_EVENTS:
        left = len(story) - _MOST_EVENTS
        half = _MOST_EVENTS // 2
        story = [*story[:half], f"  ... {left} more ...", *story[-half:]]
    lines += [*story, ""] if story else []
    over = history.over
    report = over.get("report") if over is not None else None
    if isinstance(report, list):
        lines += [str(each) for each in report]
    if history.damaged:
        lines.append(f"{history.damaged} lines of {history.path} are damaged, and left out here.")
    return lines if lines[-1] else lines[:-1]


def outcome(history: History) -> str:
    """In a few words."""
    over = history.over
    if over is None:
        if history.running:
            return "running"
        if history.running is None:
            return "running, or ended without a word"
        return "ended without a word: its launcher was killed, or the machine went down"
    code = over.get("code")
    if code == 0:
        return "completed"
    reason = str(over.get("reason") or "")
    if reason.startswith("got "):  # a signal: somebody wanted it to end
        return f"stopped, {reason}, exit code {code}"
    return f"failed with exit code {code}{f', {reason}' if reason else ''}"


def as_json(history: History) -> dict[str, Any]:
    """The same as one value."""
    over = history.over or {}
    launch = history.launch
    return {
        "job": history.job,
        "pod": history.pod,
        "running": history.running,
        "outcome": outcome(history),
        "code": over.get("code"),
        "reason": over.get("reason"),
        "restarts": over.get("restarts"),
        "began": history.began,
        "ended": history.ended,
        "host": launch.get("host"),
        "cwd": launch.get("cwd"),
        "argv": launch.get("argv"),
        "record": str(history.path),
        "logs": {each.name: str(each.log) for each in history.containers},
        "report": over.get("report") or [],
        "damaged": history.damaged,
    }


def _head(history: History, now: float) -> list[str]:
    launch = history.launch
    began, ended = history.began, history.ended
    lines = [f"Job {history.job} (pod {history.pod}): {outcome(history)}"]
    if began is not None:
        until = ended if ended is not None else now
        word = "ended" if history.over is not None else "last heard of" if ended is not None else "now"
        lines.append(f"  began {_date(began)}, {word} {_date(until)}, {lasted(until - began)}")
    argv = launch.get("argv")
    if isinstance(argv, list):
        import shlex

        lines.append(f"  command: fleetrun {shlex.join(map(str, argv))}")
        lines.append(f"  on {launch.get('host')} in {launch.get('cwd')}")
    lines.append(f"  record: {history.path}")
    return lines


def _story(history: History) -> list[str]:
    """What is worth a line: failures, restarts, hangs, and why it was asked to end."""
    exits = {_of(event): event for event in history.all("exited")}
    answered = {_of(event) for event in history.all("failed")}
    lines = []
    for event in history.events:
        said = _said(event, exits.get(_of(event), {}), _of(event) in answered)
        if said:
            lines.append(f"  {_date(event['time'])}  {said}")
    return lines


def _of(event: Event) -> tuple[str, str]:
    """Which attempt of which container it is about."""
    return str(event.get("container")), str(event.get("attempt"))


def _said(event: Event, end: Event, answered: bool) -> str:
    """`end` is how that attempt of its container ended; `answered`: a `failed` follows and says it all."""
    match event["event"]:
        case "failed":
            return f"{_how(end or event)}; {_answer(event)}"
        case "exited" if event.get("code") and event.get("asked") is None and not answered:
            return _how(event)
        case "hung":
            silent = lasted(number(event.get("silent_for")) or 0.0)
            return f"no sign of life for {silent}: {_joined(event.get('containers'))}; {_to_hang(event)}"
        case "restarting":
            return f"started again: {_joined(event.get('containers'))}"
        case "ending":
            return str(event.get("reason"))
        case "node":
            return str(event.get("text"))
        case "lost":
            return f"{event.get('events')} events could not be written (was the disk full?)"
    return ""


def _how(event: Event) -> str:
    """`trainer.0 exited with code 1: ValueError: bad input`"""
    error = str(event.get("error") or "").splitlines()[:1]
    how = event.get("how") or "failed"
    memory = " for lack of memory" if event.get("out_of_memory") else ""
    return f"{event.get('container')} {how}{memory}{''.join(f': {line}' for line in error)}"


def _answer(event: Event) -> str:
    if event.get("restart"):
        count = f" {event['number']} of {event.get('limit')}" if event.get("number") else ""
        return f"restart{count}"
    return str(event.get("reason") or "no restart")


def _to_hang(event: Event) -> str:
    """Its reason begins with what was said of the hang already."""
    said, hung, why = str(event.get("reason") or "").partition(HUNG)
    return _answer({**event, "reason": why.removeprefix("; ") if hung else said})


def _joined(names: Any) -> str:
    if not isinstance(names, list):
        return "?"
    shown = ", ".join(map(str, names[:8]))
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def _date(moment: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (ValueError, OverflowError, OSError):
        return "?"


# ---- `fleetrun report`: how a job ended, from its record. Shows what `summary` tells.

_HELP = """Show how JOB ended on this machine, and why: the failure report as it was printed then, and what
led to it (failures, restarts, hangs), from the record log/JOB.POD.events.jsonl.

JOB is the name of a job, a pod, or the beginning of one of them. Of several launches of one job the newest is
meant. Without JOB it is the job that runs here, else the newest record in --log_dir.

\b
Examples:
  fleetrun report
  fleetrun report night --log_dir /data/log
  fleetrun report --json | jq .code

\b
Exit codes:
  0    shown, however the job ended
  1    there is no such job
  2    usage: a wrong option, or a JOB that several fit
"""


def _fitted(lines: list[str]) -> list[str]:
    """On a terminal long lines go on below, broken between words."""
    if not sys.stdout.isatty():
        return lines
    width = shutil.get_terminal_size().columns
    return [piece for line in lines for piece in (wrapped(line, width) if line else [line])]


@click.command(help=_HELP, context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON document.")
@click.option("--log_dir", "--log-dir", type=click.Path(path_type=Path), help="Where the job's logs are.")
@click.argument("job", required=False, shell_complete=of_any)
def command(job: str | None, json_wanted: bool, log_dir: Path | None) -> int:
    history = history_of(find_any(job, log_dir))
    if json_wanted:
        print_json(as_json(history))
    else:
        lines = _fitted([printable(line) for line in summary(history, time.time())])
        write("".join(f"{line}\n" for line in lines))
    return 0
