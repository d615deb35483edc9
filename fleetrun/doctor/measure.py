"""Measure this node: cores, memory, limits, directories, network interfaces, the GPU driver and torch.

Facts that are missing or unreadable are None or empty. `judge_machine` judges them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from fleetrun.aliases import Environ, Strings
from fleetrun.decoding import WRONG, of_fields
from fleetrun.doctor.facts import Cores, Driver, Folder, Gpu, Limits, Memory, Network, Nic, Space, Torch
from fleetrun.files import read_file
from fleetrun.host.cgroups import Groups
from fleetrun.host.network import host_addresses

# ---- Cores, memory, limits, directories and interfaces

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


def memory() -> Memory:
    import psutil

    now = psutil.virtual_memory()
    total, available = now.total, now.available
    for limit, left in Groups().memory():
        total, available = min(total, limit), min(available, left)
    strict = read_file(Path("/proc/sys/vm/overcommit_memory")) == "2"
    return Memory(total=total, available=available, strict=strict)


def limits() -> Limits:
    running = _tasks()
    allowed = list(Groups().tasks())
    own = _limit(resource.RLIMIT_NPROC) if os.getuid() else None
    if own is not None:
        allowed.append((own, own - running))
    most, left = min(allowed, key=lambda pair: pair[1], default=(None, 0))  # the limit that is reached first
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
    """Count the threads of this user's processes."""
    found = 0
    for path in _listed(Path("/proc")):
        if path.name.isdecimal():
            with suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    found += len(os.listdir(path / "task"))  # noqa: PTH208  (names only, of many)
    return found


def shm() -> Space | None:
    path = Path("/dev/shm")
    return space(path) if path.is_dir() and os.access(path, os.W_OK) else None


Tasks = dict[str, Callable[[], object]]
"""Functions that measure a part of a node, by the name of the part."""

OF_THE_HOST: Tasks = {
    "cores": cores,
    "memory": memory,
    "shm": shm,
    "limits": limits,
}


def space(path: Path) -> Space | None:
    """Describe the file system of an existing directory."""
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
    """Return the type of the file system, from the longest mount point above the path."""
    import psutil

    there = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    last_first = reversed(there)  # a later mount hides an earlier one at the same point
    return max(last_first, key=lambda each: len(each.mountpoint)).fstype if there else "unknown"


def folder(log_dir: Path) -> Folder:
    """Measure the directory for logs, or the directory in which it will be created. Leaves no file there."""
    name = str(log_dir)
    try:
        place = _existing(log_dir)
        if not stat.S_ISDIR(place.stat().st_mode):
            return Folder(path=name, error="it is not a directory" if place == log_dir.absolute() else
                          f"{place} is not a directory")  # fmt: skip
        room = space(place.resolve())
        speed, sync = _written(place, room.free if room is not None and room.total else None)
    except OSError as error:
        return Folder(path=name, error=error.strerror or str(error))
    return Folder(path=name, space=room, speed=speed, sync=sync)


def _existing(folder: Path) -> Path:
    """Return the directory, or its nearest existing parent.

    Raises OSError if the current directory was deleted.
    """
    place = folder.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place


def unwritable(folder: Path) -> str:
    """Return the reason why the directory is not writable, or an empty string. Leaves no file there."""
    try:
        os.close(_nameless(_existing(folder)))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _written(place: Path, free: int | None) -> tuple[float | None, float | None]:
    """Return the bytes/s of writing a file without a name, and the seconds of its final fsync.

    Skip both if too little space is `free`. Raises OSError.
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
    """Open a file that vanishes when it is closed, however this process ends."""
    try:
        return os.open(place, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # this file system does not support such files
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    path = place / f".doctor-{os.getpid()}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    return fd


def network(address: str) -> Network:
    """Describe the network. `address` is this node's address in the job."""
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
    resolved = host_addresses(name)
    return Network(
        name=name,
        resolved=resolved,
        seconds=time.perf_counter() - began,
        own=host_addresses(address),
        nics=tuple(nics),
        clients=_clients(),
        kept=frozenset(_kept()),
    )


def _clients() -> tuple[int, int]:
    words = read_file(Path("/proc/sys/net/ipv4/ip_local_port_range")).split()
    numbers = [int(word) for word in words if word.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (32768, 60999)


def _kept() -> Iterator[int]:
    for part in read_file(Path("/proc/sys/net/ipv4/ip_local_reserved_ports")).split(","):
        low, _, high = part.partition("-")
        if low.isdecimal():
            yield from range(int(low), int(high if high.isdecimal() else low) + 1)


def _listed(path: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from path.iterdir()


# ---- Devices as NVIDIA's driver reports them (NVML). Starts no work on them.

_LONGEST_ERROR = 100


def ask_driver(ids: Sequence[str]) -> Driver:
    """Describe the devices with these IDs, which are numbers or UUIDs as in the visibility variable."""
    try:
        import pynvml
    except ImportError:
        return Driver(error="nvidia-ml-py is not installed: pip install 'fleetrun[monitor]'")
    try:
        pynvml.nvmlInit()
        try:
            version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
            gpus = [_gpu(each) for each in ids]
            return Driver(
                version=_decoded(pynvml.nvmlSystemGetDriverVersion()),
                cuda=f"{version // 1000}.{version % 1000 // 10}",
                gpus=tuple(gpu for gpu in gpus if gpu is not None),
            )
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return Driver(error=str(error)[:_LONGEST_ERROR])


def _gpu(id_: str) -> Gpu | None:
    """Describe a device. Return None if NVML does not find this ID (a MIG slice)."""
    import pynvml

    try:
        if id_.isdecimal():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(id_))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(id_)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name = _decoded(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError:
        return None
    try:
        ecc = pynvml.nvmlDeviceGetTotalEccErrors(
            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        )
    except pynvml.NVMLError:  # memory without ECC
        ecc = 0
    return Gpu(id=id_, name=name, memory=int(memory.total), used=int(memory.used), ecc=int(ecc))


def _decoded(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# ---- Facts from torch, in a separate process, because fleetrun never imports torch: its build, and a kernel
# on each device.

TORCH_PATIENCE = 180.0
_MOST_TEXT = 300
_TORCH_MARK = "fleetrun-doctor "

_TORCH_PROGRAM = """
import ctypes, json, sys, time
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: nothing would read the answer
began = time.perf_counter()
try:
    import torch
    import torch.distributed as dist
except Exception as error:
    found = {"error": f"{type(error).__name__}: {error}"}
else:
    found = {"version": torch.__version__, "cuda": torch.version.cuda or ""}
    found["seconds"] = time.perf_counter() - began
    names = ("gloo", "nccl", "mpi", "ucc") if dist.is_available() else ()
    names = [name for name in names if getattr(dist, f"is_{name}_available")()]
    found["backends"] = names
    if "nccl" in names and torch.version.cuda:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    kernels = []
    for number in range(torch.cuda.device_count()):
        try:
            torch.ones(8, device=f"cuda:{number}").sum().item()
            kernels.append("")
        except Exception as error:
            kernels.append(f"{type(error).__name__}: {error}")
    found["kernels"] = kernels
sys.stdout.write("\\n" + MARK + json.dumps(found) + "\\n")
"""


def ask_torch(environ: Environ, python: str = sys.executable, patience: float = TORCH_PATIENCE) -> Torch:
    """Import torch in `python` and return its facts. `error` holds any failure."""
    # -P keeps a json.py in the current directory away from this program. It would not affect a script
    # elsewhere.
    program = [python, "-P", "-c", _TORCH_PROGRAM.replace("MARK", repr(_TORCH_MARK))]
    try:
        done = subprocess.run(
            program,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"`import torch` has not ended after {patience:g} s")
    except OSError as error:
        return Torch(error=f"{python} cannot be run: {error.strerror}")
    lines = done.stdout.decode(errors="replace").splitlines()
    answers = [line for line in lines if line.startswith(_TORCH_MARK)]
    if not answers:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        how = f"exit code {done.returncode}" if done.returncode >= 0 else f"signal {-done.returncode}"
        return Torch(error=_short(f"`import torch` ended with {how}: {''.join(last)}"))
    return read_torch(answers[-1].removeprefix(_TORCH_MARK))


def read_torch(text: str) -> Torch:
    """Parse the report of the process. It is untrusted, because any module may be called torch."""
    try:
        return _torch(json.loads(text))
    except WRONG:
        return Torch(error=_short(f"cannot read the output of torch: {text}"))


def _short(text: str) -> str:
    """Return the text as one line of limited length."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..."


def _texts(values: list[object]) -> Strings:
    return tuple(_short(str(each)) for each in values)


_torch = of_fields(
    Torch, **dict.fromkeys(("version", "cuda", "nccl", "error"), _short), seconds=float,
    backends=_texts, kernels=_texts,
)  # fmt: skip
