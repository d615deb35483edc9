"""What scenarios are made of: how a job comes to run, and how it is told what became of its nodes."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from _nodes_cells import figure
from _nodes_job import EVER, BenchError, Job, Node
from _nodes_store import listens

_LONGEST = 100
START = 60.0
"""Seconds in which a job of healthy nodes must run, or there is nothing to measure."""
ENOUGH = ("--max_restart", "0")
"""Words for ours where no restart is wanted; Paddle does not restart without etcd."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`play` gives a run's text. `alone`: no other job at the same time. `earlier`: an earlier result of
    Paddle, for machines that cannot run it."""

    name: str
    title: str
    play: Callable[[Job], str]
    alone: bool = False
    runs: int | None = None
    earlier: str = ""


def seconds(since: int, until: int) -> str:
    return figure(max(0, until - since) / 1e9)


def serving(job: Job) -> None:
    """Waits until a process listens at the rendezvous address."""
    port = int(job.words[job.words.index("--master") + 1].rpartition(":")[2])
    if not job.looked_for(lambda: listens(port), START):
        raise BenchError("no process listens at the rendezvous endpoint")


def waiting(job: Job, node: Node) -> None:
    """Until it says that it has joined. Raises BenchError."""
    words, joined = job.launcher.waits
    if not job.looked_for(lambda: words in node.output, START):
        raise BenchError(f"{node.name} does not report that it waits")
    job.pause(joined)


def running(job: Job, *nodes: Node, world: int = 2, times: int = 1) -> None:
    """Until each of them has started a trainer in a world of this size so many times. Raises BenchError."""

    def all_run() -> bool:
        return all(len([each for each in node.trainers if each.world == world]) >= times for node in nodes)

    if not job.until(all_run, START):
        last = " | ".join(line for node in nodes for line in node.output.splitlines()[-2:])
        raise BenchError(f"the trainers do not run: {last[-300:]}")


def pair(job: Job, *words: str, ours: tuple[str, ...] = (), plan: str = "") -> tuple[Node, Node]:
    """A, which comes first and, without etcd, serves the others; and B, with `plan`. Both run."""
    a = job.start("A", "--nnodes", "2", *words, ours=ours)
    if job.words[1].startswith("etcd"):
        job.pause(1.0)
    else:
        serving(job)
    b = job.start("B", "--nnodes", "2", *words, ours=ours, plan=plan)
    running(job, a, b)
    job.pause(0.5)
    return a, b


def crash(job: Job, node: Node, code: int = 7) -> int:
    """Its trainer exits so. The moment."""
    victim = node.trainer
    victim.leave(code)
    job.until(lambda: victim.died is not None, 5)
    if victim.dies is None:
        raise BenchError("the trainer does not react to the command")
    return victim.dies


def fates(job: Job, since: int, *nodes: Node, limit: float = EVER) -> str:
    """What became of each of them, counted from a moment."""
    job.until(lambda: all(node.died is not None for node in nodes), limit)
    job.pause(0.3)
    return "; ".join(fate(node, since) for node in nodes)


def fate(node: Node, since: int) -> str:
    if node.died is None:
        return f"**{node.name} {'runs on' if node.live else 'waits'} for ever**"
    left = f", **{len(node.live)} trainer left**" if node.live else ""
    return f"{node.name} {ending(node.code)} {seconds(since, node.died)}{said(node)}{left}"


def ending(code: int) -> str:
    return f"exits {code}" if code >= 0 else f"dies of {signal.Signals(-code).name}"


def said(node: Node) -> str:
    """What its launcher gives as the reason."""
    if node.code == 0:
        return ""
    text = node.output
    if named := re.search(r"^On node (\d+).*?^First failure: (trainer \d+)", text, re.MULTILINE | re.DOTALL):
        return f", names node {named[1]} {named[2]}"
    if stopped := re.findall(r"Pod stopped: \w+, (.*), exit code", text):
        return f', "{_short(stopped[-1])}"'
    if raised := re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception))\b", text, re.MULTILINE):
        return f", traceback {raised[-1]}" if "Traceback" in text else ""
    if told := re.findall(r"^={20,}\n(.*?)^={20,}$", text, re.MULTILINE | re.DOTALL):
        return f', "{_short(told[-1])}"'
    errors = re.findall(
        r"(?:ERROR [-\d]+ [\d:,]+|fleetrun: error:) (?!Pod failed|Container failed)(.*)", text
    )
    return f', "{_short(errors[-1])}"' if errors else ""


def _short(text: str) -> str:
    """Without what differs from run to run and machine to machine."""
    line = text.partition("\n")[0]
    line = re.sub(r"[-\w.]+ \([\d.]+\)", "host", line)
    line = re.sub(r"(?:etcd://)?\d+(?:\.\d+){3}:\d+", "MASTER", line)
    line = re.sub(r" \([A-Z].*", "", line)  # advice
    return line.replace("|", "/")[:_LONGEST]


def ranks(*nodes: Node) -> list[int]:
    """Of their newest trainers."""
    return [node.trainers[-1].rank for node in nodes]
