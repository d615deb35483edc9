"""A running job as `fleetrun top` follows it. A thread fetches the newest status again and again. Other
commands report on one process or restart it.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fleetrun.aliases import Callback, Document, Fields
from fleetrun.commands.everywhere import Documents, Nodes, Where, nodes_at, nodes_of, own_rank
from fleetrun.commands.find import describe_end, job_title
from fleetrun.commands.live_rows import Process
from fleetrun.commands.status import StatusWatch, status_of_nodes
from fleetrun.control.client import NoAnswer, Running, ask
from fleetrun.envs.contract import TOKEN
from fleetrun.errors import LaunchError
from fleetrun.frozen import frozen
from fleetrun.host.interpreter import helper_command, helper_environment
from fleetrun.record.history import UnreadableError, read
from fleetrun.record.journal import objects_in

Status = Document

_TIMEOUT = 5.0
_LINES = 200
"""Number of older log lines to show."""

_CHUNK = 64 << 10


def follow(
    watch: StatusWatch | RemoteWatch,
    interval: float,
    show: Callable[[Status | None], object],
    over: threading.Event,
) -> None:
    """Pass each status of the launcher to `show`, and None once the job has ended. Return when `over` is set.

    Call it in a separate thread, because a launcher may not answer.
    """
    due = 0.0
    while not over.wait(max(0.0, due - time.monotonic())):
        due = time.monotonic() + interval
        status = watch.look()
        if not over.is_set():
            show(status)
        if status is None:
            return


def end_of(job: Running, last: Fields) -> tuple[str, Status]:
    """Describe in one sentence how the job ended. Also return its last status, with the ends of the processes
    of this node taken from the event log.
    """
    if not job.pod:
        if job.silence:
            lost = f"lost the connection to {job.job}, which may still run: {job.silence}"
            return lost, dict(last)
        sentence = f"{job.job} has ended; `fleetrun report` on one of its nodes shows how"
    else:
        sentence = f"{job_title(job)} has ended{describe_end(job)}"
    exits: dict[str, Fields] = {}
    # for a job on other hosts, the event logs there describe the end
    with contextlib.suppress(UnreadableError):
        if job.pod:
            exits = {str(each.get("container")): each for each in read(job.record).all("exited")}
    there = [_ended(each, exits.get(str(each.get("name")))) for each in objects_in(last, "containers")]
    nodes = [
        {
            **each,
            "up": 0,
            "containers": there
            if each.get("this") is True
            else [_ended(one, None) for one in objects_in(each, "containers")],
        }
        for each in objects_in(last, "nodes")
    ]
    return sentence, {**last, "state": "ended", "why": "", "containers": there, "nodes": nodes}


def _ended(one: Status, exit: Fields | None) -> Status:
    blank = dict.fromkeys(("pid", "cpu", "memory", "gpu", "gpu_memory", "rate", "left"))
    code = None if exit is None else exit.get("code")
    if code is not None:
        state = "completed" if code == 0 else "failed"
    else:
        state = "ended" if one.get("alive") is True else str(one.get("state"))
    return {**one, **blank, "alive": False, "state": state, "exit": one.get("exit") if code is None else code}


# ---- A job that may run on other hosts only


class RemoteWatch:
    """The counterpart of `StatusWatch` for nodes that are reached through the job's store.

    `name` is the job's name.
    """

    def __init__(self, nodes: Nodes, name: str, interval: float) -> None:
        self.job = Running(job=name, pod="", log_dir=Path(), socket=Path(), pid=0)
        self._nodes = nodes
        self._interval = interval
        self._documents = {rank: Documents() for rank in nodes.ranks}
        self._latest: dict[int, tuple[Status, float]] = {}
        """The last answer of each node, and its time."""
        self._last_seen = time.monotonic()
        nodes.ask("status", {"json": True, "watch": True, "interval": interval}, math.inf)

    @property
    def silent_for(self) -> float:
        """Seconds since the last answer of any node."""
        return time.monotonic() - self._last_seen

    def look(self) -> Status | None:
        """Return the newest status.

        Return None if all nodes have left the job or stopped answering. `job.silence` then holds the reason.
        """
        for rank, data in self._nodes.arrived(0.0):
            for document in self._documents[rank].of(data):
                if isinstance(document, dict):
                    self._last_seen = time.monotonic()
                    self._latest[rank] = document, self._last_seen
        if not self._nodes.open:
            if self._nodes.trouble:
                why = "; ".join(dict.fromkeys(self._nodes.trouble.values()))
                self.job = replace(self.job, silence=why)
            return None
        latest = {rank: document for rank, (document, _) in self._latest.items()}
        silent = "no node of the job answers" if self.silent_for > _SILENT + 2 * self._interval else None
        return {**status_of_nodes(self._nodes, latest, self._silence), "silent": silent}

    def _silence(self, rank: int) -> str | None:
        last_seen = self._latest[rank][1] if rank in self._latest else None
        age = self.silent_for if last_seen is None else time.monotonic() - last_seen
        return f"no answer for {age:.0f} s" if age > _SILENT + 2 * self._interval else None


_SILENT = 3.0
"""Seconds, beyond two updates, after which a node counts as silent."""


# ---- Commands of fleetrun about one process, or the job


@frozen
class Asked:
    """Builds command lines for the job. They name it by its run ID here, or by the URL in `where`."""

    job: Running
    where: Where

    @property
    def words(self) -> list[str]:
        """The words that name the job on a command line."""
        where = self.where
        if where.url is None:
            return [self.job.pod]
        return [f"--job={where.url}", *([f"--token_file={where.token_file}"] if where.token_file else [])]

    def stacks(self, one: Process) -> list[str]:
        return ["stacks", *self.words, *_which(one)]

    def logs(self, one: Process) -> list[str]:
        """Return a command that also follows new lines while the job runs."""
        place = ["--log_dir", str(self.job.log_dir)] if self.where.url is None else []
        return ["logs", *self.words, *_which(one), f"--lines={_LINES}", "--follow", *place]

    def stop(self, *, now: bool) -> list[str]:
        return ["stop", *self.words, *(["--now"] if now else [])]

    def restart(self, one: Process) -> str:
        """Restart one process through its launcher. In a collective job, all processes restart.

        Return a sentence for the user about the result.
        """
        name = str(one.fields.get("name"))
        try:
            if self.where.url is None and (not one.node or str(own_rank(self.job)) == one.node):
                ask(self.job.socket, {"ask": "restart", "name": name}, _TIMEOUT)
            else:
                self._restart_elsewhere(one, name)
        except NoAnswer as why:
            return f"{one.title} was not started again: {why}"
        except LaunchError as error:
            return f"{one.title} was not started again: {error.message}"
        return f"{one.title} starts again"

    def _restart_elsewhere(self, one: Process, name: str) -> None:
        """Restart a process of another node. Raises LaunchError."""
        where = replace(self.where, node=int(one.node))
        nodes = nodes_of(self.job, where) if where.url is None else nodes_at(where)
        assert nodes is not None
        with nodes:
            nodes.ask("restart", {"name": name})
            nodes.settle()
            if nodes.trouble:
                raise LaunchError("; ".join(nodes.trouble.values()))


def _which(one: Process) -> list[str]:
    node = [f"--node={one.node}"] if one.node else []
    rank = [f"--rank={one.rank}"] if one.rank is not None else []
    return [f"--role={one.role}", *rank, *node]


def start_command(words: list[str], show: Callable[[bytes], None]) -> Callback:
    """Run `fleetrun WORDS`, and pass its output, with errors, to `show` in another thread. If `show` blocks,
    the command waits.

    Return a function that kills the command. The job continues.
    """
    secret = {TOKEN: os.environ[TOKEN]} if TOKEN in os.environ else {}  # for a job on other hosts
    process = subprocess.Popen(
        helper_command("fleetrun", *words),
        env={**helper_environment(), **secret},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    output = process.stdout

    def read_output() -> None:
        with output:
            while data := os.read(output.fileno(), _CHUNK):
                show(data)
        process.wait()

    threading.Thread(target=read_output, name=words[0], daemon=True).start()
    return process.kill
