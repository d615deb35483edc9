"""Judge the facts of one node: its cores, memory, limits and directories, its Python, torch and devices, and
its names, interfaces and ports. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from fleetrun.doctor.facts import (
    Cores,
    Driver,
    Finding,
    Folder,
    Gpu,
    Limits,
    Machine,
    Memory,
    Network,
    Nic,
    Space,
    Torch,
    Wanted,
    failed,
    figure,
    passed,
    warned,
)
from fleetrun.envs.settings.parsing import byte_size, plural, written_ranks

# ---- Cores, memory, limits and directories

MIB, GIB = 1 << 20, 1 << 30

LEAST_MEMORY, GOOD_MEMORY = 256 * MIB, GIB
"""Bytes per process. Importing torch alone takes the first value."""

LEAST_SHM, GOOD_SHM = 64 * MIB, GIB
"""Containers have 64 MiB by default."""

LEAST_LOGS, GOOD_LOGS = MIB, GIB
LEAST_INODES = 1000
SLOW_DISK = 10e6
SLOW_SYNC = 1.0

GOOD_FILES = 4096
LEAST_FILES, FILES_EACH = 32, 4
"""Files of the launcher, and its files per process. They were counted as 18 and 3. A process that imports
torch and joins a group has about 25.
"""

THREADS_EACH = 64
"""Threads of a trainer, for computing, data loading and the network."""

GOOD_LOCKED = GIB


def cores(facts: Cores, wanted: Wanted) -> Iterator[Finding]:
    allowed = facts.visible if facts.quota is None else min(float(facts.visible), facts.quota)
    have = f"{plural(wanted.processes, 'process')} on {_cores(facts)}"
    if wanted.processes > allowed:
        yield warned("cores", have, "Start fewer processes here, or use a node with more cores.")
    else:
        yield passed("cores", have)
    yield _threads(facts, allowed, wanted)
    if facts.load > facts.total:
        found = f"load {facts.load:.1f} on {plural(facts.total, 'core')} before the job has started"
        yield warned("load", found, "Look for other programs with `top`.")


def _cores(facts: Cores) -> str:
    text = plural(facts.visible, "core")
    if facts.visible < facts.total:
        text += f" of {facts.total}"
    if facts.quota is not None and facts.quota < facts.visible:
        text += f", of which the cgroup gives {facts.quota:.3g}"
    return text


def _threads(facts: Cores, allowed: float, wanted: Wanted) -> Finding:
    """Check OMP_NUM_THREADS. The launcher sets it to cores / trainers unless the user has set it."""
    trainers = max(1, wanted.trainers)
    fair = max(1, int(allowed) // trainers)
    if wanted.threads is None:
        each = fair
        found = f"OMP_NUM_THREADS will be {each}"
    else:
        outer = wanted.threads.partition(",")[0].strip()  # `4,2` sets threads for nested loops
        each = int(outer) if outer.isascii() and outer.isdigit() and len(outer) < 6 else 0
        found = f"OMP_NUM_THREADS is {wanted.threads}"
    if not each:
        mend = f"export OMP_NUM_THREADS={fair}, or unset it."
        found = f"OMP_NUM_THREADS is {wanted.threads!r}, which is not a number of threads"
        return warned("OMP threads", found, mend)
    found += f" in {plural(trainers, 'trainer')}"
    if each * trainers > max(allowed, trainers):
        more = f"{found}: {each * trainers} threads for {_cores(facts)}"
        return warned("OMP threads", more, f"export OMP_NUM_THREADS={fair}")
    return passed("OMP threads", found)


def memory(facts: Memory, wanted: Wanted) -> Iterator[Finding]:
    each = facts.available // max(1, wanted.processes)
    free = f"{byte_size(facts.available)} of {byte_size(facts.total)} free"
    found = f"{free} for {plural(wanted.processes, 'process')}"
    if each < LEAST_MEMORY:
        yield failed("memory", found, "Start fewer processes, or end other programs on this node.")
    elif each < GOOD_MEMORY:
        yield warned("memory", found, "A training process needs a GiB or more.")
    else:
        yield passed("memory", found)
    if facts.strict and wanted.servers:
        found = "vm.overcommit_memory is 2, and servers reserve address space as large as the memory"
        yield warned("overcommit", found, "sysctl vm.overcommit_memory=0")


def shm(facts: Space | None) -> Finding:
    mend = "In a container: `--shm-size=8g` or `--ipc=host`; in Kubernetes an emptyDir of medium Memory."
    if facts is None:
        return failed("/dev/shm", "missing: data loaders and NCCL keep shared memory there", mend)
    if not facts.total:
        return passed("/dev/shm", "has no bounds of its own")
    found = f"{byte_size(facts.free)} of {byte_size(facts.total)} free"
    if facts.free < LEAST_SHM and facts.total > GOOD_SHM:
        return failed("/dev/shm", found, "Find the files that fill it: `ls -l /dev/shm`.")
    if facts.free < LEAST_SHM // 2:
        return failed("/dev/shm", found, mend)
    if facts.total < GOOD_SHM:
        return warned("/dev/shm", f"{found}: data loaders and NCCL soon fill this space", mend)
    return passed("/dev/shm", found)


def limits(facts: Limits, wanted: Wanted) -> Iterator[Finding]:
    yield _open_files(facts.open_files, wanted)
    yield from _tasks(facts, wanted)
    if facts.address_space is not None:
        found = f"address space is limited to {byte_size(facts.address_space)}; CUDA and servers reserve more"
        yield warned("address space", found, "ulimit -v unlimited")
    if facts.infiniband and facts.locked is not None and facts.locked < GOOD_LOCKED:
        found = f"{byte_size(facts.locked)} may be locked, and InfiniBand registers memory by locking it"
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
        return passed("log dir", f"{path} ({space.kind}), whose free space is unknown")
    found = f"{byte_size(space.free)} of {byte_size(space.total)} free for {path} ({space.kind})"
    mend = "Free some room, choose another --log_dir, or limit the output of each process with --log_rotate."
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
        return warned("disk speed", found, "Choose a --log_dir on a disk of this node.")
    return passed("disk speed", found)


def boards(error: str) -> Finding:
    if error:
        return failed(
            "tensorboard", f"event files cannot be written: {error}", "Choose another --tensorboard."
        )
    return passed("tensorboard", "event files can be written")


def runtime(error: str) -> Finding:
    if not error:
        return passed("runtime directory", "`fleetrun ps` can find jobs on this node")
    return warned(
        "runtime directory",
        f"{error}: the job will run, but ps, status, stop and stacks cannot reach it",
        "Set XDG_RUNTIME_DIR to a directory of this user with mode 0700.",
    )


# ---- Python, torch, drivers and devices

SLOW_IMPORT = 30.0
MUCH_USED = 0.1
"""Share of a device's memory that other processes use."""

_WHERE = "See pytorch.org/get-started for the build that fits this driver."


def python(facts: Machine) -> Finding:
    return passed("python", f"{facts.python}, fleetrun {facts.fleetrun}")


def torch(facts: Torch, wanted: Wanted) -> Iterator[Finding]:
    if facts.error:
        yield failed("torch", facts.error, "pip install torch, into the Python that runs fleetrun.")
        return
    parts = [facts.version, f"CUDA {facts.cuda}" if facts.cuda else "without CUDA"]
    if facts.nccl:
        parts.append(f"NCCL {facts.nccl}")
    found = f"{', '.join(parts)}, imported in {facts.seconds:.1f} s"
    if facts.seconds > SLOW_IMPORT:
        mend = "Every start and restart waits this long. Put the Python environment on a disk of this node."
        yield warned("torch", found, mend)
    else:
        yield passed("torch", found)
    if wanted.backend in ("nccl", "gloo", "mpi", "ucc") and wanted.backend not in facts.backends:
        have = ", ".join(facts.backends) or "none"
        yield failed("backend", f"torch has no {wanted.backend}; it has {have}", "Choose another --backend.")


def devices(driver: Driver | None, torch: Torch | None, wanted: Wanted) -> Iterator[Finding]:
    if not wanted.devices:
        if wanted.named:
            kind = wanted.device_kind.upper()
            found = f"the options request {plural(wanted.named, kind)}: computing on CPUs"
            yield warned("devices", found, "Remove the option, or see `nvidia-smi`.")
        else:
            yield passed("devices", f"this node has no {wanted.device_kind.upper()}: computing on CPUs")
        return
    yield _chosen(driver, wanted)
    if wanted.trainers > len(wanted.devices) and not wanted.servers:
        found = f"{plural(wanted.trainers, 'process')} for {plural(len(wanted.devices), 'device')}"
        yield warned("devices", f"{found}: none is bound to a process", "Start one process for each device.")
    if driver is not None:
        yield from _in_use(driver, wanted)
    if torch is not None and not torch.error and wanted.device_kind == "gpu":
        yield from _kernels(driver, torch, wanted)


def _chosen(driver: Driver | None, wanted: Wanted) -> Finding:
    found = f"{wanted.device_kind.upper()} {', '.join(wanted.devices)}"
    if driver is None:
        return passed("devices", found)
    if driver.error:
        mend = "See `nvidia-smi`; in a container, start it with the NVIDIA runtime."
        return failed("devices", f"{found}: the driver does not answer: {driver.error}", mend)
    names = list(dict.fromkeys(gpu.name for gpu in _mine(driver, wanted)))
    kinds = f" ({', '.join(names)})" if names else ""
    found += f"{kinds}, driver {driver.version}, CUDA up to {driver.cuda}"
    if len(names) > 1:
        return warned("devices", found, "The devices differ, and the slowest device sets the pace.")
    return passed("devices", found)


def _mine(driver: Driver, wanted: Wanted) -> list[Gpu]:
    return [gpu for gpu in driver.gpus if gpu.id in wanted.devices]


def _in_use(driver: Driver, wanted: Wanted) -> Iterator[Finding]:
    for gpu in _mine(driver, wanted):
        if gpu.memory and gpu.used > MUCH_USED * gpu.memory:
            found = f"GPU {gpu.id}: {byte_size(gpu.used)} of {byte_size(gpu.memory)} are in use already"
            yield warned("device memory", found, "Find the processes that use the GPU with `nvidia-smi`.")
        if gpu.ecc:
            found = f"GPU {gpu.id}: {plural(gpu.ecc, 'memory error')} could not be corrected"
            yield warned("device memory", found, "Reset or replace the device.")


def _kernels(driver: Driver | None, torch: Torch, wanted: Wanted) -> Iterator[Finding]:
    """Check the kernels.

    `kernels` has the order of the devices that the visibility variable leaves for torch.
    """
    if not torch.kernels:
        why = "was built without CUDA" if not torch.cuda else "sees none"
        found = f"{plural(len(wanted.devices), 'GPU')} here, and torch {why}"
        yield failed("torch on GPUs", found, _mend(driver, torch, ""))
        return
    wrong = [(number, text) for number, text in enumerate(torch.kernels) if text]
    for number, text in wrong:
        yield failed("torch on GPUs", f"device {number}: {text}", _mend(driver, torch, text))
    if not wrong:
        yield passed("torch on GPUs", f"a kernel ran on {plural(len(torch.kernels), 'device')}")


def _mend(driver: Driver | None, torch: Torch, text: str) -> str:
    if driver is not None and _major(torch.cuda) > _major(driver.cuda) > 0:
        return (
            f"The driver runs CUDA up to {driver.cuda}, torch is for {torch.cuda}: update the driver, or "
            f"install torch for CUDA {_major(driver.cuda)}. {_WHERE}"
        )
    if not torch.cuda or "no kernel image" in text:
        return f"Install another build of torch. {_WHERE}"
    return "See `nvidia-smi` and the kernel's messages."


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0


# ---- Names, interfaces and ports of this node

SLOW_NAMES = 1.0
SLOW_LINK = 1000
_BRIDGES = ("docker", "br-", "virbr", "cni", "veth", "podman")


def network(facts: Network, wanted: Wanted) -> Iterator[Finding]:
    yield _own_name(facts, wanted)
    yield _interface(facts, wanted)
    for variable, value in wanted.socket_names:
        yield from _named_interfaces(variable, value, facts.nics)


def _own_name(facts: Network, wanted: Wanted) -> Finding:
    """Check the node's name.

    Gloo looks it up and uses the interface of its address, unless GLOO_SOCKET_IFNAME is set.
    """
    nic = _nic_of(facts)
    gloo = any(variable == "GLOO_SOCKET_IFNAME" for variable, _ in wanted.socket_names)
    mend = (
        f"export GLOO_SOCKET_IFNAME={nic.name if nic else 'INTERFACE'}, or put {wanted.address} {facts.name} "
    )
    mend += "into /etc/hosts."
    if not facts.resolved:
        found = f"{facts.name}: this node's own name has no known address"
        return warned("host name", found, mend) if wanted.several and not gloo else passed("host name", found)
    found = f"{facts.name} is {', '.join(facts.resolved)}"
    if facts.seconds > SLOW_NAMES:
        slow = f"{found}, which took {facts.seconds:.1f} s to find out"
        return warned("host name", slow, "Put the names of the nodes into /etc/hosts.")
    local = all(_is_loopback(each) for each in facts.resolved)
    if local and wanted.several and not gloo and not all(map(_is_loopback, facts.own)):
        return warned("host name", f"{found}: Gloo would listen there, where no other node can connect", mend)
    return passed("host name", found)


def _interface(facts: Network, wanted: Wanted) -> Finding:
    nic = _nic_of(facts)
    named = wanted.address not in facts.own
    found = f"{wanted.address} is {', '.join(facts.own)}" if named and facts.own else wanted.address
    if named and wanted.several and facts.own and all(map(_is_loopback, facts.own)):
        mend = "Set --host to the address at which other nodes reach this node, or correct /etc/hosts."
        return failed("interface", f"{found} here, where no other node can connect", mend)
    found += f" on {nic.name}" if nic else ""
    if nic is None:
        return passed("interface", found)
    if not nic.up:
        return failed("interface", f"{found}, which is down", "Choose another --nic or --host.")
    if nic.speed:
        found += f", {nic.speed} Mbit/s"
    if not wanted.several:
        return passed("interface", found)
    if nic.name.startswith(_BRIDGES):
        mend = "Choose the interface at which other nodes reach this node: --nic or --host."
        return warned("interface", f"{found}, a bridge within this machine", mend)
    if nic.speed and nic.speed < SLOW_LINK:
        return warned("interface", found, "If this node has a faster interface, choose it with --nic.")
    return passed("interface", found)


def _nic_of(facts: Network) -> Nic | None:
    """Return the interface of the address that the job uses."""
    return next((nic for nic in facts.nics if set(facts.own) & set(nic.addresses)), None)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _named_interfaces(variable: str, value: str, nics: tuple[Nic, ...]) -> Iterator[Finding]:
    """Check the names of interfaces.

    NCCL takes prefixes, `=` before exact names, and `^` before excluded names. Gloo takes exact names.
    """
    exact = variable != "NCCL_SOCKET_IFNAME" or value.startswith(("=", "^="))
    names = [name for name in value.lstrip("^=").split(",") if name]
    there = [nic.name for nic in nics]
    if value.startswith("^") and variable == "NCCL_SOCKET_IFNAME":
        return
    if any(own == name or (own.startswith(name) and not exact) for own in there for name in names):
        return
    found = f"{variable} is {value}, but this interface does not exist; this node has {', '.join(there)}"
    yield failed("interface", found, f"Correct {variable}, or unset it.")


def ports(facts: Network | None, wanted: Wanted) -> Finding:
    """Check the ports. Requested ports could be reserved, because otherwise the plan would have failed."""
    if not wanted.fixed_ports:
        return passed("ports", f"{wanted.ports} are free")
    fixed = sorted(wanted.fixed_ports)
    shown = written_ranks(fixed)
    if facts is not None:
        low, high = facts.clients
        risky = [port for port in fixed if low <= port <= high and port not in facts.kept]
        if risky:
            found = f"{shown} are free now, but the kernel gives {low} to {high} to clients of any program"
            reserved = f"net.ipv4.ip_local_reserved_ports={written_ranks(risky)}"
            mend = f"Choose ports below {low}, or sysctl {reserved}"
            return warned("ports", found, mend)
    return passed("ports", f"{shown} are free")
