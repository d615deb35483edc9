"""`fleetrun status`: the state of a running job, on this machine and on its other nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click
from rich.text import Text

from fleetrun.commands import views
from fleetrun.commands.find import describe_end, find_running, job_title, of_running
from fleetrun.commands.output import print_json, print_lines, room, write
from fleetrun.control.client import STOPPED, Gone, NoAnswer, Running, ask
from fleetrun.control.node_status import unfolded
from fleetrun.control.usage import MOMENT, Observer, objects_in
from fleetrun.errors import LaunchError, UsageError

# ---- Asks a launcher how its job stands on all of its machines. It asks the others; who asked it waits,
# within a bound.

Status = dict[str, Any]

_PATIENCE_EVERYWHERE = 6.0
"""Seconds for an answer. The launcher waits for other machines for two."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """`node`: of this one only, by its rank. `whole`: every process, however many machines there are."""

    node: int | None = None
    whole: bool = False

    def question(self) -> Status:
        one = {} if self.node is None else {"node": self.node}
        return {"ask": "status", "everywhere": True, "all": self.whole, **one}

    def check(self, status: Mapping[str, Any]) -> None:
        """Raises UsageError when there is no such machine."""
        ranks = [each.get("rank") for each in objects_in(status, "nodes")] or [0]
        if self.node is None or self.node in ranks:
            return
        known = f"nodes 0 to {len(ranks) - 1}" if len(ranks) > 1 else "one node, 0"
        if status.get("waiting"):
            known = "none yet: its nodes have not met"
        raise UsageError(f"there is no node {self.node}: this job has {known}")

    def shown(self, status: Mapping[str, Any]) -> Status:
        """What of a status people see: `only` is the machine that they asked for."""
        nodes = objects_in(status, "nodes")
        if self.node is None or len(nodes) < 2:
            return dict(status)
        here = any(each.get("this") is True and each.get("rank") == self.node for each in nodes)
        return {**status, "only": self.node, "containers": status.get("containers") if here else []}


def has_other_nodes(status: Mapping[str, Any]) -> bool:
    """Whether there are other machines to ask."""
    return len(objects_in(status, "nodes")) > 1


def ask_everywhere(job: Running, wanted: Wanted) -> Status:
    """The answer as it comes. Raises NoAnswer."""
    return ask(job.socket, wanted.question(), _PATIENCE_EVERYWHERE)


def complete(answer: Mapping[str, Any], observer: Observer) -> Status:
    """With what can be seen from outside, and what other machines said of themselves."""
    return unfolded(observer.complete(answer))


# ---- `fleetrun status`: how a running job stands.

_PATIENCE = 1.0  # seconds for an answer while a person looks on
_EVERYWHERE = 3.0  # seconds between two questions to the other machines while one does


class SilentError(LaunchError):
    """The launcher does not answer."""

    exit_code = 3


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False, shell_complete=of_running)
@click.option("--watch", is_flag=True, help="Show it again and again, until q or Ctrl-C.")
@click.option(
    "--interval", type=float, default=1.0, show_default=True, metavar="SECONDS",
    help="With --watch: seconds between two looks.",
)  # fmt: skip
@click.option("--node", type=click.IntRange(min=0), metavar="N", help="The processes of this node only.")
@click.option("--all", "whole", is_flag=True, help="All processes, of however many nodes.")
@click.option(
    "--json", "as_json", is_flag=True, help="One line of JSON, for programs; with --watch one each time."
)
def command(
    job: str | None, watch: bool, interval: float, node: int | None, whole: bool, as_json: bool
) -> int:
    """Show how a running job stands: its processes, what they use, how far they are, their last words.

    JOB is the name of a job, its pod, or the beginning of one of them. It can be left out when one job runs.

    A process is one line: role and number, its rank where that is another, pid, state, for how long it has
    been running, how often it was restarted, processor (percent of one), memory, GPU, and what it reported:
    step, loss, samples per second. Columns for which there is no room, or nothing known, are left out; --json
    has all.

    Of a job on several machines the launcher asks those of the others, for two seconds at most; processor,
    memory and last words are known of this machine only. Of more than 16 nodes each is one line, unless
    --node or --all says otherwise.

    \b
    Examples:
      fleetrun status
      fleetrun status resnet --watch
      fleetrun status --node 3
      fleetrun status --json | jq '.containers[] | {name, step, loss}'

    \b
    Exit codes:
      0  the job runs (with --watch: or is over)
      1  there is no such job
      2  the name fits several jobs
      3  the launcher does not answer: it is stopped (Ctrl-Z), or very busy
    """
    if not 0.1 <= interval <= 3600:  # nan neither
        raise click.BadParameter(f"--interval {interval:g}: it must be 0.1 to 3600 seconds")
    found = _answering(find_running(job))
    wanted = Wanted(node, whole)
    wanted.check(found.status)
    if watch:
        return _watch(Watching(found, wanted), interval, as_json)
    _show(found, wanted, as_json)
    return 0


def _show(job: Running, wanted: Wanted, as_json: bool) -> None:
    observer = Observer()
    time.sleep(MOMENT)
    status = complete(_asked(job, wanted), observer)
    if as_json:
        print_json(status)
    else:
        _print(wanted.shown(status))


def _asked(job: Running, wanted: Wanted) -> Mapping[str, Any]:
    """The answer; the one that is known already if there is nobody else to ask, or it has just ended."""
    if has_other_nodes(job.status):
        with contextlib.suppress(NoAnswer):
            return ask_everywhere(job, wanted)
    return job.status


def _answering(job: Running) -> Running:
    if job.silence:
        name = job.job or f"pod {job.pod}"
        mend = "`fg` in its shell continues it, `fleetrun stop` ends it."
        raise SilentError(
            f"{name} runs (pod {job.pod}, pid {job.pid}), but its launcher does not answer: {job.silence}",
            hint=mend if job.silence == STOPPED else None,
        )
    return job


def _print(status: dict[str, Any]) -> None:
    width = room()
    apart = [Text("")] if views.nodes_with_details(status) else []
    lines = [*views.heading(status, width), *apart, *views.processes(status, width)]
    last = [] if any("LAST LINE" in line.plain for line in lines) else views.last_lines(status, width)
    print_lines([*lines, *([Text("")] if last else []), *last])


def _watch(view: Watching, interval: float, as_json: bool) -> int:
    if as_json:
        return _stream(view, interval)
    dumb = os.environ.get("TERM", "dumb") == "dumb"
    if room() is None or dumb:
        what = "a terminal" if room() is None else "more than a dumb terminal (TERM)"
        raise UsageError(f"--watch needs {what}", hint="With --json it prints a line each time, anywhere.")
    from fleetrun.commands.live import show

    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
    number = show(view.picture, interval, sys.stdout.fileno(), keys)
    if view.over:
        write(f"{job_title(view.job)} is over{describe_end(view.job)}\n")
    return 128 + number if number not in (0, signal.SIGINT) else 0


def _stream(view: Watching, interval: float) -> int:
    """Until the job is over, or Ctrl-C."""
    while (status := view.look()) is not None:
        print_json(status)
        time.sleep(interval)
    return 0


class Watching:
    """Asks again and again; other machines not as often. `over` when nobody is there to be asked."""

    def __init__(self, job: Running, wanted: Wanted) -> None:
        self.job = job
        self.over = False
        self._wanted = wanted
        self._observer = Observer()
        self._status: dict[str, Any] = dict(job.status)
        self._silence = ""
        self._others: dict[str, dict[str, Any]] = {}
        self._others_due = 0.0

    def look(self) -> dict[str, Any] | None:
        """The newest that is known; None when the job is over."""
        try:
            answer = self._ask()
        except Gone:
            self.over = True
            return None
        except NoAnswer as silence:
            self._silence = str(silence)
        else:
            self._status, self._silence = complete(answer, self._observer), ""
        return {**self._status, "silent": self._silence or None}

    def _ask(self) -> dict[str, Any]:
        """Raises NoAnswer."""
        if has_other_nodes(self._status) and time.monotonic() >= self._others_due:
            answer = ask_everywhere(self.job, self._wanted)
            self._others = {_name(each): each for each in objects_in(answer, "nodes")}
            self._others_due = time.monotonic() + _EVERYWHERE
            return answer
        answer = ask(self.job.socket, {"ask": "status"}, _PATIENCE)
        nodes = [self._others.get(_name(each), each) for each in objects_in(answer, "nodes")]
        return {**answer, "nodes": nodes}

    def picture(self, columns: int, rows: int) -> list[Text] | None:
        status = self.look()
        if status is None:
            return None
        note = f"the launcher does not answer: {self._silence}; this is from before" if self._silence else ""
        return views.picture(self._wanted.shown(status), columns, rows, time.time(), note)


def _name(node: Mapping[str, Any]) -> str:
    """Of a machine in an answer: what it said before is still of it."""
    return f"{node.get('rank')} {node.get('title')}"
