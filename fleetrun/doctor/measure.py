"""Looks at this machine: cores, memory, limits, folders, interfaces. Judges nothing. What is not there, or
may not be read, is None or empty.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from fleetrun.doctor.cgroups import Groups, read
from fleetrun.doctor.facts import Cores, Folder, Limits, Memory, Network, Nic, Space

_BLOCK = 1 << 20
_BLOCKS = 32
_LONGEST = 3.0
"""Seconds of writing."""


def cores() -> Cores:
    return Cores(
        visible=len(os.sched_getaffinity(0)),
        total=os.cpu_count() or 1,
        quota=Groups().processors(),
        load=os.getloadavg()[0],
    )


def memory(groups: Groups | None = None) -> Memory:
    import psutil

    now = psutil.virtual_memory()
    total, available = now.total, now.available
    for limit, left in (groups or Groups()).memory():
        total, available = min(total, limit), min(available, left)
    strict = read(Path("/proc/sys/vm/overcommit_memory")) == "2"
    return Memory(total=total, available=available, strict=strict)


def limits(groups: Groups | None = None) -> Limits:
    running = _tasks()
    allowed = list((groups or Groups()).tasks())
    own = _limit(resource.RLIMIT_NPROC) if os.getuid() else None
    if own is not None:
        allowed.append((own, own - running))
    most, left = min(allowed, key=lambda pair: pair[1], default=(None, 0))  # what is used up first
    return Limits(
        open_files=_limit(resource.RLIMIT_NOFILE),
        tasks_allowed=most,
        tasks=running if most is None else most - left,
        address_space=_limit(resource.RLIMIT_AS),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=any(_listed(Path("/sys/class/infiniband"))),
    )


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _tasks() -> int:
    """Threads of this user's processes."""
    found = 0
    for path in _listed(Path("/proc")):
        if path.name.isdecimal():
            with contextlib.suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    found += len(os.listdir(path / "task"))  # noqa: PTH208  (names only, of many)
    return found


def shm() -> Space | None:
    path = Path("/dev/shm")
    return space(path) if path.is_dir() and os.access(path, os.W_OK) else None


def space(path: Path) -> Space | None:
    """The file system of an existing folder."""
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return Space(
        kind=_kind(path),
        total=room.f_blocks * room.f_frsize,
        free=room.f_bavail * room.f_frsize,
        inodes=room.f_favail if room.f_files else None,
    )


def _kind(path: Path) -> str:
    """The type of the file system, out of the longest mount point above the path."""
    best, kind = "", "unknown"
    for line in read(Path("/proc/self/mounts")).splitlines():
        words = line.split(" ")
        if len(words) > 2:
            point = words[1].replace("\\040", " ")
            if path.is_relative_to(point) and len(point) >= len(best):
                best, kind = point, words[2]
    return kind


def folder(log_dir: Path) -> Folder:
    """The folder for logs, or the one in which it will be made. Leaves nothing there."""
    name = str(log_dir)
    try:
        place = log_dir.absolute()  # fails where the current directory is gone
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        if not stat.S_ISDIR(place.stat().st_mode):
            return Folder(path=name, error="it is not a directory" if place == log_dir.absolute() else
                          f"{place} is not a directory")  # fmt: skip
        room = space(place.resolve())
        speed, sync = _written(place, room.free if room is not None and room.total else None)
    except OSError as error:
        return Folder(path=name, error=error.strerror or str(error))
    return Folder(path=name, space=room, speed=speed, sync=sync)


def unwritable(folder: Path) -> str:
    """Why nothing can be written there, or where it will be made; empty when all is well. Leaves nothing."""
    try:
        place = folder.absolute()
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        os.close(_nameless(place))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _written(place: Path, free: int | None) -> tuple[float | None, float | None]:
    """Bytes/s of a file that has no name, and how long its last bytes took to the disk; not where little is
    `free`. Raises OSError.
    """
    block = os.urandom(_BLOCK)
    with contextlib.ExitStack() as stack:
        fd = _nameless(place)
        stack.callback(os.close, fd)
        if free is not None and free < 4 * _BLOCKS * _BLOCK:
            os.write(fd, b"x")
            return None, None
        began, blocks = time.perf_counter(), 0
        while not blocks or (blocks < _BLOCKS and time.perf_counter() - began < _LONGEST):
            os.write(fd, block)
            blocks += 1
        written = time.perf_counter()
        os.fsync(fd)
        ended = time.perf_counter()
    return blocks * _BLOCK / (ended - began), ended - written


def _nameless(place: Path) -> int:
    """A file that is gone when it is closed, however this process ends."""
    try:
        return os.open(place, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # this file system has no such files
            raise
    path = place / f".doctor-{os.getpid()}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    return fd


def network(address: str) -> Network:
    """`address` is this machine's in the job."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    states = psutil.net_if_stats()
    nics = []
    for name, rows in psutil.net_if_addrs().items():
        own = tuple(row.address.partition("%")[0] for row in rows if row.family in families)
        state = states.get(name)
        nics.append(
            Nic(
                name=name,
                addresses=own,
                up=state.isup if state else True,
                mtu=state.mtu if state else 0,
                speed=(state.speed or None) if state and name != "lo" else None,
            )
        )
    name = socket.gethostname()
    began = time.perf_counter()
    resolved = _resolved(name)
    return Network(
        name=name,
        resolved=resolved,
        seconds=time.perf_counter() - began,
        own=_resolved(address),
        nics=tuple(nics),
        clients=_clients(),
        kept=frozenset(_kept()),
    )


def _resolved(name: str) -> tuple[str, ...]:
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the second: no name server could be asked for such a name
        return ()
    return tuple(dict.fromkeys(str(row[4][0]) for row in rows))


def _clients() -> tuple[int, int]:
    words = read(Path("/proc/sys/net/ipv4/ip_local_port_range")).split()
    numbers = [int(word) for word in words if word.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (32768, 60999)


def _kept() -> Iterator[int]:
    for part in read(Path("/proc/sys/net/ipv4/ip_local_reserved_ports")).split(","):
        low, _, high = part.partition("-")
        if low.isdecimal():
            yield from range(int(low), int(high if high.isdecimal() else low) + 1)


def _listed(path: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from path.iterdir()
