"""Three hosts serve the store together (`--master H1,H2,H3`): none of them is needed, a majority is."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fleetrun.proc import read_stat
from tests.support.command import FLEETRUN, Launch
from tests.support.hosts import Host, needs_hosts
from tests.support.nodes import Nodes, codes, go, needs_etcd
from tests.support.traces import cgroup_of, wait_until

pytestmark = [*needs_hosts, pytest.mark.slow, needs_etcd, pytest.mark.timeout(300)]

ELASTIC = ("--elastic_timeout", "60", "--stop_timeout", "3")
WORK = """
leave_on_term()
tell("in", "world", os.environ["WORLD_SIZE"])
wait_for_go()
tell("done")
"""
# While a generation runs, its processes write when they did, by the clock that all hosts here share.
TICKING = """
ignore(signal.SIGTERM)
with open("TICKS", "a", buffering=1) as file:
    file.write(f"{SIZE} {time.monotonic()}\\n")
    tell("in", "world", os.environ["WORLD_SIZE"])
    while not Path("TICKS.enough").exists():
        file.write(f"{SIZE} {time.monotonic()}\\n")
        time.sleep(0.01)
"""


@pytest.fixture
def together(three: Nodes) -> Nodes:
    """They all serve it."""
    three.master = ",".join(host.address for host in three.hosts)
    return three


def start(nodes: Nodes, number: int, *words: str, nnodes: str = "2:3") -> Launch:
    return nodes.start(number, *ELASTIC, *words, nnodes=nnodes)


def in_world(launches: Sequence[Launch], size: int) -> None:
    for launch in launches:
        try:
            launch.until(lambda launch=launch: last(launch) == str(size), f"in world {size}")
        except AssertionError:
            raise AssertionError("\n".join(map(str, launches))) from None  # another one may say why


def last(launch: Launch) -> str:
    return "".join(launch.told("in world")[-1:]).rpartition(" ")[2]


def lose(host: Host) -> None:
    """The machine: cut off first, so that nothing says goodbye."""
    host.link_down()
    kill_all(host)


def kill_all(host: Host) -> None:
    """Its cgroups go, too: where guard and launcher are killed at once, they stay until the next launch."""
    groups = [group for pid in host.pids() for group in cgroup_of(pid)]

    def killed() -> bool:
        pids = host.pids()
        for pid in pids:
            kill(pid)
        return not pids

    wait_until(killed)
    for group in groups:
        wait_until(lambda group=group: is_removed(group))


def is_removed(group: Path) -> bool:
    """A process that is ending keeps it a moment longer than its network."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def pids_of(host: Host, name: str) -> list[int]:
    """Those of a program, or with this word in their command."""
    found = []
    for pid in host.pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            runs = read_stat(pid).name.strip("()") == name
        except (OSError, ProcessLookupError):
            continue
        if runs or name in words:
            found.append(pid)
    return found


def test_any_machine_of_the_store_may_be_lost_one_after_the_other(together: Nodes):
    """The one that comes back serves the store again, so that another one may go. Where it cannot reach the
    others at first, it begins a store that nobody uses, and leaves it.
    """
    patient = (
        "--heartbeat_timeout=30"  # a slow machine needs some of it to enter, and the test stops it for 4 s
    )
    together.script(WORK)
    launches = [start(together, number, patient) for number in range(3)]
    in_world(launches, 3)
    lose(together.hosts[0])
    in_world(launches[1:], 2)
    launches[0].wait()
    launches[0] = start(together, 0, patient)
    launches[0].until_err(f"missing: {together.hosts[1].address}")
    together.hosts[0].heal()
    wait_until(lambda: pids_of(together.hosts[0], "existing"))  # etcd, told that the others let it in
    [entering, *_] = pids_of(together.hosts[0], "existing")
    kill(entering, signal.SIGSTOP)  # a slow machine: the next one is lost before it has entered
    in_world(launches, 3)
    lose(together.hosts[2])
    time.sleep(4)
    kill(entering, signal.SIGCONT)
    in_world(launches[:2], 2)
    go(launches[:2])
    assert codes(launches[:2]) == [0, 0], launches


def test_two_parts_of_a_job_never_run_at_the_same_time(together: Nodes, tmp_path: Path):
    """Its processes do not leave at SIGTERM, and yet the minority has ended before the others go on."""
    ticks = tmp_path / "ticks"
    together.script(TICKING.replace("TICKS", str(ticks)))
    launches = [start(together, number) for number in range(3)]
    in_world(launches, 3)
    together.hosts[0].partition_from(*together.hosts[1:])
    in_world(launches[1:], 2)
    assert launches[0].wait() == 125, launches[0]
    ticks.with_suffix(".enough").touch()
    assert codes(launches[1:]) == [0, 0]
    times = [line.split() for line in ticks.read_text().splitlines()]
    before = max(float(time) for size, time in times if size == "3")
    assert before < min(float(time) for size, time in times if size == "2")


def test_without_a_majority_all_processes_end(together: Nodes):
    together.script(WORK)
    launches = [start(together, number) for number in range(3)]
    in_world(launches, 3)
    for host in together.hosts[1:]:
        host.link_down()
    assert codes(launches) == [125] * 3, launches
    assert "no majority of the nodes in --master" in launches[0].said


@pytest.mark.parametrize("name", ["etcd", "fleetrun.elastic.etcd.member"])
def test_a_killed_process_of_the_store_is_started_again(together: Nodes, name: str):
    """One host after the other: were the first not back, there would be no majority."""
    together.script(WORK)
    launches = [start(together, number) for number in range(3)]
    in_world(launches, 3)
    for host, launch in zip(together.hosts, launches, strict=True):
        (pid,) = pids_of(host, name)
        kill(pid)
        launch.until_err(" again")
        wait_until(lambda host=host, pid=pid: [each for each in pids_of(host, "etcd") if each != pid])
    go(launches)
    assert codes(launches) == [0] * 3, launches
    assert [len(launch.told("in world")) for launch in launches] == [1] * 3, "the job has not noticed"


def serves(launches: Sequence[Launch], hosts: Sequence[Host]) -> None:
    wait_until(lambda: pids_of(hosts[0], "etcd"))


def waits(launches: Sequence[Launch], hosts: Sequence[Host]) -> None:
    launches[1].until_err("3 nodes have joined; waiting")


def runs(launches: Sequence[Launch], hosts: Sequence[Host]) -> None:
    launches[0].until_err("Run Pod")


def stops(launches: Sequence[Launch], hosts: Sequence[Host]) -> None:
    launches[0].until_err("all nodes restart")


# The first attempt fails, and its other processes do not leave at SIGTERM.
FAILING = """
if ATTEMPT == 0:
    ignore(signal.SIGTERM)
    sys.exit(7) if RANK == 1 else stay()
leave_on_term()
tell("in", "world", os.environ["WORLD_SIZE"])
wait_for_go()
"""


@pytest.mark.parametrize("moment", [serves, waits, runs, stops])
def test_the_first_launcher_is_killed_at(
    together: Nodes, moment: Callable[[Sequence[Launch], Sequence[Host]], None]
):
    """Whatever the job was doing, it comes to run, with the launcher that is started again."""
    together.script(FAILING if moment is stops else WORK)
    words = ("--max_restart", "3", "--elastic_timeout", "10" if moment is waits else "60")
    nnodes = "2:4" if moment is waits else "2:3"
    launches = [start(together, number, *words, nnodes=nnodes) for number in range(3)]
    moment(launches, together.hosts)
    kill_all(together.hosts[0])
    launches[0].wait()
    launches[0] = start(together, 0, *words, nnodes=nnodes)
    in_world(launches, 3)
    go(launches)
    assert codes(launches) == [0] * 3, launches


def test_another_job_cannot_use_the_same_ports(together: Nodes):
    together.script(WORK)
    launches = [start(together, number) for number in range(3)]
    in_world(launches, 3)
    other = start(together, 1, "--job_id", "other", "--log_dir", "other")
    assert other.wait() == 125, other
    assert "of another job, default" in other.said
    go(launches)
    assert codes(launches) == [0] * 3


def test_with_a_secret_only_nodes_that_have_it_take_part(together: Nodes):
    together.script(WORK)
    secret, other = ({"FLEETRUN_TOKEN": f"the secret of {whose} job"} for whose in ("this", "another"))
    words = (*ELASTIC, "--max_restart", "0")
    launches = [together.start(number, *words, env=secret) for number in range(3)]
    in_world(launches, 3)
    assert "no token is set" not in launches[0].err
    stranger = together.start(1, *words, "--log_dir", "other", env=other)
    assert stranger.wait() == 125
    assert "FLEETRUN_TOKEN" in stranger.said
    go(launches)
    assert codes(launches) == [0] * 3


def test_what_a_machine_of_the_store_needs_is_said_before_anything_starts(together: Nodes):
    together.script(WORK)
    soon = together.start(0, "--heartbeat_timeout", "2", nnodes="3")
    assert soon.wait() == 2, soon
    assert "--heartbeat_timeout" in soon.said
    words = ("--nnodes", "3", "--master", together.master, "train.py")
    without = together.hosts[0].start(["env", "PATH=/nonexistent", *FLEETRUN, *words])
    assert without.wait() == 2, without
    assert "no program etcd" in without.said
