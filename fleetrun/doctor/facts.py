"""What the doctor knows and what it says: facts of this machine and of the job (`Machine`, `Wanted`), and a
`Finding` with its verdict. Values only.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from fleetrun.aliases import Strings
from fleetrun.frozen import frozen, frozen_by_name

# ---- What is known of this machine and of the job that shall run here: values only. `measure` and `plan`
# find them out, `judge_*` say what they mean.
#
# Sizes are bytes, times seconds. None: not limited, or not known; each field says which.


@frozen_by_name
class Wanted:
    """What would run on this machine. `devices` are those chosen for the job, `named` how many were asked for
    by name. `threads` is the trainers' OMP_NUM_THREADS as it was set (None: it was not).
    """

    processes: int = 1
    trainers: int = 1
    servers: bool = False
    several: bool = False
    address: str = "127.0.0.1"
    device_kind: str = "gpu"
    devices: Strings = ()
    named: int = 0
    backend: str = "auto"
    threads: str | None = None
    fixed_ports: tuple[int, ...] = ()
    ports: int = 0
    socket_names: tuple[tuple[str, str], ...] = ()
    """Variables that name network interfaces, such as NCCL_SOCKET_IFNAME, with their values."""


@frozen_by_name
class Cores:
    """`visible` to this process, of `total`; `quota` of the cgroup (None: no limit); `load` over a minute."""

    visible: int
    total: int
    quota: float | None = None
    load: float = 0.0


@frozen_by_name
class Memory:
    """`available` before the machine or its cgroup has none left; `strict`: the kernel promises no more
    address space than there is memory (vm.overcommit_memory is 2).
    """

    total: int
    available: int
    strict: bool = False


@frozen_by_name
class Limits:
    """Of this user's processes; None: not limited. `tasks` are the threads that run now and count
    against it.
    """

    open_files: int | None = None
    tasks_allowed: int | None = None
    tasks: int = 0
    address_space: int | None = None
    locked: int | None = None
    infiniband: bool = False


@frozen_by_name
class Space:
    """A file system; one that has no bounds, or does not tell them, has a `total` of 0. `inodes` are those
    left (None: it does not count them).
    """

    kind: str
    total: int
    free: int
    inodes: int | None = None


@frozen_by_name
class Folder:
    """Where logs go. `error`: why nothing can be written there. `speed` in bytes/s, `sync` how long fsync
    took at the end of the write (None: not measured).
    """

    path: str
    space: Space | None = None
    error: str = ""
    speed: float | None = None
    sync: float | None = None


@frozen_by_name
class Gpu:
    """One device: what NVML says. `ecc` counts memory errors that could not be corrected."""

    id: str
    name: str
    memory: int = 0
    used: int = 0
    ecc: int = 0


@frozen_by_name
class Driver:
    """`cuda` is the newest CUDA that the driver can run. `error`: why there is nothing to know."""

    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


@frozen_by_name
class Torch:
    """What torch says in the Python that the job would run. `seconds` its import took; `cuda` is what it was
    built for; `kernels` has, for each device that torch sees, "" or why no kernel ran there.
    """

    version: str = ""
    cuda: str = ""
    nccl: str = ""
    backends: Strings = ()
    kernels: Strings = ()
    seconds: float = 0.0
    error: str = ""


@frozen_by_name
class Nic:
    """A network interface. `speed` in Mbit/s (None: it does not say)."""

    name: str
    addresses: Strings = ()
    up: bool = True
    mtu: int = 1500
    speed: int | None = None


@frozen_by_name
class Network:
    """`resolved` are the addresses that this machine's own name stands for, found in `seconds`; `own` those
    of the address that the job uses for it, which may be a name too. `clients` are the ports from which
    the kernel takes those of clients, `kept` those of them that are reserved.
    """

    name: str
    resolved: Strings = ()
    seconds: float = 0.0
    own: Strings = ()
    nics: tuple[Nic, ...] = ()
    clients: tuple[int, int] = (32768, 60999)
    kept: frozenset[int] = frozenset()


@frozen_by_name
class Machine:
    """All of it. None: it could not be found out in time, or was not asked for."""

    python: str
    fleetrun: str
    cores: Cores | None = None
    memory: Memory | None = None
    shm: Space | None = None
    limits: Limits | None = None
    logs: Folder | None = None
    boards: str | None = None
    """Why nothing can be written to --tensorboard; None: it was not given."""
    runtime_error: str = ""
    driver: Driver | None = None
    torch: Torch | None = None
    network: Network | None = None
    late: Strings = ()
    """What did not answer in time."""


# ---- Result of a check


class Verdict(StrEnum):
    PASS = "pass"
    WARN = "warn"  # the job will run, perhaps slowly, or fail under more load
    FAIL = "fail"  # the job will not run


@frozen
class Finding:
    """`check` is the name of what was looked at, `found` one line, `mend` what to do about it."""

    check: str
    verdict: Verdict
    found: str
    mend: str = ""


def passed(check: str, found: str) -> Finding:
    return Finding(check, Verdict.PASS, found)


def warned(check: str, found: str, mend: str) -> Finding:
    return Finding(check, Verdict.WARN, found, mend)


def failed(check: str, found: str, mend: str = "") -> Finding:
    return Finding(check, Verdict.FAIL, found, mend)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when something would keep the job from running."""
    return int(any(each.verdict is Verdict.FAIL for each in findings))


def figure(amount: float) -> str:
    """Three digits or more, and no exponent: `0.25`, `17.3`, `1180`."""
    return f"{amount:.3g}" if amount < 99.95 else f"{amount:.0f}"
