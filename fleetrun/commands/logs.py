"""The `fleetrun logs` command shows the output of a job's processes, merged in time order.

Reading and merging are in `fleetrun.record.log_lines`.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import json
import math
import os
import re
import select
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from fleetrun.aliases import Document
from fleetrun.commands.everywhere import (
    NO_SUCH_PROCESS,
    Documents,
    Nodes,
    node_options,
    nodes_at,
    nodes_of,
    own_rank,
    read_where,
)
from fleetrun.commands.find import (
    NoSuchProcessError,
    any_job,
    choose_processes,
    find_any,
    history_of,
    json_option,
    logs_of_job,
    parse_since,
    remote_processes,
)
from fleetrun.commands.output import remark
from fleetrun.console.text import format_date, printable, printable_json, sanitize
from fleetrun.elastic.ask import ANSWER_WITHIN
from fleetrun.errors import UsageError
from fleetrun.frozen import frozen
from fleetrun.pod.logs import rotated_away
from fleetrun.record.history import History, is_running
from fleetrun.record.journal import marks_path
from fleetrun.record.log_lines import Line, Merged, Wanted, in_time_order

_POLL_IDLE = 0.2  # seconds between two polls with -f
_POLL_BUSY = 0.02  # seconds while lines arrive, because --log_rotate may delete a log before it is read
_FOLLOW_LINES = 20  # default of -n with -f
_RESET = b"\x1b[0m"
_COLOURS = (36, 32, 35, 34, 33, 96, 92, 95, 94, 93)

_HELP = """Show the output of the processes of JOB, merged in time order.

JOB is a job's name, run ID (pod), script or directory. The default is the job that runs here, or else the
newest job in --log_dir. For a job that has ended, the command reads the logs on this node.

For a running job on several nodes, the command shows the lines of all nodes, each with its node, role and
rank. --node chooses one node. Each node filters its own lines, and sends at most 16 MiB of older lines. --job
does the same from a host outside of the job.

Logs contain no time stamps, because processes write them directly. fleetrun notes the length of each log when
it grows, so the time of a line is exact to about 10 ms, or to a second if a process prints more than ten
lines a second for long. Each log is also a plain file: log/JOB.POD.trainer.0.log.

\b
Examples:
  fleetrun logs                            everything
  fleetrun logs -f                         the last 20 lines, then new lines as they arrive
  fleetrun logs night --rank 0,3 -n 100    the last 100 lines of trainers 0 and 3
  fleetrun logs --role ps --since 10m      output of the servers in the last ten minutes
  fleetrun logs --grep 'loss|nan' -t       matching lines, with their times
  fleetrun logs --json | jq -r .line
  fleetrun logs -f --node 3                node 3 of a job on several nodes
  fleetrun logs -f --job h1:6768/night --token_file secret     from any host

\b
Exit codes:
  0    shown (with -f: until the job ended)
  1    no such job exists, a log cannot be read, or a node or the job's store does not answer
  2    an option is wrong, or several jobs match JOB
  130  Ctrl-C
  141  the reader of the pipe has closed it
"""


@click.command(help=_HELP, context_settings={"max_content_width": 100})
@click.option("-f", "--follow", is_flag=True, help="Keep showing new lines until the job ends.")
@click.option(
    "-n", "--lines", "most", type=int, metavar="N",
    help=f"Show only the last N lines. [default: all; {_FOLLOW_LINES} with -f]",
)  # fmt: skip
@click.option(
    "--role",
    metavar="ROLE[,ROLE]",
    help="Show only these roles: trainer, ps, heter, coordinator, evaluator, pre_hook.",
)
@click.option("--rank", metavar="N[,N-M]", help="Show only these ranks, of trainers unless you set --role.")
@click.option(
    "--since", metavar="WHEN", help="Show only lines since 30s, 10m, 2h or 1d ago, 07:15, or a date."
)
@click.option("--grep", metavar="RE", help="Show only lines that match this regular expression.")
@click.option("-t", "--times", is_flag=True, help="Show when each line was written.")
@json_option(
    help="Print one JSON object per line: time, container, rank, line; for several nodes also node and role.",
)
@logs_of_job
@node_options
@click.option("--most_bytes", type=int, hidden=True)
@click.option("--most_read", type=int, hidden=True)
@any_job
def command(
    job: str | None,
    follow: bool,
    most: int | None,
    role: str | None,
    rank: str | None,
    since: str | None,
    grep: str | None,
    times: bool,
    in_json: bool,
    log_dir: Path | None,
    most_bytes: int | None,
    most_read: int | None,
    **options: object,
) -> int:
    where = read_where(options, {"JOB": job, "--log_dir": log_dir})
    if most is not None and most < 0:
        raise UsageError(f"-n is {most}; it must be at least 0")
    begin = parse_since(since, time.time()) if since is not None else None
    if most is None and follow and since is None:
        most = _FOLLOW_LINES
    asked = _Asked(follow, most, role, rank, begin, grep, _wanted(grep), most_bytes, most_read)
    printer = _Printer(times=times, in_json=in_json, transfer=where.here)
    if where.url is not None:
        return _show_all(nodes_at(where), None, asked, printer)
    found = find_any(job, log_dir)
    own = own_rank(found)
    nodes = nodes_of(found, where)
    local = None
    if where.includes_own(found):
        place = f"--log_dir {shlex.quote(str(log_dir))} " if log_dir is not None else ""
        try:
            local = _LocalLogs(history_of(found), asked, place, own)
        except NoSuchProcessError:
            if where.here:
                return NO_SUCH_PROCESS
            if nodes is None:
                raise
    if nodes is not None:
        return _show_all(nodes, local, asked, printer)
    assert local is not None
    return _show_here(local, asked, printer)


@frozen
class _Asked:
    """The lines to show."""

    follow: bool
    most: int | None
    role: str | None
    rank: str | None
    since: float | None
    """In seconds since the epoch."""
    grep: str | None
    wanted: Wanted
    most_bytes: int | None
    most_read: int | None

    def options(self) -> Document:
        """Return options for another node. Times are relative, because its clock and time zone may differ."""
        ago = None if self.since is None else f"{max(0.001, time.time() - self.since):.3f}s"
        return {
            "follow": self.follow, "lines": self.most, "role": self.role, "rank": self.rank,
            "since": ago, "grep": self.grep,
        }  # fmt: skip


def _show_here(local: _LocalLogs, asked: _Asked, printer: _Printer) -> int:
    printer.know(local.sources)
    printer.show(local.so_far())
    printer.mark(local.merged.cut)
    local.report()
    if asked.follow and local.running:
        closed = _Stdout()
        interval = _POLL_IDLE
        while local.goes_on:
            news = local.news()
            printer.show(news)
            interval = _POLL_BUSY if news else min(_POLL_IDLE, 2 * interval)
            closed.check(0 if local.merged.behind else interval)
        printer.show(local.news(last=True))
    local.merged.close()
    return 1 if local.unreadable else 0


_LEAVE_WITHIN = 10.0
"""Seconds to wait for the last lines of other nodes, after the job has ended on this node."""


def _show_all(nodes: Nodes, local: _LocalLogs | None, asked: _Asked, printer: _Printer) -> int:
    if not nodes.reached(alone=local is not None):
        assert local is not None
        return max(1, _show_here(local, asked, printer))
    with contextlib.closing(nodes):
        nodes.ask("logs", asked.options(), math.inf if asked.follow else ANSWER_WITHIN)
        remote = {rank: _RemoteLogs(nodes, rank) for rank in nodes.ranks}
        printer.several = len(remote) + (local is not None) > 1
        if local is not None:
            printer.know(local.sources)
        streams = [each.so_far() for each in remote.values()]
        merged = heapq.merge(*streams, *([local.so_far()] if local else []), key=_moment)
        printer.show(merged if asked.most is None else deque(merged, asked.most))
        if asked.follow:
            _follow(nodes, local, remote, printer)
        for rank in (rank for rank, each in remote.items() if each.cut):
            remark(f"fleetrun: {nodes.title(rank)}: earlier lines are missing; use --since or --grep")
        if local is None and nodes.nowhere == set(nodes.ranks):
            raise UsageError("no node has such a process")
        missing = nodes.report()
    return missing or int(local is not None and bool(local.unreadable))


def _follow(
    nodes: Nodes, local: _LocalLogs | None, remote: Mapping[int, _RemoteLogs], printer: _Printer
) -> None:
    """Show new lines until the job has ended or the reader closes stdout."""
    closed = _Stdout()
    news = [line for each in remote.values() for line in each.left]
    until = math.inf
    while nodes.open and time.monotonic() < until:
        if local is not None and local.goes_on:
            news += local.news()
        elif local is not None and until == math.inf:
            news += local.news(last=True)
            until = time.monotonic() + _LEAVE_WITHIN
        printer.show(sorted(news, key=_moment))
        closed.check(0)
        behind = local is not None and local.merged.behind
        news = [
            line
            for rank, data in nodes.arrived(0 if behind else _POLL_BUSY if news else _POLL_IDLE)
            for line in remote[rank].lines(data)
        ]
    printer.show(sorted([*news, *(local.news(last=True) if local is not None else [])], key=_moment))


class _Stdout:
    """Detects that the reader of stdout has closed it."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._poll.register(sys.stdout.fileno(), 0)

    def check(self, within: float) -> None:
        """Wait for `within` seconds. Raises BrokenPipeError if the reader has closed stdout."""
        if self._poll.poll(within * 1000):
            raise BrokenPipeError


@frozen
class _Source:
    """A process. `node` is None in a job on one node."""

    node: int | None
    name: str
    role: str
    rank: int | None

    @property
    def title(self) -> str:
        """The label of its lines: `trainer.0`, or with several nodes `1 trainer 3`, with the global rank."""
        if self.node is None:
            return self.name
        return f"{self.node} {self.role}{'' if self.rank is None else f' {self.rank}'}"


@frozen
class _LogLine:
    """A line of a process, with the fields of `Line`."""

    moment: float
    source: _Source
    text: bytes
    lost: int = 0


def _moment(line: _LogLine) -> float:
    return line.moment


class _LocalLogs:
    """The logs on this node. Raises NoSuchProcessError."""

    def __init__(self, history: History, asked: _Asked, place: str, node: int | None) -> None:
        away = partial(remote_processes, history)
        same_command = f"fleetrun logs {place}{printable(history.job)}"
        chosen = choose_processes(history.containers, asked.role, asked.rank, away, same_command)
        self.sources = [_Source(node, each.name, each.role, each.rank) for each in chosen]
        self.running = history.running is not False and history.over is None
        self._asked = asked
        self._record = history.path
        marks = marks_path(history.path.parent, history.job, history.pod)
        self._logs = {each.name: each.log for each in chosen}
        self.merged = Merged(self._logs, marks, history.began or 0.0, time.time)
        self.unreadable: set[str] = set()
        """Names of the unreadable logs that were reported."""
        self._started = {event.get("container") for event in history.all("started")}

    @property
    def goes_on(self) -> bool:
        return (self.running and is_running(self._record)) or self.merged.behind

    def so_far(self) -> Iterator[_LogLine]:
        asked = self._asked
        since = float("-inf") if asked.since is None else asked.since
        whole = not (asked.follow and self.running)
        return map(
            self._log_line,
            self.merged.so_far(
                asked.wanted,
                since=since,
                most=asked.most,
                whole=whole,
                most_bytes=asked.most_bytes,
                most_read=asked.most_read,
            ),
        )

    def news(self, *, last: bool = False) -> list[_LogLine]:
        found = in_time_order(list(self.merged.news(self._asked.wanted, last=last)))
        self.report()
        return [self._log_line(line) for line in found]

    def report(self) -> None:
        """Report each unreadable log once. A log may be missing until its process starts."""
        for name, error in self.merged.troubles.items():
            if name not in self.unreadable and (error.errno != errno.ENOENT or name in self._started):
                self.unreadable.add(name)
                path = printable(str(self._logs[name]))
                remark(f"fleetrun: {path} cannot be read: {error.strerror}")

    def _log_line(self, line: Line) -> _LogLine:
        return _LogLine(line.moment, self.sources[line.number], line.text, line.lost)


class _RemoteLogs:
    """The logs of another node."""

    def __init__(self, nodes: Nodes, rank: int) -> None:
        self.cut = False
        self.left: list[_LogLine] = []
        """Lines that arrived after the older lines ended."""
        self._nodes = nodes
        self._rank = rank
        self._documents = Documents()
        self._sources: dict[int, _Source] = {}

    def so_far(self) -> Iterator[_LogLine]:
        for data in self._nodes.pieces(self._rank):
            found = self._documents.of(data)
            for document in found:
                if isinstance(document, dict) and "cut" in document:
                    self.cut = document["cut"] is True
                    self.left = list(filter(None, map(self._log_line, found)))
                    return
                if (line := self._log_line(document)) is not None:
                    yield line

    def lines(self, data: bytes) -> list[_LogLine]:
        return list(filter(None, map(self._log_line, self._documents.of(data))))

    def _log_line(self, document: Any) -> _LogLine | None:
        """Decode one JSON value. Return None for values that are not lines."""
        try:
            if isinstance(document, dict):
                rank = None if document["rank"] is None else int(document["rank"])
                source = _Source(self._rank, str(document["name"]), str(document["role"]), rank)
                self._sources[int(document["source"])] = source
                return None
            moment, number, text, lost = document
            line = str(text).encode("utf-8", "surrogateescape")
            return _LogLine(min(max(0.0, float(moment)), 1e12), self._sources[number], line, int(lost))
        except (LookupError, ValueError, TypeError, OverflowError):
            return None


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


class _Printer:
    """Prints lines. A terminal gets them with their colours but without other control characters. Other
    outputs get them unchanged.

    `transfer`: write JSON for another host, which prints the lines.
    """

    def __init__(self, *, times: bool, in_json: bool, transfer: bool) -> None:
        self.several = False
        """True if lines of several nodes are shown."""
        self._tty = sys.stdout.isatty()
        self._times = times
        self._json = in_json
        self._transfer = transfer
        self._colour = self._tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._width = 0
        self._labels: dict[_Source, bytes] = {}
        self._numbers: dict[_Source, int] = {}

    def know(self, sources: Sequence[_Source]) -> None:
        """Prepare the labels of these processes. Lines of other processes may still arrive."""
        self.several = self.several or len(sources) > 1
        self._width = max((self._width, *(len(each.title) for each in sources)))
        for each in sources:
            self._label(each)

    def show(self, lines: Iterable[_LogLine]) -> None:
        out = sys.stdout.buffer
        for line in lines:
            if self._transfer:
                out.write(self._transferred(line))
            else:
                out.write(self._as_json(line) if self._json else self._as_text(line))
        out.flush()

    def mark(self, cut: bool) -> None:
        """Mark the end of the older lines. `cut`: the first of them are missing."""
        if self._transfer:
            sys.stdout.buffer.write(json.dumps({"cut": cut}).encode() + b"\n")
            sys.stdout.buffer.flush()

    def _transferred(self, line: _LogLine) -> bytes:
        """Encode a line as a JSON array. An object that describes the process precedes its first line."""
        source, new = line.source, b""
        number = self._numbers.get(source)
        if number is None:
            number = self._numbers[source] = len(self._numbers)
            about = {"source": number, "name": source.name, "role": source.role, "rank": source.rank}
            new = json.dumps(about).encode() + b"\n"
        text = _last_state(line.text).decode("utf-8", "surrogateescape")
        return new + json.dumps([round(line.moment, 3), number, text, line.lost]).encode() + b"\n"

    def _label(self, source: _Source) -> bytes:
        found = self._labels.get(source)
        if found is None:
            self._width = max(self._width, len(source.title))
            label = f"{printable(source.title):<{self._width}} |"
            number = len(self._labels) % len(_COLOURS)
            painted = f"\x1b[{_COLOURS[number]}m{label}\x1b[0m" if self._colour else label
            found = self._labels[source] = f"{painted} ".encode() if self.several else b""
        return found

    def _as_text(self, line: _LogLine) -> bytes:
        text = _last_state(line.text) if not line.lost else f"... {rotated_away(line.lost)}".encode()
        if self._tty:
            text = sanitize(text)
            text += _RESET if b"\x1b[" in text else b""
        stamp = (
            f"{format_date(line.moment)}.{int(line.moment % 1 * 100):02} ".encode() if self._times else b""
        )
        return stamp + self._label(line.source) + text + b"\n"

    def _as_json(self, line: _LogLine) -> bytes:
        source = line.source
        fields = {
            "time": round(line.moment, 2),
            "container": source.name,
            "rank": source.rank,
        }
        if source.node is not None:
            fields |= {"node": source.node, "role": source.role}
        if line.lost:
            fields["lost"] = line.lost
        else:
            fields["line"] = _last_state(line.text).decode("utf-8", "backslashreplace")
        return printable_json(json.dumps(fields, ensure_ascii=False).encode()) + b"\n"


def _last_state(text: bytes) -> bytes:
    """Return the final state of a progress bar that overwrites itself."""
    return text.rstrip(b"\r").rpartition(b"\r")[2]
