"""Cores, memory, limits and folders: from facts to findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fleetrun.doctor.facts import Cores, Folder, Limits, Memory, Space, Wanted
from fleetrun.doctor.finding import Finding, failed, figure, passed, plural, size, warned

MIB, GIB = 1 << 20, 1 << 30

LEAST_MEMORY, GOOD_MEMORY = 256 * MIB, GIB
"""For a process. Importing torch alone takes the first."""

LEAST_SHM, GOOD_SHM = 64 * MIB, GIB
"""A container that was started without thinking of it has 64 MiB."""

LEAST_LOGS, GOOD_LOGS = MIB, GIB
LEAST_INODES = 1000
SLOW_DISK = 10e6
SLOW_SYNC = 1.0

GOOD_FILES = 4096
LEAST_FILES, FILES_EACH = 32, 4
"""Of the launcher, and what it has open for each process (it was counted: 18 and 3); a process that imports
torch and joins a group has about 25.
"""

THREADS_EACH = 64
"""Of a process that trains: of computing, of data loading, of the network."""

GOOD_LOCKED = GIB


def cores(facts: Cores, wanted: Wanted) -> Iterator[Finding]:
    allowed = facts.visible if facts.quota is None else min(float(facts.visible), facts.quota)
    have = f"{plural(wanted.processes, 'process')} on {_cores(facts)}"
    if wanted.processes > allowed:
        yield warned("cores", have, "Start fewer processes here, or take a machine with more cores.")
    else:
        yield passed("cores", have)
    yield _threads(facts, allowed, wanted)
    if facts.load > facts.total:
        found = f"load {facts.load:.1f} on {plural(facts.total, 'core')} before the job has begun"
        yield warned("load", found, "See what runs here: `top`.")


def _cores(facts: Cores) -> str:
    text = plural(facts.visible, "core")
    if facts.visible < facts.total:
        text += f" of {facts.total}"
    if facts.quota is not None and facts.quota < facts.visible:
        text += f", of which the cgroup gives {facts.quota:.3g}"
    return text


def _threads(facts: Cores, allowed: float, wanted: Wanted) -> Finding:
    """OMP_NUM_THREADS, which the launcher sets to cores / trainers where the user has not."""
    trainers = max(1, wanted.trainers)
    fair = max(1, int(allowed) // trainers)
    if wanted.threads is None:
        each = max(1, facts.visible // trainers)
        found = f"OMP_NUM_THREADS will be {each}"
    else:
        outer = wanted.threads.partition(",")[0].strip()  # `4,2`: of loops within loops
        each = int(outer) if outer.isascii() and outer.isdigit() and len(outer) < 6 else 0
        found = f"OMP_NUM_THREADS is {wanted.threads}"
    if not each:
        mend = f"export OMP_NUM_THREADS={fair}, or unset it."
        found = f"OMP_NUM_THREADS is {wanted.threads!r}, which is no number of threads"
        return warned("OMP threads", found, mend)
    found += f" in {plural(trainers, 'trainer')}"
    if each * trainers > max(allowed, trainers):
        more = f"{found}: {each * trainers} threads for {_cores(facts)}"
        return warned("OMP threads", more, f"export OMP_NUM_THREADS={fair}")
    return passed("OMP threads", found)


def memory(facts: Memory, wanted: Wanted) -> Iterator[Finding]:
    each = facts.available // max(1, wanted.processes)
    found = f"{size(facts.available)} of {size(facts.total)} free for {plural(wanted.processes, 'process')}"
    if each < LEAST_MEMORY:
        yield failed("memory", found, "Start fewer processes, or end what else runs here.")
    elif each < GOOD_MEMORY:
        yield warned("memory", found, "A process that trains takes a GiB and more.")
    else:
        yield passed("memory", found)
    if facts.strict and wanted.servers:
        found = "vm.overcommit_memory is 2, and servers reserve address space as large as the memory"
        yield warned("overcommit", found, "sysctl vm.overcommit_memory=0")


def shm(facts: Space | None) -> Finding:
    mend = "In a container: `--shm-size=8g` or `--ipc=host`; in Kubernetes an emptyDir of medium Memory."
    if facts is None:
        return failed(
            "/dev/shm", "there is none: data loaders and NCCL keep what processes share there", mend
        )
    if not facts.total:
        return passed("/dev/shm", "has no bounds of its own")
    found = f"{size(facts.free)} of {size(facts.total)} free"
    if facts.free < LEAST_SHM and facts.total > GOOD_SHM:
        return failed("/dev/shm", found, "Something has filled it: see `ls -l /dev/shm`.")
    if facts.free < LEAST_SHM // 2:
        return failed("/dev/shm", found, mend)
    if facts.total < GOOD_SHM:
        return warned("/dev/shm", f"{found}: data loaders and NCCL fill that soon", mend)
    return passed("/dev/shm", found)


def limits(facts: Limits, wanted: Wanted) -> Iterator[Finding]:
    yield _open_files(facts.open_files, wanted)
    yield from _tasks(facts, wanted)
    if facts.address_space is not None:
        found = f"address space is limited to {size(facts.address_space)}; CUDA and servers reserve more"
        yield warned("address space", found, "ulimit -v unlimited")
    if facts.infiniband and facts.locked is not None and facts.locked < GOOD_LOCKED:
        found = f"{size(facts.locked)} may be locked, and InfiniBand registers memory by locking it"
        yield warned("locked memory", found, "ulimit -l unlimited")


def _open_files(allowed: int | None, wanted: Wanted) -> Finding:
    needed = LEAST_FILES + FILES_EACH * wanted.processes
    found = f"{'any number of' if allowed is None else allowed} open files for a process"
    mend = f"ulimit -n {max(65536, needed)}"
    if allowed is None or allowed >= max(GOOD_FILES, needed):
        return passed("open files", found)
    if allowed < needed:
        return failed("open files", f"{found}; this job needs at least {needed}", mend)
    return warned("open files", f"{found}; data loaders share tensors through descriptors", mend)


def _tasks(facts: Limits, wanted: Wanted) -> Iterator[Finding]:
    if facts.tasks_allowed is None:
        return
    left = facts.tasks_allowed - facts.tasks
    found = f"{max(0, left)} more processes and threads may start, of {facts.tasks_allowed}"
    mend = "Raise `ulimit -u`, or the pids limit of the container."
    if left < 4 * wanted.processes:
        yield failed("processes", found, mend)
    elif left < THREADS_EACH * wanted.processes:
        yield warned("processes", found, mend)
    else:
        yield passed("processes", found)


def logs(facts: Folder) -> Iterator[Finding]:
    if facts.error:
        yield failed("log dir", f"{facts.path}: {facts.error}", "Choose another --log_dir.")
        return
    if facts.space is not None:
        yield _room(facts.path, facts.space)
    if facts.speed is not None and facts.sync is not None:
        yield _speed(facts.speed, facts.sync)


def _room(path: str, space: Space) -> Finding:
    if not space.total:
        return passed("log dir", f"{path} ({space.kind}), which does not say how much is free")
    found = f"{size(space.free)} of {size(space.total)} free for {path} ({space.kind})"
    mend = "Free some room or choose another --log_dir; --log_rotate bounds what a process may write."
    if space.inodes is not None and space.inodes < LEAST_INODES:
        found += f", {plural(space.inodes, 'inode')} left"
        return (warned if space.inodes > 10 else failed)("log dir", found, mend)
    if space.free < LEAST_LOGS:
        return failed("log dir", found, mend)
    if space.free < GOOD_LOGS:
        return warned("log dir", found, mend)
    return passed("log dir", found)


def _speed(speed: float, sync: float) -> Finding:
    found = f"{figure(speed / 1e6)} MB/s, {sync:.2g} s to the disk"
    if speed < SLOW_DISK or sync > SLOW_SYNC:
        return warned("disk speed", found, "Choose a --log_dir on a disk of this machine.")
    return passed("disk speed", found)


def boards(error: str) -> Finding:
    if error:
        return failed(
            "tensorboard", f"event files cannot be written: {error}", "Choose another --tensorboard."
        )
    return passed("tensorboard", "event files can be written")


def runtime(error: str) -> Finding:
    if not error:
        return passed("runtime folder", "launches here can be found by `fleetrun ps`")
    return warned(
        "runtime folder",
        f"{error}: the job will run, but ps, status, stop and stacks cannot reach it",
        "Set XDG_RUNTIME_DIR to a folder of this user, mode 0700.",
    )
