"""The `fleetrun status` command shows the state of a running job, on this node and on its other nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

import click
from rich.text import Text

from fleetrun.aliases import Document, Fields
from fleetrun.commands import views
from fleetrun.commands.everywhere import Nodes, node_options, nodes_at, read_where
from fleetrun.commands.find import find_running, interval_option, json_option, running_job
from fleetrun.commands.output import output_width, picked, print_json, print_lines
from fleetrun.control.client import STOPPED, NoAnswer, NoLauncher, Running, ask
from fleetrun.control.node_status import MANY, sound_summary, unfolded
from fleetrun.control.usage import MOMENT, Observer
from fleetrun.errors import LaunchError, UsageError
from fleetrun.frozen import frozen
from fleetrun.record.journal import objects_in

Status = Document

_TIMEOUT_EVERYWHERE = 6.0
"""Seconds to wait for an answer about all nodes. The launcher waits two seconds for the other nodes."""


@frozen
class NodeFilter:
    """The nodes and processes to show."""

    node: int | None = None
    """Rank of the only node to show."""
    whole: bool = False
    """List every process, however many nodes exist."""
    here: bool = False
    """Do not ask other nodes."""

    def request(self) -> Status:
        one = {} if self.node is None else {"node": self.node}
        return {"ask": "status", "everywhere": True, "all": self.whole, **one}

    def check(self, status: Fields) -> None:
        """Raise UsageError if the node does not exist."""
        ranks = [each.get("rank") for each in objects_in(status, "nodes")] or [0]
        if self.node is None or self.node in ranks:
            return
        known = f"nodes 0 to {len(ranks) - 1}" if len(ranks) > 1 else "one node, 0"
        if status.get("waiting"):
            known = "none yet, because the rendezvous is not complete"
        raise UsageError(f"no node {self.node}: this job has {known}")

    def shown(self, status: Fields) -> Status:
        """Return the part of the status to show. `only` is the rank of the chosen node."""
        nodes = objects_in(status, "nodes")
        if self.node is None or len(nodes) < 2:
            return dict(status)
        here = any(each.get("this") is True and each.get("rank") == self.node for each in nodes)
        return {**status, "only": self.node, "containers": status.get("containers") if here else []}


def has_other_nodes(status: Fields) -> bool:
    """Return True if the job has other nodes."""
    return len(objects_in(status, "nodes")) > 1


def ask_everywhere(job: Running, wanted: NodeFilter) -> Status:
    """Return the launcher's answer, with the answers of the other nodes. Raises NoAnswer."""
    return ask(job.socket, wanted.request(), _TIMEOUT_EVERYWHERE)


_TIMEOUT = 1.0  # seconds for an answer about this node, which is queried repeatedly
_EVERYWHERE_INTERVAL, _MANY_INTERVAL = 3.0, 10.0  # seconds between two requests to the other nodes


class SilentError(LaunchError):
    """The launcher does not answer."""

    exit_code = 3


@click.command()
@running_job
@click.option("--watch", is_flag=True, help="With --json, print a line for each update until the job ends.")
@interval_option(help="Seconds between two updates with --watch.")
@click.option("--all", "whole", is_flag=True, help="Show all processes, even of many nodes.")
@json_option(help="Print one line of JSON.")
@node_options
def command(
    job: str | None, watch: bool, interval: float, whole: bool, in_json: bool, **options: object
) -> int:
    """Show the state of a running job: its processes, their resource usage, progress and last output.

    JOB is a job's name, run ID (pod), script or directory. The default is the job of this directory.

    Each process is one line: role and number, rank if it differs from the number, pid, state, time since its
    start, restarts, CPU (percent of one core), memory, GPU, and its reported step, loss and samples per
    second. The command hides columns that are empty or do not fit. --json prints all values.

    For a job on several nodes, the launcher asks the other launchers, and waits at most two seconds. CPU,
    memory and last output are available only for this node, or with --job for all nodes. If the job has more
    than 16 nodes, each node is one line unless you set --node or --all. `fleetrun top` shows the same live.

    \b
    Examples:
      fleetrun status
      fleetrun status --node 3
      fleetrun status --job h1:6768/resnet --token_file secret
      fleetrun status --json | jq '.containers[] | {name, step, loss}'

    \b
    Exit codes:
      0  the job is running (with --watch: has ended)
      1  no such job exists; with --job: a node does not answer
      2  several jobs match JOB
      3  the launcher does not answer: it is stopped (Ctrl-Z) or very busy
    """
    check_interval(interval)
    where = read_where(options, {"JOB": job, "--watch": watch or None})
    if where.url is not None:
        with nodes_at(where) as nodes:
            return _show_of(nodes, in_json)
    if watch and not in_json:
        raise UsageError(
            "--watch is for --json, one line for each update", hint="Use `fleetrun top` for a live view."
        )
    found = answering(find_running(job))
    wanted = NodeFilter(where.node, whole, where.here)
    wanted.check(found.status)
    if watch:
        return _stream(StatusWatch(found, wanted), interval)
    _show(found, wanted, in_json)
    return 0


def check_interval(interval: float) -> None:
    """Check the interval, in seconds. Raises BadParameter."""
    if not 0.1 <= interval <= 3600:  # also false for nan
        raise click.BadParameter(f"--interval is {interval:g}; it must be 0.1 to 3600 seconds")


def _show(job: Running, wanted: NodeFilter, in_json: bool) -> None:
    observer = Observer()
    time.sleep(MOMENT)
    status = unfolded(observer.complete(newest_answer(job, wanted)))
    if in_json:
        print_json(status)
    else:
        _print(wanted.shown(status))


def _show_of(nodes: Nodes, in_json: bool) -> int:
    """Show a job on other hosts. Return the exit code."""
    nodes.ask("status", {"json": True})
    latest = {rank: found for rank in nodes.ranks if (found := nodes.answer(rank)) is not None}
    status = status_of_nodes(nodes, latest, lambda rank: None if rank in latest else "no answer")
    if latest and in_json:
        print_json(status)
    elif latest:
        _print(status)
    return nodes.report()


def status_of_nodes(
    nodes: Nodes, latest: Mapping[int, Status], silence: Callable[[int], str | None]
) -> Status:
    """Combine the answers of the nodes, by rank, into the status of the whole job.

    `silence` returns the reason why a node does not answer.
    """
    first = next((latest[rank] for rank in nodes.ranks if rank in latest), {})
    found = []
    for rank in nodes.ranks:
        answer = latest.get(rank, {})
        about = {"rank": rank, "title": nodes.host(rank), "this": False}
        kept = picked(answer, "containers", "late")
        why = nodes.trouble.get(rank) or silence(rank)
        found.append({**sound_summary(answer), **kept, **about, "silent": why})
    return {**first, "containers": [], "nodes": found}


def newest_answer(job: Running, wanted: NodeFilter) -> Fields:
    """Return the newest answer about all nodes.

    Return the existing status if the job has one node, or has just ended.
    """
    if has_other_nodes(job.status) and not wanted.here:
        with contextlib.suppress(NoAnswer):
            return ask_everywhere(job, wanted)
    return job.status


def answering(job: Running) -> Running:
    """Return the job. Raises SilentError if its launcher does not answer."""
    if job.silence:
        name = job.job or f"pod {job.pod}"
        remedy = "Run `fg` in its shell to continue the job, or `fleetrun stop` to end it."
        raise SilentError(
            f"{name} is running (pod {job.pod}, pid {job.pid}); its launcher does not answer: {job.silence}",
            hint=remedy if job.silence == STOPPED else None,
        )
    return job


def _print(status: Status) -> None:
    width = output_width()
    apart = [Text("")] if views.nodes_with_details(status) else []
    lines = [*views.heading_lines(status, width), *apart, *views.process_lines(status, width)]
    last = [] if any("LAST LINE" in line.plain for line in lines) else views.last_lines(status, width)
    print_lines([*lines, *([Text("")] if last else []), *last])


def _stream(view: StatusWatch, interval: float) -> int:
    """Print a line for each update until the job has ended."""
    while (status := view.look()) is not None:
        print_json(status)
        time.sleep(interval)
    return 0


class StatusWatch:
    """Fetches the newest status of a job repeatedly. It queries the other nodes less often."""

    def __init__(self, job: Running, wanted: NodeFilter) -> None:
        self.job = job
        self._wanted = wanted
        self._observer = Observer()
        self._status: Status = dict(job.status)
        self._silence = ""
        self._last_seen = time.monotonic()
        self._others: dict[str, Status] = {}
        self._others_due = 0.0

    @property
    def silent_for(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._last_seen

    def look(self) -> Status | None:
        """Return the newest status, or None if the job has ended."""
        try:
            answer = self._ask()
        except NoLauncher:
            return None
        except NoAnswer as silence:
            self._silence = str(silence)
        else:
            self._status, self._silence = unfolded(self._observer.complete(answer)), ""
            self._last_seen = time.monotonic()
        return {**self._wanted.shown(self._status), "silent": self._silence or None}

    def _ask(self) -> Status:
        """Ask the launcher, and now and then the other nodes. Raises NoAnswer."""
        others = has_other_nodes(self._status) and not self._wanted.here
        if others and time.monotonic() >= self._others_due:
            answer = ask_everywhere(self.job, self._wanted)
            self._others = {_name(each): each for each in objects_in(answer, "nodes")}
            few = len(self._others) <= MANY
            self._others_due = time.monotonic() + (_EVERYWHERE_INTERVAL if few else _MANY_INTERVAL)
            return answer
        answer = ask(self.job.socket, {"ask": "status"}, _TIMEOUT)
        nodes = [self._others.get(_name(each), each) for each in objects_in(answer, "nodes")]
        return {**answer, "nodes": nodes}


def _name(node: Fields) -> str:
    """Return a name that identifies a node across answers."""
    return f"{node.get('rank')} {node.get('title')}"
