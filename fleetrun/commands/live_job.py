"""A running job as `fleetrun top` follows it: its newest status, again and again, in a thread of its own;
what other commands say of one of its processes; and the request to start a process again.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fleetrun.commands.everywhere import Where, nodes_of
from fleetrun.commands.find import describe_end, job_title
from fleetrun.commands.live_rows import Process
from fleetrun.commands.status import StatusWatch
from fleetrun.control.client import NoAnswer, Running, ask
from fleetrun.control.usage import objects_in
from fleetrun.errors import LaunchError
from fleetrun.host.interpreter import helper_command, helper_environment
from fleetrun.record.history import UnreadableError, read

Status = dict[str, Any]

_TIMEOUT = 5.0
_LINES = 200
"""Older lines of a log that are shown."""

_CHUNK = 64 << 10


class Feed(threading.Thread):
    """Hands what the launcher answers to `tell`, which is called in this thread; None once the job has ended.
    A launcher that does not answer holds up nothing but this thread.
    """

    def __init__(self, watch: StatusWatch, interval: float, tell: Callable[[Status | None], None]) -> None:
        super().__init__(name="feed", daemon=True)
        self._watch = watch
        self._interval = interval
        self._tell = tell
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            due = time.monotonic() + self._interval
            status = self._watch.look()
            if self._over.is_set():
                return
            self._tell(status)
            if status is None:
                return
            self._over.wait(max(0.0, due - time.monotonic()))

    def end(self) -> None:
        self._over.set()


def end_of(job: Running, last: Mapping[str, Any]) -> tuple[str, Status]:
    """How the job has ended in one sentence, and its last status with the ends of the processes that ran on
    this machine, from the record.
    """
    sentence = f"{job_title(job)} has ended{describe_end(job)}"
    try:
        exits = {
            str(each.get("container")): each for each in read(job.record, but=("progress",)).all("exited")
        }
    except UnreadableError:
        exits = {}
    there = [_ended(each, exits.get(str(each.get("name")))) for each in objects_in(last, "containers")]
    nodes = [
        {**each, "up": 0, "containers": there if each.get("this") is True else _elsewhere(each)}
        for each in objects_in(last, "nodes")
    ]
    return sentence, {**last, "state": "ended", "why": "", "containers": there, "nodes": nodes}


def _elsewhere(node: Mapping[str, Any]) -> list[Status]:
    """How they ended is in the record there."""
    return [_ended(each, None) for each in objects_in(node, "containers")]


def _ended(one: Status, exit: Mapping[str, Any] | None) -> Status:
    gone = dict.fromkeys(("pid", "cpu", "memory", "gpu", "gpu_memory", "rate", "left"))
    code = None if exit is None else exit.get("code")
    if code is not None:
        state = "completed" if code == 0 else "failed"
    else:
        state = "ended" if one.get("alive") is True else str(one.get("state"))
    return {**one, **gone, "alive": False, "state": state, "exit": one.get("exit") if code is None else code}


# ---- Commands of fleetrun about one process, or the job


def _about(job: Running, one: Process) -> list[str]:
    node = [f"--node={one.node}"] if one.node else []
    rank = [f"--rank={one.rank}"] if one.rank is not None else []
    return [job.pod, f"--role={one.role}", *rank, *node]


def stacks_words(job: Running, one: Process) -> list[str]:
    return ["stacks", *_about(job, one)]


def logs_words(job: Running, one: Process) -> list[str]:
    """New lines follow while the job runs."""
    return ["logs", *_about(job, one), f"--lines={_LINES}", "--follow", "--log_dir", str(job.log_dir)]


def stop_words(job: Running, *, now: bool) -> list[str]:
    return ["stop", job.pod, *(["--now"] if now else [])]


class Command(threading.Thread):
    """Runs `fleetrun WORDS`. What it prints, errors too, is handed to `tell` in this thread, which may wait:
    then the command does.
    """

    def __init__(self, words: list[str], tell: Callable[[bytes], None]) -> None:
        super().__init__(name=words[0], daemon=True)
        self._tell = tell
        self._process = subprocess.Popen(
            helper_command("fleetrun", *words),
            env=helper_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as out:
            while data := os.read(out.fileno(), _CHUNK):
                self._tell(data)
        self._process.wait()

    def end(self) -> None:
        """What it is about goes on."""
        self._process.kill()


# ---- Starting processes again


def restart(job: Running, one: Process) -> str:
    """Ask the launcher of this process to start it again, in a collective job with all others. What has been
    done about it, or why nothing has.
    """
    name = str(one.said.get("name"))
    try:
        here = not one.node or any(
            each.get("this") is True and str(each.get("rank")) == one.node
            for each in objects_in(job.status, "nodes")
        )
        if here:
            ask(job.socket, {"ask": "restart", "name": name}, _TIMEOUT)
        else:
            _restart_elsewhere(job, one, name)
    except NoAnswer as why:
        return f"{one.title} was not started again: {why}"
    except LaunchError as error:
        return f"{one.title} was not started again: {error.message}"
    return f"{one.title} starts again"


def _restart_elsewhere(job: Running, one: Process, name: str) -> None:
    """Raises LaunchError."""
    nodes = nodes_of(job, Where(node=int(one.node)))
    assert nodes is not None
    with nodes:
        nodes.ask("restart", {"name": name})
        for rank in nodes.ranks:
            for _ in nodes.pieces(rank):
                pass
        if nodes.trouble:
            raise LaunchError("; ".join(nodes.trouble.values()))


def typed(words: list[str]) -> str:
    """The command line."""
    return shlex.join(["fleetrun", *words])
