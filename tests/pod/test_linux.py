"""The cgroup around a launch, where this user may make one; in processes of their own."""

import os
import signal
from pathlib import Path

import pytest

from fleetrun.pod import linux
from tests.support.isolated import isolated
from tests.support.waiting import ended, eventually


def own_group():
    """This process's group of version 2, as its mount shows it; None where there is none."""
    line = next(
        (line for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), None
    )
    mounts = [
        line.split()
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if " - cgroup2 " in line
    ]
    if line is None or not mounts:
        return None
    return Path(mounts[0][4]) / line[3:].lstrip("/")


def may_make_groups():
    group = own_group()
    return (
        group is not None
        and os.access(group, os.W_OK)
        and (group / "cgroup.kill").exists()
        | (group == Path(group.anchor) or os.access(group / "cgroup.procs", os.W_OK))
    )


needs_cgroup = pytest.mark.skipif(not may_make_groups(), reason="this user may not make cgroups of version 2")


def child():
    """A process that a guard encloses: it prints nothing and waits for its end."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


def group_of(pid):
    return next(
        line[3:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line[:3] == "0::"
    )


def enclosed_and_removed():
    before = group_of("self")
    launcher = child()
    linux.enclose_in_cgroup(launcher)
    assert group_of(launcher) == f"{before.rstrip('/')}/fleetrun-{os.getpid()}"
    assert group_of("self") == before, "the guard stays outside"
    group = own_group() / f"fleetrun-{os.getpid()}"
    assert group.is_dir()
    linux.remove_cgroup(os.getpid())
    eventually(lambda: ended(launcher))
    os.waitpid(launcher, 0)
    linux.remove_cgroup(os.getpid())
    assert not group.exists()


def killed_from_inside():
    """A launcher that lost its guard ends all of the group but itself."""
    guard = os.getpid()
    read, write = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        os.read(read, 1)
        other = child()
        linux.kill_cgroup(guard)
        _, status = os.waitpid(other, 0)
        os._exit(os.WTERMSIG(status))
    linux.enclose_in_cgroup(launcher)
    os.write(write, b"x")
    _, status = os.waitpid(launcher, 0)
    assert os.waitstatus_to_exitcode(status) == signal.SIGKILL
    linux.remove_cgroup(guard)
    assert not (own_group() / f"fleetrun-{guard}").exists()


def empty_groups_of_the_dead_are_taken_away():
    dead = own_group() / "fleetrun-999999999"
    dead.mkdir(exist_ok=True)
    living = own_group() / f"fleetrun-{os.getpid()}"
    living.mkdir()
    linux.remove_stale_cgroups()
    assert (dead.exists(), living.exists()) == (False, True)
    linux.remove_cgroup(os.getpid())


@pytest.mark.slow
@needs_cgroup
@pytest.mark.parametrize(
    "case", [enclosed_and_removed, killed_from_inside, empty_groups_of_the_dead_are_taken_away]
)
def test_groups(case):
    isolated(case)


def nothing_of_this_is_there():
    linux.kill_cgroup(os.getpid())
    linux.remove_cgroup(os.getpid())
    linux.enclose_in_cgroup(999_999_999)
    linux.remove_cgroup(os.getpid())


def test_without_a_group_every_call_is_harmless():
    isolated(nothing_of_this_is_there)
