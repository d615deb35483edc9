"""Several nodes that meet at the launcher of the first: the scenarios."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from functools import partial

from _nodes_cells import figure
from _nodes_job import EVER, Job, Node
from _nodes_play import (
    ENOUGH,
    START,
    Scenario,
    crash,
    fate,
    fates,
    pair,
    ranks,
    running,
    seconds,
    serving,
    waiting,
)

_TWO = ("--nnodes", "2")
_NOBODY = "192.0.2.1:6768"
"""An address for documentation: no machine of anybody's."""
_CUT_OFF = (
    "unshare", "--map-root-user", "--net", "sh", "-c",
    'ip link set lo up; ip addr add 10.0.0.1/24 dev lo; ip route add unreachable 192.0.2.0/24; exec "$@"',
    "sh",
)  # fmt: skip
"""In a network of its own, in which that address is told to be unreachable. Else it may be refused or
silent, as the machine's network has it."""


def both_fine(job: Job) -> str:
    a, b = job.start("A", *_TWO), job.start("B", *_TWO)
    running(job, a, b)
    both = max(node.trainers[0].started for node in (a, b))
    job.pause(0.5)
    moments = [crash(job, node, 0) for node in (a, b)]
    return f"both trainers started {seconds(b.launched, both)}; {fates(job, max(moments), a, b)}"


def trainer_crashes(job: Job, victim: int) -> str:
    nodes = pair(job, ours=ENOUGH)
    moment = crash(job, nodes[victim])
    return fates(job, moment, nodes[victim], nodes[1 - victim])


def launcher_signalled(job: Job, number: signal.Signals) -> str:
    a, b = pair(job, ours=ENOUGH)
    moment = time.monotonic_ns()
    a.signal(number)
    if number != signal.SIGKILL:
        return fates(job, moment, a, b)
    told = fates(job, moment, b)
    trainer = "**A's trainer left**" if a.live else "A's trainer gone"
    return f"{trainer}; {told}"


def one_comes(job: Job) -> str:
    a = job.start("A", *_TWO, ours=("--rdzv_timeout", "3"))
    return fates(job, a.launched, a)


def unreachable(job: Job) -> str:
    a = job.start("A", *_TWO, "--master", _NOBODY, ours=("--rdzv_timeout", "15"), within=_cut_off())
    job.pause(3)
    before = a.cpu()
    job.pause(10)
    used = figure(a.cpu() - before, "CPU s in 10 s")
    return f"{used}; {fates(job, a.launched, a)}"


def _cut_off() -> tuple[str, ...]:
    """Nothing where this user may not have one."""
    possible = shutil.which("unshare") and shutil.which("ip")
    if possible and subprocess.run([*_CUT_OFF, "true"], check=False, capture_output=True).returncode == 0:
        return _CUT_OFF
    return ()


def signal_while_waiting(job: Job, number: signal.Signals) -> str:
    a = job.start("A", *_TWO)
    serving(job)
    job.pause(1.0)
    moment = time.monotonic_ns()
    a.signal(number)
    return fates(job, moment, a)


def third_joins(job: Job) -> str:
    a, b = pair(job)
    c = job.start("C", *_TWO)
    told = fates(job, c.launched, c)
    return f"{told}; {_undisturbed(a, b)}"


def _undisturbed(*nodes: Node) -> str:
    fine = all(node.died is None and len(node.trainers) == 1 and node.live for node in nodes)
    names = " and ".join(node.name for node in nodes)
    return f"{names} not disturbed" if fine else f"**{names} disturbed**"


def three_for_two(job: Job) -> str:
    nodes = [job.start(name, *_TWO) for name in "ABC"]

    def settled() -> bool:
        return all(node.trainers or node.died is not None for node in nodes)

    job.until(settled)
    run = sum(bool(node.live) for node in nodes)
    ended = [node for node in nodes if node.died is not None]
    for node in ended:
        node.name = "the third"
    waiting_on = len(nodes) - run - len(ended)
    told = [f"{run} run", *(fate(node, node.launched) for node in ended)]
    return "; ".join([*told, *([f"**{waiting_on} wait for ever**"] if waiting_on else [])])


def ghost(job: Job) -> str:
    """B dies while the nodes meet."""
    three = ("--nnodes", "3")
    a = job.start("A", *three)
    serving(job)
    b = job.start("B", *three)
    waiting(job, b)
    b.vanish()
    job.until(lambda: b.died is not None, 5)
    nodes = [a, job.start("B2", *three), job.start("C", *three)]
    if job.until(lambda: all(node.trainers for node in nodes)):
        found = sorted(ranks(*nodes))
        last = max(node.trainers[0].started for node in nodes)
        return f"the three run {seconds(nodes[-1].launched, last)} later, ranks {', '.join(map(str, found))}"
    run = sum(bool(node.live) for node in nodes)
    rest = [fate(node, nodes[-1].launched) for node in nodes if node.died is not None]
    return "; ".join([f"**{run} run with a ghost, {3 - run - len(rest)} wait for ever**", *rest])


def ranks_collide(job: Job, second: str) -> str:
    """A has no peer then: how it ends is a matter of its timeout."""
    patience = ("--rdzv_timeout", "10")
    a = job.start("A", *_TWO, "--rank", "0", ours=patience)
    serving(job)
    b = job.start("B", *_TWO, "--rank", second, ours=patience)
    return fates(job, b.launched, b, a)


def no_master(job: Job) -> str:
    job.words = ()
    a = job.start("A", *_TWO, "--host", "127.0.0.1")
    found: list[str] = []

    def printed() -> bool:
        found[:] = re.findall(r"--master[= ](\S+)", a.output)
        return bool(found)

    if not job.looked_for(printed):
        return "prints no command"
    b = job.start("B", *_TWO, "--master", found[0], "--host", "127.0.0.1")
    if not job.until(lambda: a.trainers and b.trainers, START):
        return f"prints the command; {fate(a, a.launched)}; {fate(b, b.launched)}"
    both = max(node.trainers[0].started for node in (a, b))
    return f"prints the command; both run {seconds(b.launched, both)} after it was used"


SCENARIOS = (
    Scenario("fine", "both fine, started together", both_fine, alone=True),
    Scenario("b-crashes", "B's trainer exits 7", partial(trainer_crashes, victim=1)),
    Scenario("a-crashes", "A's trainer exits 7", partial(trainer_crashes, victim=0)),
    Scenario("a-killed", "kill -9 of A's launcher", partial(launcher_signalled, number=signal.SIGKILL)),
    Scenario("a-term", "SIGTERM to A's launcher", partial(launcher_signalled, number=signal.SIGTERM)),
    Scenario("one", "1 of 2 comes (ours: `--rdzv_timeout 3`)", one_comes),
    Scenario(
        "unreachable", "no master at its address (ours: `--rdzv_timeout 15`)", unreachable, alone=True, runs=1
    ),
    Scenario("term", "SIGTERM while waiting", partial(signal_while_waiting, number=signal.SIGTERM)),
    Scenario("int", "SIGINT while waiting", partial(signal_while_waiting, number=signal.SIGINT)),
    Scenario("third", "a third comes to a job of 2", third_joins),
    Scenario("three", "3 start at once for 2", three_for_two),
    Scenario("ghost", "B of 3 is killed while they meet, and started again", ghost),
    Scenario(
        "duplicate", "A and B want rank 0 (ours: `--rdzv_timeout 10`)", partial(ranks_collide, second="0")
    ),
    Scenario("range", "B wants rank 2 of 2 (ours: the same)", partial(ranks_collide, second="2")),
    Scenario("no-master", "no `--master`", no_master, runs=1),
)
assert EVER > 15.0, "who gives up after 15 s must be seen to"
