"""Several nodes that meet in an etcd, and jobs that continue while nodes join and leave: the scenarios."""

from __future__ import annotations

import signal
import time
from functools import partial

from _nodes_job import EVER, Job, Node
from _nodes_play import ENOUGH, START, Scenario, crash, fate, fates, pair, ranks, running, seconds
from _nodes_store import Etcd

_TWO = ("--nnodes", "2")
_SHRINKS = ("--nnodes", "1:2", "--elastic_timeout", "5")


def level(number: int) -> tuple[str, str]:
    return "--elastic_level", str(number)


def start(job: Job) -> str:
    a, b = job.start("A", *_TWO), job.start("B", *_TWO)
    running(job, a, b)
    return f"both run {seconds(b.launched, max(node.trainers[0].started for node in (a, b)))}"


def ends(job: Job) -> str:
    a, b = pair(job, *level(-1), ours=ENOUGH)
    return fates(job, crash(job, b), b, a)


def replaced(job: Job) -> str:
    """Level 0."""
    a, b = pair(job, *level(0))
    old = ranks(a, b)
    moment = crash(job, b)
    job.pause(3)
    held = a.died is None and not a.live
    told = f"{fates(job, moment, b)}; A " + (
        f"stops {seconds(moment, a.trainers[0].died or moment)} and holds" if held else "**does not hold**"
    )
    other = job.start("B2", *_TWO, *level(0))
    if not job.until(lambda: len(a.trainers) > 1 and other.trainers, START):
        return f"{told}; {fate(a, moment)}; {fate(other, other.launched)}"
    again = max(a.trainers[1].started, other.trainers[0].started)
    kept = "ranks kept" if ranks(a, other) == old else "**ranks swapped**"
    return f"{told}; with another in its place both run {seconds(other.launched, again)}, {kept}"


def restarted(job: Job) -> str:
    """Level 1."""
    a, b = pair(job, *level(1))
    moment = crash(job, b)
    if not job.until(lambda: len(a.trainers) > 1 and len(b.trainers) > 1):
        return fates(job, moment, b, a)
    return f"both run again {seconds(moment, max(a.trainers[1].started, b.trainers[1].started))}"


def crashes_on(job: Job, limit: int) -> str:
    words = (*_TWO, *level(1), "--max_restart", str(limit))
    a, b = job.start("A", *words), job.start("B", *words, plan="7")
    job.until(lambda: a.died is not None and b.died is not None, 90)
    ended = [node.died or 0 for node in (a, b)]
    return f"{len(b.trainers)} starts; {_codes(b, a)}; {seconds(b.launched, max(ended))} in all"


def _codes(*nodes: Node) -> str:
    return ", ".join(
        f"{node.name} {node.code}" if node.died is not None else f"**{node.name} for ever**" for node in nodes
    )


def vanishes(job: Job, number: int, ours: tuple[str, ...] = ()) -> str:
    a, b = pair(job, *level(number), "--elastic_timeout", "2", ours=(*ENOUGH, *ours))
    moment = time.monotonic_ns()
    b.vanish()
    trainer = a.trainers[0]
    told = fates(job, moment, a, limit=40)
    if number < 0 or trainer.died is None:
        return told
    return f"A's trainer stopped {seconds(moment, trainer.died)}; {told}"


def scales_out(job: Job) -> str:
    a = job.start("A", *_SHRINKS, *level(1))
    running(job, a, world=1)
    job.pause(1)
    b = job.start("B", *_SHRINKS, *level(1))
    running(job, a, b, world=2)
    stopped, both = a.trainers[0].died or 0, max(node.trainers[-1].started for node in (a, b))
    return (
        f"A's trainer stopped {seconds(b.launched, stopped)} after B's start; "
        f"both run {seconds(stopped, both)} later"
    )


def scales_in(job: Job) -> str:
    a = job.start("A", *_SHRINKS, *level(1))
    job.pause(1.0)
    b = job.start("B", *_SHRINKS, *level(1))
    running(job, a, b, world=2)
    job.pause(0.5)
    moment = time.monotonic_ns()
    last = a.trainer
    b.signal(signal.SIGTERM)
    if not job.until(lambda: a.live and a.trainers[-1].world == 1, 40):
        return fates(job, moment, b, a)
    job.until(lambda: b.died is not None)
    noticed = seconds(moment, last.died or moment)
    return (
        f"{fate(b, moment)}; A's trainer stopped {noticed}, "
        f"runs alone {seconds(last.died or moment, a.trainers[-1].started)} later"
    )


def ends_before(job: Job) -> str:
    a, b = pair(job, *level(1))
    crash(job, b, 0)
    job.until(lambda: a.died is not None)
    early = "" if a.died is None else "; **A did not wait**"
    moment = time.monotonic_ns() if a.died else crash(job, a, 0)
    job.until(lambda: a.died is not None and b.died is not None)
    return f"{_codes(b, a)}; {fate(a, moment)}{early}"


def one_comes(job: Job) -> str:
    a = job.start("A", *_TWO, "--elastic_timeout", "1", ours=("--rdzv_timeout", "3"))
    told = fates(job, a.launched, a, limit=30)
    return f"{told}, **nothing was run**" if a.died is not None and a.code == 0 else told


def store_dies(job: Job, back: float | None) -> str:
    """In an etcd of its own."""
    etcd = Etcd(job.folder / "etcd")
    try:
        job.words = ("--master", etcd.url)
        a, b = pair(job, *level(1), ours=(*ENOUGH, "--elastic_timeout", "5"))
        moment = time.monotonic_ns()
        etcd.die()
        if back is not None:
            job.pause(back)
            etcd.start()
        if job.until(lambda: a.died is not None or b.died is not None):
            return fates(job, moment, a, b)
        same = len(a.trainers) == len(b.trainers) == 1
        told = "the trainers run on" if same else "they start again"
        ended = [crash(job, node, 0) for node in (a, b)]
        return f"{told}; when they end, {fates(job, max(ended), a, b, limit=2 * EVER)}"
    finally:
        etcd.close()


def neighbours(job: Job) -> str:
    other = [job.start(name, *_TWO, job_id=f"{job.id}1") for name in "CD"]
    running(job, *other)
    a, b = job.start("A", *_TWO), job.start("B", *_TWO)
    running(job, a, b)
    job.until(lambda: any(node.died is not None for node in other), 8)
    if any(node.died is not None for node in other):
        fate_of_first = fate(next(node for node in other if node.died is not None), a.launched)
        return f"**`px1` is disturbed**: {fate_of_first}"
    return "both run" if all(len(node.trainers) == 1 for node in other) else "**`px1` starts again**"


SCENARIOS = (
    Scenario("start", "start of 2 nodes", start, alone=True, earlier="1.4-19.6 s"),
    Scenario(
        "level-off", "level -1, B's trainer exits 7", ends, earlier="B exits 7; A exits 241 within about 1 s"
    ),
    Scenario(
        "level-0",
        "level 0, the same; another node 3 s later",
        replaced,
        earlier="B exits 7; A stops 2.9 s and holds; both run 2.9 s after the start, ranks swapped",
    ),
    Scenario("level-1", "level 1, the same", restarted, earlier="both run again 2.0-4 s"),
    Scenario(
        "restart-2",
        "level 1, always crashing, `--max_restart 2`",
        partial(crashes_on, limit=2),
        earlier="4 starts; B 7, A 241",
    ),
    Scenario(
        "restart-3",
        "the same, `--max_restart 3`",
        partial(crashes_on, limit=3),
        earlier="5 starts; B 7, A 241",
    ),
    Scenario(
        "vanish",
        "level -1, node B vanishes",
        partial(vanishes, number=-1),
        earlier="A exits 241 8.1 s",
    ),
    Scenario(
        "vanish-2",
        "the same (ours: `--heartbeat_timeout 2`)",
        partial(vanishes, number=-1, ours=("--heartbeat_timeout", "2")),
        earlier="A exits 241 8.1 s",
    ),
    Scenario(
        "vanish-1",
        "level 1, the same; `--elastic_timeout 2`",
        partial(vanishes, number=1),
        earlier="A stops 8 s; exits 241 28.5 s",
    ),
    Scenario(
        "out",
        "scale out: `--nnodes 1:2`, B joins",
        scales_out,
        earlier="A's trainer stopped 3 s after B's start; both run 2.8 s later",
    ),
    Scenario(
        "in",
        "scale in: SIGTERM to B; `--elastic_timeout 5`",
        scales_in,
        earlier="A stops 7.7 s, runs alone 5.3 s later",
    ),
    Scenario("before", f"B finishes {EVER:.0f} s before A", ends_before, earlier="B 0, A 0"),
    Scenario(
        "lone", "1 of 2 comes (ours: `--rdzv_timeout 3`)", one_comes, earlier="**A exits 0**, nothing was run"
    ),
    Scenario(
        "dies",
        "etcd dies while they train",
        partial(store_dies, back=None),
        earlier="both exit 1 2.9 s, traceback, **trainers left**",
    ),
    Scenario(
        "back",
        "etcd dies and is back 5 s later",
        partial(store_dies, back=5.0),
        earlier="both exit 1 2.9 s, traceback, **trainers left**",
    ),
    Scenario(
        "neighbour", "job `px` starts beside job `px1`", neighbours, earlier="**`px1` is killed**, exit 241"
    ),
)
