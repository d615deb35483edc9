"""A cgroup of version 2 around a launch, where this user may make one: the kernel then ends all of it at one
write.

Sub-reaping (`guardian`) needs no right and is the promise; this is the belt to it, atomic even against a fork
bomb. Without the right, or without a cgroup of version 2, every function here does nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_PREFIX = "fleetrun-"


def enclose(launcher: int) -> None:
    """Called by the guard: move its launcher, and so all that it will start, into a group of its own.

    The move takes the kernel up to 20 ms (it waits for all processors); the launcher does not wait for it.
    """
    here = _own()
    if here is None:
        return
    group = here / _name(os.getpid())
    with contextlib.suppress(OSError):
        group.mkdir()
        _write(group / "cgroup.procs", launcher)


def kill_all(guard: int) -> None:
    """End every process of the launch's group but this one, which leaves it first."""
    here = _own()
    if here is None or here.name != _name(guard):
        return
    with contextlib.suppress(OSError):
        _write(here.parent / "cgroup.procs", os.getpid())
        _write(here / "cgroup.kill", 1)


def remove(guard: int) -> None:
    """Called from outside the group once the launch is over: end what is left in it, then take it away."""
    here = _own()
    if here is None:
        return
    group = here if here.name == _name(guard) else here / _name(guard)
    if not group.is_dir():
        return
    with contextlib.suppress(OSError):
        _write(group / "cgroup.kill", 1)
    for _ in range(1000):
        if _taken_away(group):
            return
        time.sleep(0.001)  # what was killed is still leaving


def remove_stale() -> None:
    """Take away the empty groups of guards that were killed in their very last moment."""
    here = _own()
    if here is None:
        return
    with contextlib.suppress(OSError):
        for group in here.iterdir():  # a glob would compile its pattern, in every launch
            guard = group.name.removeprefix(_PREFIX)
            if guard != group.name and not Path("/proc", guard).exists():
                _taken_away(group)


def _taken_away(group: Path) -> bool:
    """Whether the group is gone now, with those of launches inside it. Not while a process is in one."""
    try:
        for inner in group.glob(f"{_PREFIX}*"):
            _taken_away(inner)
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _name(guard: int) -> str:
    return f"{_PREFIX}{guard}"


def _write(file: Path, value: int) -> None:
    fd = os.open(file, os.O_WRONLY)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _own() -> Path | None:
    """The directory of this process's group, e.g. /sys/fs/cgroup/user.slice/...; None without version 2."""
    with contextlib.suppress(OSError, StopIteration):
        membership = Path("/proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
        path = next(line[3:] for line in membership if line.startswith("0::"))
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
        return next(filter(None, (_below(line, path) for line in mounts if " - cgroup2 " in line)))
    return None


def _below(mount: str, path: str) -> Path | None:
    fields = mount.split()
    root, point = fields[3], fields[4]
    if not path.startswith(root):
        return None
    return Path(point) / path[len(root) :].lstrip("/")
