"""`fleetrun logs`: show the output of a job's processes, merged in time order. Reading and merging is in
`fleetrun.record.log_lines`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from fleetrun.commands.find import (
    choose_processes,
    complete_jobs,
    find_any,
    history_of,
    parse_since,
    remote_processes,
)
from fleetrun.console.text import printable, printable_json, sanitize
from fleetrun.errors import UsageError
from fleetrun.pod.logs import rotated_away
from fleetrun.record.history import History, Known, is_running
from fleetrun.record.journal import marks_path
from fleetrun.record.log_lines import Line, Merged, Wanted, in_time_order

_POLL_IDLE = 0.2  # seconds between two polls with -f
_POLL_BUSY = 0.02  # the same while lines come: --log_rotate may delete a log before it is read
_FOLLOW_LINES = 20  # the default of -n with -f
_RESET = b"\x1b[0m"
_COLOURS = (36, 32, 35, 34, 33, 96, 92, 95, 94, 93)

_HELP = """Show the output of the processes of JOB on this machine, merged in time order.

JOB is the name of a job, a pod, or the beginning of either. The default is the job that is running here, else
the newest record in --log_dir. A job that has ended is read from its logs.

The logs have no time stamps; fleetrun notes the length of each log once a second, so the order of lines is
exact to about a second, and better if little is printed. Each log is also a plain file:
log/JOB.POD.trainer.0.log.

\b
Examples:
  fleetrun logs                            everything
  fleetrun logs -f                         the last 20 lines, then new ones as they come
  fleetrun logs night --rank 0,3 -n 100    the last 100 lines of trainers 0 and 3
  fleetrun logs --role ps --since 10m      output of the servers in the last ten minutes
  fleetrun logs --grep 'loss|nan' -t       matching lines, with their times
  fleetrun logs --json | jq -r .line

\b
Exit codes:
  0    shown (with -f: until the job ended)
  1    there is no such job, or one of its logs cannot be read
  2    an option is wrong, or JOB fits several jobs
  130  Ctrl-C
  141  the reader of the pipe has closed it
"""


@click.command(help=_HELP, context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
@click.option("-f", "--follow", is_flag=True, help="Keep showing new lines until the job ends.")
@click.option(
    "-n", "--lines", "most", type=int, metavar="N",
    help=f"Only the last N lines. [default: all; {_FOLLOW_LINES} with -f]",
)  # fmt: skip
@click.option(
    "--role",
    metavar="ROLE[,ROLE]",
    help="Only these roles: trainer, ps, heter, coordinator, evaluator, pre_hook.",
)
@click.option("--rank", metavar="N[,N-M]", help="Only these ranks; of trainers unless --role is given.")
@click.option(
    "--since", metavar="WHEN", help="Only lines since then: 30s, 10m, 2h or 1d ago, 07:15, or a date."
)
@click.option("--grep", metavar="RE", help="Only lines that match this regular expression.")
@click.option("-t", "--times", is_flag=True, help="Show when each line was written.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object per line: time, container, rank, line."
)
@click.option(
    "--log_dir", "--log-dir", type=click.Path(path_type=Path), help="The folder with the logs of the job."
)
@click.argument("job", required=False, shell_complete=complete_jobs)
def command(
    job: str | None,
    follow: bool,
    most: int | None,
    role: str | None,
    rank: str | None,
    since: str | None,
    grep: str | None,
    times: bool,
    as_json: bool,
    log_dir: Path | None,
) -> int:
    if most is not None and most < 0:
        raise UsageError(f"-n is {most}; it must be at least 0")
    wanted = _wanted(grep)
    begin = parse_since(since, time.time()) if since is not None else float("-inf")
    history = history_of(find_any(job, log_dir))
    place = f"--log_dir {shlex.quote(str(log_dir))} " if log_dir is not None else ""
    same_command = f"fleetrun logs {place}{printable(history.job)}"
    chosen = choose_processes(
        history.containers, role, rank, partial(remote_processes, history), same_command
    )
    marks = marks_path(history.path.parent, history.job, history.pod)
    merged = Merged({each.name: each.log for each in chosen}, marks, history.began or 0.0, time.time)
    printer = _Printer(chosen, times=times, as_json=as_json)
    running = history.running is not False and history.over is None
    if most is None and follow and since is None:
        most = _FOLLOW_LINES
    unreadable = _UnreadableLogs(merged, history, chosen)
    printer.show(merged.so_far(wanted, since=begin, most=most, whole=not (follow and running)))
    unreadable.report()
    if follow and running:
        _follow(merged, printer, wanted, history.path, unreadable)
    return 1 if unreadable.reported else 0


def _follow(
    merged: Merged, printer: _Printer, wanted: Wanted, record: Path, unreadable: _UnreadableLogs
) -> None:
    """Until the job has ended, or stdout is closed."""
    closed = select.poll()
    closed.register(sys.stdout.fileno(), 0)
    interval = _POLL_IDLE
    while is_running(record) or merged.behind:
        news = in_time_order(list(merged.news(wanted)))
        printer.show(news)
        unreadable.report()
        interval = _POLL_BUSY if news else min(_POLL_IDLE, 2 * interval)
        if closed.poll(0 if merged.behind else interval * 1000):
            raise BrokenPipeError
    printer.show(in_time_order(list(merged.news(wanted, last=True))))
    unreadable.report()


class _UnreadableLogs:
    """Reports each log that cannot be read once. The log of a process that has not started may be missing."""

    def __init__(self, merged: Merged, history: History, chosen: Sequence[Known]) -> None:
        self.reported: set[str] = set()
        self._merged = merged
        self._started = {event.get("container") for event in history.all("started")}
        self._paths = {each.name: each.log for each in chosen}

    def report(self) -> None:
        for name, error in self._merged.troubles.items():
            if name not in self.reported and (error.errno != errno.ENOENT or name in self._started):
                self.reported.add(name)
                path = printable(str(self._paths[name]))
                click.echo(f"fleetrun: {path} cannot be read: {error.strerror}", err=True)


def _wanted(grep: str | None) -> Wanted:
    if grep is None:
        return lambda text: True
    try:
        found = re.compile(os.fsencode(grep))
    except re.error as error:
        raise UsageError(
            f"--grep {grep!r} is not a regular expression: {error}",
            hint="Put a backslash before a special character to match it literally.",
        ) from None
    return lambda text: found.search(text) is not None


@dataclass(slots=True)
class _Source:
    label: bytes
    name: str
    rank: int | None


class _Printer:
    """On a terminal lines keep their colours and nothing else; elsewhere they are written unchanged."""

    def __init__(self, chosen: Sequence[Known], *, times: bool, as_json: bool) -> None:
        self._tty = sys.stdout.isatty()
        self._times = times
        self._json = as_json
        colour = self._tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        width = max((len(each.name) for each in chosen), default=0)
        self._sources = []
        for number, each in enumerate(chosen):
            label = f"{each.name:<{width}} |"
            painted = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{label}\x1b[0m" if colour else label
            head = f"{painted} ".encode() if len(chosen) > 1 else b""
            self._sources.append(_Source(head, each.name, each.rank))

    def show(self, lines: Iterable[Line]) -> None:
        out = sys.stdout.buffer
        for line in lines:
            out.write(self._as_json(line) if self._json else self._as_text(line))
        out.flush()

    def _as_text(self, line: Line) -> bytes:
        text = _last_state(line.text) if not line.lost else f"... {rotated_away(line.lost)}".encode()
        if self._tty:
            text = sanitize(text)
            text += _RESET if b"\x1b[" in text else b""
        stamp = f"{_stamp(line.moment)} ".encode() if self._times else b""
        return stamp + self._sources[line.number].label + text + b"\n"

    def _as_json(self, line: Line) -> bytes:
        source = self._sources[line.number]
        fields: dict[str, Any] = {
            "time": round(line.moment, 2),
            "container": source.name,
            "rank": source.rank,
        }
        if line.lost:
            fields["lost"] = line.lost
        else:
            fields["line"] = _last_state(line.text).decode("utf-8", "backslashreplace")
        return printable_json(json.dumps(fields, ensure_ascii=False).encode()) + b"\n"


def _last_state(text: bytes) -> bytes:
    """What is left of a progress bar that overwrites itself."""
    return text.rstrip(b"\r").rpartition(b"\r")[2]


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 10)}"
