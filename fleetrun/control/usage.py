"""Measure what processes use of this node, and complete a status with it: CPU, memory, GPUs, and the last
line of each log. All measurements come from outside, so no process has to answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType

from fleetrun.aliases import Document, Fields
from fleetrun.files import last_bytes
from fleetrun.frozen import frozen
from fleetrun.host.devices import nvml
from fleetrun.proc import read_stat
from fleetrun.record.journal import objects_in

# ---- Use of this node by processes: CPU, memory, GPUs, and the last line of a log

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOOK_BACK = 16 << 10
_LONGEST = 500


@frozen
class Taken:
    """One process at one moment: its `seconds` of CPU so far, and its `memory` in resident bytes. `born`
    distinguishes processes with the same pid.
    """

    parent: int
    born: int
    seconds: float
    memory: int


Snapshot = Mapping[int, Taken]


def snapshot(proc: Path = Path("/proc")) -> dict[int, Taken]:
    """Return every visible process of this node."""
    found = {}
    for entry in os.scandir(proc):
        if entry.name.isdigit():
            try:
                now = read_stat(entry.name, proc)
            except ProcessLookupError:  # the process has just ended
                continue
            found[now.pid] = Taken(now.parent, now.started, now.ticks / _TICKS, now.resident * _PAGE)
    return found


class Families:
    """The process tree of a snapshot."""

    def __init__(self, now: Snapshot) -> None:
        self._now = now
        self._below: dict[int, list[int]] = {}
        for child, taken in now.items():
            self._below.setdefault(taken.parent, []).append(child)

    def of(self, pid: int) -> list[int]:
        """Return a process and all its descendants. The result is empty if the process does not exist."""
        found: dict[int, None] = {}
        wave = [pid] if pid in self._now else []
        while wave:
            found |= dict.fromkeys(wave)
            below = (child for each in wave for child in self._below.get(each, []))
            wave = [each for each in below if each not in found]  # the kernel may reuse a pid meanwhile
        return list(found)


def memory(pids: Iterable[int], now: Snapshot) -> int:
    """Return bytes. Memory that several processes share counts for each of them."""
    return sum(now[pid].memory for pid in pids)


def processor(pids: Iterable[int], before: Snapshot, now: Snapshot, seconds: float) -> float | None:
    """Return the percentage of one CPU core between two looks that are `seconds` apart."""
    if seconds <= 0:
        return None
    spent = 0.0
    for pid in pids:
        earlier = before.get(pid)
        same = earlier is not None and earlier.born == now[pid].born
        spent += now[pid].seconds - (earlier.seconds if same and earlier is not None else 0.0)
    return round(100 * max(0.0, spent) / seconds, 1)


def last_line(path: Path) -> str:
    """Return the last line of a log that is not blank. For a progress bar, return its last state.

    Return "" if the log has no such line, or the path is not a file.
    """
    try:
        data, _ = last_bytes(path, _LOOK_BACK)
    except OSError:
        return ""
    lines = data.replace(b"\r", b"\n").split(b"\n")
    for line in reversed(lines):
        text = line.strip(b" \t\0")
        if text:
            return text[:_LONGEST].decode("utf-8", "backslashreplace")
    return ""


@frozen
class Device:
    """A GPU: percentage of time in which it computes, and used bytes, in all and by process."""

    use: float
    memory: int
    processes: Mapping[int, int]
    uuid: str = ""


def devices(load: Callable[[], ModuleType | None] = nvml) -> dict[int, Device]:
    """Return the GPUs of this node by number. The result is empty without NVML."""
    module = load()
    if module is None:
        return {}
    try:
        count = int(module.nvmlDeviceGetCount())
    except module.NVMLError:
        return {}
    found = {}
    for number in range(count):
        try:
            handle = module.nvmlDeviceGetHandleByIndex(number)
            running = module.nvmlDeviceGetComputeRunningProcesses(handle)
            found[number] = Device(
                use=float(module.nvmlDeviceGetUtilizationRates(handle).gpu),
                memory=int(module.nvmlDeviceGetMemoryInfo(handle).used),
                processes={each.pid: int(each.usedGpuMemory or 0) for each in running},
                uuid=str(module.nvmlDeviceGetUUID(handle)),
            )
        except module.NVMLError:  # a GPU that fell off its bus
            continue
    return found


# ---- The answer of a launcher with these measurements

Status = Document

MOMENT = 0.25
"""Seconds between two looks. The CPU share is measured over this time."""


class Observer:
    """A repeated measurement. The CPU share covers the time since the previous measurement."""

    def __init__(self) -> None:
        self._before, self._when = snapshot(), time.monotonic()

    def complete(self, status: Fields) -> Status:
        """Add `cpu` (percent of one core), `memory` (bytes), `gpu` (percent), `gpu_memory` (bytes) and
        `last_line` to each process of `status`. Unknown values are None.
        """
        containers = objects_in(status, "containers")
        now, when = snapshot(), time.monotonic()
        gpus = devices() if any(each.get("gpus") for each in containers) else {}
        families = Families(now)
        seen = []
        for each in containers:
            pid = each.get("pid")
            pids = families.of(pid) if isinstance(pid, int) else []
            used = _usage(each, pids, self._before, now, when - self._when)
            seen.append({**each, **used, **_on_gpus(each, pids, gpus)})
        self._before, self._when = now, when
        return {**status, "containers": seen}


def _usage(container: Fields, pids: list[int], before: Snapshot, now: Snapshot, seconds: float) -> Status:
    log = container.get("log")
    return {
        "cpu": processor(pids, before, now, seconds) if pids else None,
        "memory": memory(pids, now) if pids else None,
        "last_line": last_line(Path(log)) if isinstance(log, str) else "",
    }


def _on_gpus(container: Fields, pids: list[int], gpus: Mapping[int, Device]) -> Status:
    """Return the use of the GPUs of a process.

    If NVML lists none of these process IDs, the memory is all used memory of these GPUs. In a pid namespace,
    for example, the IDs differ.
    """
    named = str(container.get("gpus") or "").split(",")
    own = [found for each in named if (found := _gpu(each, gpus)) is not None]
    if not own or not pids:
        return {"gpu": None, "gpu_memory": None}
    mine = [each.processes[pid] for each in own for pid in each.processes.keys() & set(pids)]
    return {
        "gpu": round(sum(each.use for each in own) / len(own), 1),
        "gpu_memory": sum(mine) if any(mine) else sum(each.memory for each in own),
    }


def _gpu(name: str, gpus: Mapping[int, Device]) -> Device | None:
    """Find a GPU by number, or by the start of `GPU-...`."""
    if name.isdecimal():
        return gpus.get(int(name))
    return next((each for each in gpus.values() if name and each.uuid.startswith(name)), None)
