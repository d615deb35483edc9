"""The values of the doctor: facts of this node and of the job (`Machine`, `Wanted`), and the findings."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from fleetrun.aliases import Integers, Strings
from fleetrun.frozen import frozen, frozen_by_name

# ---- Facts of this node and of the job that shall run here. `measure` and `plan` collect them, and `judge_*`
# interpret them.
#
# Sizes are in bytes, times in seconds. None means unlimited or unknown, as each field describes.


@frozen_by_name
class Wanted:
    """The processes that would run on this node."""

    processes: int = 1
    trainers: int = 1
    servers: bool = False
    several: bool = False
    address: str = "127.0.0.1"
    device_kind: str = "gpu"
    devices: Strings = ()
    """Devices chosen for the job."""
    named: int = 0
    """Number of devices that were requested by name."""
    backend: str = "auto"
    threads: str | None = None
    """The trainers' OMP_NUM_THREADS as it was set. None: not set."""
    fixed_ports: Integers = ()
    ports: int = 0
    socket_names: tuple[tuple[str, str], ...] = ()
    """Environment variables that name network interfaces, such as NCCL_SOCKET_IFNAME, with their values."""


@frozen_by_name
class Cores:
    """The CPU cores of this node."""

    visible: int
    """Cores visible to this process."""
    total: int
    quota: float | None = None
    """Limit of the cgroup. None: no limit."""
    load: float = 0.0
    """Load average over a minute."""


@frozen_by_name
class Memory:
    """The memory of this node."""

    total: int
    available: int
    """Bytes until the node or its cgroup has none left."""
    strict: bool = False
    """The kernel promises no more address space than memory (vm.overcommit_memory is 2)."""


@frozen_by_name
class Limits:
    """The limits of this user's processes. None: unlimited."""

    open_files: int | None = None
    tasks_allowed: int | None = None
    tasks: int = 0
    """Threads that run now and count against the limit."""
    address_space: int | None = None
    locked: int | None = None
    infiniband: bool = False


@frozen_by_name
class Space:
    """A file system."""

    kind: str
    total: int
    """0 if the file system is unbounded, or does not report its size."""
    free: int
    inodes: int | None = None
    """Free inodes. None: the file system does not count them."""


@frozen_by_name
class Folder:
    """The directory of the logs."""

    path: str
    space: Space | None = None
    error: str = ""
    """The reason why writing fails. Empty: it works."""
    speed: float | None = None
    """In bytes/s. None: not measured."""
    sync: float | None = None
    """Seconds of the fsync at the end of the write. None: not measured."""


@frozen_by_name
class Gpu:
    """One device, as NVML reports it."""

    id: str
    name: str
    memory: int = 0
    used: int = 0
    ecc: int = 0
    """Memory errors that could not be corrected."""


@frozen_by_name
class Driver:
    """The GPU driver of this node."""

    version: str = ""
    cuda: str = ""
    """The newest CUDA version that the driver can run."""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""
    """The reason for missing facts. Empty: no error."""


@frozen_by_name
class Torch:
    """Facts from torch in the Python that the job would run."""

    version: str = ""
    cuda: str = ""
    """The CUDA version that torch was built for."""
    nccl: str = ""
    backends: Strings = ()
    kernels: Strings = ()
    """An empty string for each device that ran a kernel, else an error text."""
    seconds: float = 0.0
    """Seconds of the import."""
    error: str = ""


@frozen_by_name
class Nic:
    """A network interface."""

    name: str
    addresses: Strings = ()
    up: bool = True
    mtu: int = 1500
    speed: int | None = None
    """In Mbit/s. None: not reported."""


@frozen_by_name
class Network:
    """The names, interfaces and ports of this node."""

    name: str
    resolved: Strings = ()
    """Addresses of this node's name."""
    seconds: float = 0.0
    """Time of the name lookup."""
    own: Strings = ()
    """Addresses of the job's address for this node, which may also be a name."""
    nics: tuple[Nic, ...] = ()
    clients: tuple[int, int] = (32768, 60999)
    """Range from which the kernel takes the ports of clients."""
    kept: frozenset[int] = frozenset()
    """Ports of the range that are reserved."""


@frozen_by_name
class Machine:
    """All facts of this node. None: not found in time, or not requested."""

    python: str
    fleetrun: str
    cores: Cores | None = None
    memory: Memory | None = None
    shm: Space | None = None
    limits: Limits | None = None
    logs: Folder | None = None
    boards: str | None = None
    """The reason why writing to --tensorboard fails. None: the option was not given."""
    runtime_error: str = ""
    driver: Driver | None = None
    torch: Torch | None = None
    network: Network | None = None
    late: Strings = ()
    """Parts that did not answer in time."""


@frozen_by_name
class Link:
    """The network link from one node to another."""

    round_trip: float = 0.0
    """Seconds of a round trip."""
    there: float = 0.0
    """Bytes/s to the other node."""
    back: float = 0.0
    """Bytes/s back."""
    ahead: float = 0.0
    """Seconds by which the other clock is ahead."""
    error: str = ""
    """The reason why the measurement failed. Empty: no error."""


# ---- Result of a check


class Verdict(StrEnum):
    """The result of a check."""

    PASS = "pass"
    WARN = "warn"  # the job will run, perhaps slowly, or fail under more load
    FAIL = "fail"  # the job will not run


@frozen
class Finding:
    """The result of a check."""

    check: str
    """Name of the check."""
    verdict: Verdict
    found: str
    """The result in one line."""
    mend: str = ""
    """A fix. Empty if none is needed."""


def passed(check: str, found: str) -> Finding:
    return Finding(check, Verdict.PASS, found)


def warned(check: str, found: str, mend: str) -> Finding:
    return Finding(check, Verdict.WARN, found, mend)


def failed(check: str, found: str, mend: str = "") -> Finding:
    return Finding(check, Verdict.FAIL, found, mend)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if a finding would keep the job from running, else 0."""
    return int(any(each.verdict is Verdict.FAIL for each in findings))


def figure(amount: float) -> str:
    """Format three digits or more without an exponent, such as `0.25`, `17.3` or `1180`."""
    return f"{amount:.3g}" if amount < 99.95 else f"{amount:.0f}"
