"""Wrap Linux features: system calls without a Python name, and a cgroup around a run.

The system calls fail with OSError, as in `os`. If this user may create a cgroup of version 2, the kernel can
end a whole run with one write, even a fork bomb. Sub-reaping (`guard`) works without permission and gives the
guarantee. The cgroup only adds to it. Without permission or version 2, the cgroup functions do nothing.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from pathlib import Path

from fleetrun.errors import SpawnError

# ---- System calls

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FALLOC_FL_KEEP_SIZE = 0x01
_FALLOC_FL_PUNCH_HOLE = 0x02
_FALLOC_FL_COLLAPSE_RANGE = 0x08


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def check_pidfds() -> None:
    """Raise SpawnError if this process may not watch others (pidfd_open(2), Linux 5.3)."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise SpawnError(
            f"the kernel refuses pidfd_open: {error.strerror}",
            hint="fleetrun needs Linux 5.4 or newer. If an old container runtime forbids pidfd_open, "
            "update the runtime or its seccomp profile.",
        ) from None


def become_subreaper() -> None:
    """Make this process the new parent of its orphaned descendants (prctl(2), Linux 3.4)."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def die_with_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent's thread ends (prctl(2)). The setting
    survives exec.

    A parent that died before is not noticed. Compare getppid afterwards.
    """
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "PR_SET_PDEATHSIG")


def set_comm(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show, at most 15 bytes."""
    Path("/proc/self/comm").write_text(name[:15])


def collapse_range(fd: int, length: int) -> None:
    """Remove `length` bytes (a multiple of the file system's block) from the head of a file and move the rest
    down.
    """
    _fallocate(fd, _FALLOC_FL_COLLAPSE_RANGE, length)


def punch_hole(fd: int, length: int) -> None:
    """Free the blocks of the first `length` bytes. The size stays, and these bytes read as zeros."""
    _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, length)


def _fallocate(fd: int, mode: int, length: int) -> None:
    call = _libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    _checked(call(fd, mode, 0, length), "fallocate")


# ---- A cgroup around a run

_CGROUP_PREFIX = "fleetrun-"


def enclose_in_cgroup(launcher: int) -> None:
    """Move the launcher, and therefore all its later children, into a separate group. The guard calls it.

    The move takes the kernel up to 20 ms, because it waits for all processors. The launcher does not wait for
    it.
    """
    here = _own_cgroup()
    if here is None:
        return
    group = here / f"{_CGROUP_PREFIX}{os.getpid()}"
    with suppress(OSError):
        group.mkdir()
        _write_number(group / "cgroup.procs", launcher)


def kill_cgroup(guard: int) -> None:
    """End every process of the run's group except this one, which leaves the group first."""
    here = _own_cgroup()
    if here is None or here.name != f"{_CGROUP_PREFIX}{guard}":
        return
    with suppress(OSError):
        _write_number(here.parent / "cgroup.procs", os.getpid())
        _write_number(here / "cgroup.kill", 1)


def remove_cgroup(guard: int) -> None:
    """End the remaining processes of the group, then remove it. Call it from outside, after the run is
    over.
    """
    here = _own_cgroup()
    if here is None:
        return
    name = f"{_CGROUP_PREFIX}{guard}"
    group = here if here.name == name else here / name
    if not group.is_dir():
        return
    with suppress(OSError):
        _write_number(group / "cgroup.kill", 1)
    for _ in range(1000):
        if _removed(group):
            return
        time.sleep(0.001)  # killed processes are still exiting


def remove_stale_cgroups() -> None:
    """Remove the empty groups of guards that were killed in their last moment."""
    here = _own_cgroup()
    if here is None:
        return
    with suppress(OSError):
        for group in here.iterdir():  # a glob would compile its pattern, in every run
            guard = group.name.removeprefix(_CGROUP_PREFIX)
            if guard != group.name and not Path("/proc", guard).exists():
                _removed(group)


def _removed(group: Path) -> bool:
    """Remove a group and the groups of runs inside it. Return False while one of them has a process."""
    try:
        for inner in group.glob(f"{_CGROUP_PREFIX}*"):
            _removed(inner)
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write_number(file: Path, value: int) -> None:
    fd = os.open(file, os.O_WRONLY)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _own_cgroup() -> Path | None:
    """Return the directory of this process's group, such as /sys/fs/cgroup/user.slice/..., or None without
    version 2.
    """
    with suppress(OSError, StopIteration):
        membership = Path("/proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
        path = next(line[3:] for line in membership if line.startswith("0::"))
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
        return next(filter(None, (_mounted_at(line, path) for line in mounts if " - cgroup2 " in line)))
    return None


def _mounted_at(mount: str, path: str) -> Path | None:
    fields = mount.split()
    root, point = fields[3], fields[4]
    if not path.startswith(root):
        return None
    return Path(point) / path[len(root) :].lstrip("/")
