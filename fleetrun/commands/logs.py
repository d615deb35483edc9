"""`fleetrun logs`: what the processes of a job print, merged in the order of time. Chooses and shows; reading
is `fleetrun.record`'s.
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
    Chosen,
    choose_processes,
    find_any,
    history_of,
    moment,
    of_any,
    processes_elsewhere,
)
from fleetrun.console.text import printable, printable_json, sanitize
from fleetrun.errors import UsageError
from fleetrun.pod.logs import rotated_away
from fleetrun.record.history import History, is_running
from fleetrun.record.journal import marks_path
from fleetrun.record.log_lines import Line, Merged, Wanted, in_time_order

_LOOK = 0.2  # seconds between two looks while following
_SOON = 0.02  # the same while there is something to see: --log_rotate may take it away
_FEW = 20  # lines before those that come, unless told
_RESET = b"\x1b[0m"
_COLOURS = (36, 32, 35, 34, 33, 96, 92, 95, 94, 93)

_HELP = """Show what the processes of JOB print (on this machine), merged in the order of time.

JOB is the name of a job, a pod, or the beginning of one of them; without it the job that runs here, else the
newest record in --log_dir. A job that ended is read from its logs.

Lines carry no times; fleetrun notes once a second how long each log was, so their order is exact to about a
second, and to less where little is printed. All logs are plain files, too: log/JOB.POD.trainer.0.log.

\b
Examples:
  fleetrun logs                            all of the only job
  fleetrun logs -f                         the last 20 lines, and what comes
  fleetrun logs night --rank 0,3 -n 100    the last 100 lines of trainers 0 and 3
  fleetrun logs --role ps --since 10m      what servers printed in the last ten minutes
  fleetrun logs --grep 'loss|nan' -t       lines that match, with their times
  fleetrun logs --json | jq -r .line

\b
Exit codes:
  0    shown (with -f: until the job was over)
  1    there is no such job, or one of its logs cannot be read
  2    usage: a wrong option, or a JOB that several fit
  130  Ctrl-C
  141  the reader of a pipe went away
"""


@click.command(help=_HELP, context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until the job is over.")
@click.option(
    "-n", "--lines", "most", type=int, metavar="N",
    help=f"Only the last N lines of what is there. [default: all; {_FEW} with -f]",
)  # fmt: skip
@click.option(
    "--role", metavar="ROLE[,ROLE]", help="Only these: trainer, ps, heter, coordinator, evaluator, pre_hook."
)
@click.option(
    "--rank", metavar="N[,N-M]", help="Only these ranks: of trainers, unless --role says otherwise."
)
@click.option(
    "--since", metavar="WHEN", help="Only what is newer: 30s, 10m, 2h, 1d ago, or 07:15, or a date."
)
@click.option("--grep", metavar="RE", help="Only lines in which this regular expression matches.")
@click.option("-t", "--times", is_flag=True, help="Show when each line was written.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: time, container, rank, line.")
@click.option("--log_dir", "--log-dir", type=click.Path(path_type=Path), help="Where the job's logs are.")
@click.argument("job", required=False, shell_complete=of_any)
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
        raise UsageError(f"-n {most}: it must be 0 or more")
    wanted = _wanted(grep)
    begin = moment(since, time.time()) if since is not None else float("-inf")
    history = history_of(find_any(job, log_dir))
    place = f"--log_dir {shlex.quote(str(log_dir))} " if log_dir is not None else ""
    there = f"fleetrun logs {place}{printable(history.job)}"
    chosen = choose_processes(history.containers, role, rank, partial(processes_elsewhere, history), there)
    marks = marks_path(history.path.parent, history.job, history.pod)
    merged = Merged({each.name: each.log for each in chosen}, marks, history.began or 0.0, time.time)
    printer = _Printer(chosen, times=times, as_json=as_json)
    running = history.running is not False and history.over is None
    if most is None and follow and since is None:
        most = _FEW
    complaints = _Complaints(merged, history, chosen)
    printer.show(merged.so_far(wanted, since=begin, most=most, whole=not (follow and running)))
    complaints.tell()
    if follow and running:
        _follow(merged, printer, wanted, history.path, complaints)
    return 1 if complaints.told else 0


def _follow(merged: Merged, printer: _Printer, wanted: Wanted, record: Path, complaints: _Complaints) -> None:
    """Until the job is over, or nobody reads any more."""
    gone = select.poll()
    gone.register(sys.stdout.fileno(), 0)
    rest = _LOOK
    while is_running(record) or merged.behind:
        news = in_time_order(list(merged.news(wanted)))
        printer.show(news)
        complaints.tell()
        rest = _SOON if news else min(_LOOK, 2 * rest)
        if gone.poll(0 if merged.behind else rest * 1000):
            raise BrokenPipeError
    printer.show(in_time_order(list(merged.news(wanted, last=True))))
    complaints.tell()


class _Complaints:
    """Logs that cannot be read: told once each. Of a process that has not begun there need not be one."""

    def __init__(self, merged: Merged, history: History, chosen: Sequence[Chosen]) -> None:
        self.told: set[str] = set()
        self._merged = merged
        self._begun = {event.get("container") for event in history.all("started")}
        self._paths = {each.name: each.log for each in chosen}

    def tell(self) -> None:
        for name, error in self._merged.troubles.items():
            if name not in self.told and (error.errno != errno.ENOENT or name in self._begun):
                self.told.add(name)
                path = printable(str(self._paths[name]))
                click.echo(f"fleetrun: {path} cannot be read: {error.strerror}", err=True)


def _wanted(grep: str | None) -> Wanted:
    if grep is None:
        return lambda text: True
    try:
        found = re.compile(os.fsencode(grep))
    except re.error as error:
        raise UsageError(
            f"--grep {grep!r} is no regular expression: {error}",
            hint="A backslash before a sign takes it as it is.",
        ) from None
    return lambda text: found.search(text) is not None


@dataclass(slots=True)
class _Look:
    head: bytes
    name: str
    rank: int | None


class _Printer:
    """To a terminal lines keep their colours, and do nothing else to it; elsewhere they stay as they are."""

    def __init__(self, chosen: Sequence[Chosen], *, times: bool, as_json: bool) -> None:
        self._tty = sys.stdout.isatty()
        self._times = times
        self._json = as_json
        colour = self._tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        width = max((len(each.name) for each in chosen), default=0)
        self._looks = []
        for number, each in enumerate(chosen):
            label = f"{each.name:<{width}} |"
            painted = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{label}\x1b[0m" if colour else label
            head = f"{painted} ".encode() if len(chosen) > 1 else b""
            self._looks.append(_Look(head, each.name, each.rank))

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
        return stamp + self._looks[line.number].head + text + b"\n"

    def _as_json(self, line: Line) -> bytes:
        look = self._looks[line.number]
        said: dict[str, Any] = {"time": round(line.moment, 2), "container": look.name, "rank": look.rank}
        if line.lost:
            said["lost"] = line.lost
        else:
            said["line"] = _last_state(line.text).decode("utf-8", "backslashreplace")
        return printable_json(json.dumps(said, ensure_ascii=False).encode()) + b"\n"


def _last_state(text: bytes) -> bytes:
    """Of a progress bar, which writes over itself."""
    return text.rstrip(b"\r").rpartition(b"\r")[2]


def _stamp(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 10)}"
