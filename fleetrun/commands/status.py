"""`fleetrun status`: show the state of a running job, on this machine and on its other nodes."""

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
from fleetrun.commands.find import complete_running_jobs, describe_end, find_running, job_title
from fleetrun.commands.output import output_width, print_json, print_lines, write
from fleetrun.control.client import STOPPED, Gone, NoAnswer, Running, ask
from fleetrun.control.node_status import unfolded
from fleetrun.control.usage import MOMENT, Observer, objects_in
from fleetrun.errors import LaunchError, UsageError

Status = dict[str, Any]

_TIMEOUT_EVERYWHERE = 6.0
"""Seconds for an answer about all nodes, for which the launcher asks the others; it waits two seconds."""


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """`node`: only the node of this rank. `whole`: list every process, however many nodes there are."""

    node: int | None = None
    whole: bool = False

    def request(self) -> Status:
        one = {} if self.node is None else {"node": self.node}
        return {"ask": "status", "everywhere": True, "all": self.whole, **one}

    def check(self, status: Mapping[str, Any]) -> None:
        """Raises UsageError if there is no such node."""
        ranks = [each.get("rank") for each in objects_in(status, "nodes")] or [0]
        if self.node is None or self.node in ranks:
            return
        known = f"nodes 0 to {len(ranks) - 1}" if len(ranks) > 1 else "one node, 0"
        if status.get("waiting"):
            known = "none yet, because the rendezvous is not complete"
        raise UsageError(f"no node {self.node}: this job has {known}")

    def shown(self, status: Mapping[str, Any]) -> Status:
        """The part of the status to show; `only` is the rank of the chosen node."""
        nodes = objects_in(status, "nodes")
        if self.node is None or len(nodes) < 2:
            return dict(status)
        here = any(each.get("this") is True and each.get("rank") == self.node for each in nodes)
        return {**status, "only": self.node, "containers": status.get("containers") if here else []}


def has_other_nodes(status: Mapping[str, Any]) -> bool:
    """Whether the job has other nodes to ask."""
    return len(objects_in(status, "nodes")) > 1


def ask_everywhere(job: Running, wanted: NodeFilter) -> Status:
    """The launcher's answer, with those of the other nodes. Raises NoAnswer."""
    return ask(job.socket, wanted.request(), _TIMEOUT_EVERYWHERE)


def complete(answer: Mapping[str, Any], observer: Observer) -> Status:
    """The answer with CPU, memory and last lines of local processes added, and all fields for each node."""
    return unfolded(observer.complete(answer))


_TIMEOUT = 1.0  # seconds for an answer about this node with --watch
_EVERYWHERE_INTERVAL = 3.0  # seconds between two requests to the other nodes with --watch


class SilentError(LaunchError):
    """The launcher does not answer."""

    exit_code = 3


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False, shell_complete=complete_running_jobs)
@click.option("--watch", is_flag=True, help="Keep updating until q or Ctrl-C.")
@click.option(
    "--interval", type=float, default=1.0, show_default=True, metavar="SECONDS",
    help="Seconds between two updates with --watch.",
)  # fmt: skip
@click.option("--node", type=click.IntRange(min=0), metavar="N", help="Only the processes of this node.")
@click.option("--all", "whole", is_flag=True, help="All processes, even of many nodes.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON, with --watch one per update.")
def command(
    job: str | None, watch: bool, interval: float, node: int | None, whole: bool, as_json: bool
) -> int:
    """Show the state of a running job: its processes, their resource usage, progress and last output.

    JOB is a job's name, pod, script or folder. Without it, the job of this folder is meant.

    Each process is one line: role and number, rank if it differs from the number, pid, state, time since its
    start, restarts, CPU (percent of one core), memory, GPU, and what it reported: step, loss, samples per
    second. Columns that are empty or do not fit are left out; --json has all.

    For a job on several machines the launcher asks the other launchers and waits two seconds at most. CPU,
    memory and last output are known for this machine only. If there are more than 16 nodes, each node is one
    line unless --node or --all is given.

    \b
    Examples:
      fleetrun status
      fleetrun status resnet --watch
      fleetrun status --node 3
      fleetrun status --json | jq '.containers[] | {name, step, loss}'

    \b
    Exit codes:
      0  the job is running (with --watch: or has ended)
      1  there is no such job
      2  JOB fits several jobs
      3  the launcher does not answer: it is stopped (Ctrl-Z) or very busy
    """
    if not 0.1 <= interval <= 3600:  # false for nan too
        raise click.BadParameter(f"--interval is {interval:g}; it must be 0.1 to 3600 seconds")
    found = answering(find_running(job))
    wanted = NodeFilter(node, whole)
    wanted.check(found.status)
    if watch:
        return _watch(StatusWatch(found, wanted), interval, as_json)
    _show(found, wanted, as_json)
    return 0


def _show(job: Running, wanted: NodeFilter, as_json: bool) -> None:
    observer = Observer()
    time.sleep(MOMENT)
    status = complete(newest_answer(job, wanted), observer)
    if as_json:
        print_json(status)
    else:
        _print(wanted.shown(status))


def newest_answer(job: Running, wanted: NodeFilter) -> Mapping[str, Any]:
    """The answer about all nodes; the known one if there is one node only, or the job has just ended."""
    if has_other_nodes(job.status):
        with contextlib.suppress(NoAnswer):
            return ask_everywhere(job, wanted)
    return job.status


def answering(job: Running) -> Running:
    """The same. Raises SilentError if its launcher does not answer."""
    if job.silence:
        name = job.job or f"pod {job.pod}"
        remedy = "`fg` in its shell continues it, `fleetrun stop` ends it."
        raise SilentError(
            f"{name} is running (pod {job.pod}, pid {job.pid}); its launcher does not answer: {job.silence}",
            hint=remedy if job.silence == STOPPED else None,
        )
    return job


def _print(status: dict[str, Any]) -> None:
    width = output_width()
    apart = [Text("")] if views.nodes_with_details(status) else []
    lines = [*views.heading_lines(status, width), *apart, *views.process_lines(status, width)]
    last = [] if any("LAST LINE" in line.plain for line in lines) else views.last_lines(status, width)
    print_lines([*lines, *([Text("")] if last else []), *last])


def _watch(view: StatusWatch, interval: float, as_json: bool) -> int:
    if as_json:
        return _stream(view, interval)
    dumb = os.environ.get("TERM", "dumb") == "dumb"
    if output_width() is None or dumb:
        what = "a terminal" if output_width() is None else "a terminal that is not dumb (TERM)"
        raise UsageError(f"--watch needs {what}", hint="With --json it works without a terminal.")
    from fleetrun.commands.live import show

    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
    number = show(view.picture, interval, sys.stdout.fileno(), keys)
    if view.over:
        write(f"{job_title(view.job)} has ended{describe_end(view.job)}\n")
    return 128 + number if number not in (0, signal.SIGINT) else 0


def _stream(view: StatusWatch, interval: float) -> int:
    """Until the job has ended."""
    while (status := view.look()) is not None:
        print_json(status)
        time.sleep(interval)
    return 0


class StatusWatch:
    """The newest status of a job; other nodes are asked less often. `over` is set when the job has ended."""

    def __init__(self, job: Running, wanted: NodeFilter) -> None:
        self.job = job
        self.over = False
        self._wanted = wanted
        self._observer = Observer()
        self._status: dict[str, Any] = dict(job.status)
        self._silence = ""
        self._others: dict[str, dict[str, Any]] = {}
        self._others_due = 0.0

    def look(self) -> dict[str, Any] | None:
        """The newest status; None if the job has ended."""
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
            self._others_due = time.monotonic() + _EVERYWHERE_INTERVAL
            return answer
        answer = ask(self.job.socket, {"ask": "status"}, _TIMEOUT)
        nodes = [self._others.get(_name(each), each) for each in objects_in(answer, "nodes")]
        return {**answer, "nodes": nodes}

    def picture(self, columns: int, rows: int) -> list[Text] | None:
        status = self.look()
        if status is None:
            return None
        note = (
            f"the launcher does not answer: {self._silence}; this is the last known state"
            if self._silence
            else ""
        )
        return views.screen_lines(self._wanted.shown(status), columns, rows, time.time(), note)


def _name(node: Mapping[str, Any]) -> str:
    """Identifies a node across answers."""
    return f"{node.get('rank')} {node.get('title')}"
