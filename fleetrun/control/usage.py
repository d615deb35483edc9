"""What processes use of this machine: processor, memory, GPUs; and the last line of a log. Looks from
outside, whenever it is asked; nobody has to answer.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOOK_BACK = 16 << 10
_LONGEST = 500


@dataclass(frozen=True, slots=True)
class Taken:
    """One process at one moment: `seconds` of processor so far, `memory` resident bytes. `born` tells it from
    another of the same pid.
    """

    parent: int
    born: int
    seconds: float
    memory: int


Snapshot = Mapping[int, Taken]


def snapshot(proc: Path = Path("/proc")) -> dict[int, Taken]:
    """Every process of this machine that can be seen."""
    found = {}
    for entry in os.scandir(proc):
        if entry.name.isdigit():
            try:
                text = (proc / entry.name / "stat").read_text(errors="replace")
            except OSError:  # it has just ended
                continue
            fields = text.rpartition(")")[2].split()
            if len(fields) > 21:
                seconds = (int(fields[11]) + int(fields[12])) / _TICKS
                found[int(entry.name)] = Taken(
                    int(fields[1]), int(fields[19]), seconds, int(fields[21]) * _PAGE
                )
    return found


class Families:
    """Who is below whom in a snapshot."""

    def __init__(self, now: Snapshot) -> None:
        self._now = now
        self._below: dict[int, list[int]] = {}
        for child, taken in now.items():
            self._below.setdefault(taken.parent, []).append(child)

    def of(self, pid: int) -> list[int]:
        """A process and all that is below it; empty when it is not there."""
        found: dict[int, None] = {}
        wave = [pid] if pid in self._now else []
        while wave:
            found |= dict.fromkeys(wave)
            below = (child for each in wave for child in self._below.get(each, []))
            wave = [each for each in below if each not in found]  # pids come again while they are read
        return list(found)


def memory(pids: Iterable[int], now: Snapshot) -> int:
    """Bytes; what several processes share is counted for each."""
    return sum(now[pid].memory for pid in pids)


def processor(pids: Iterable[int], before: Snapshot, now: Snapshot, seconds: float) -> float | None:
    """Percent of one processor between two looks that are so many seconds apart."""
    if seconds <= 0:
        return None
    spent = 0.0
    for pid in pids:
        earlier = before.get(pid)
        same = earlier is not None and earlier.born == now[pid].born
        spent += now[pid].seconds - (earlier.seconds if same and earlier is not None else 0.0)
    return round(100 * max(0.0, spent) / seconds, 1)


def last_line(path: Path) -> str:
    """The last line of a log that has something in it, as its bytes are; of a progress bar its last state.

    Empty when there is none, or what is there is no file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would be waited for
        try:
            found = os.fstat(fd)
            regular = stat.S_ISREG(found.st_mode)
            data = os.pread(fd, _LOOK_BACK, max(0, found.st_size - _LOOK_BACK)) if regular else b""
        finally:
            os.close(fd)
    except OSError:
        return ""
    lines = data.replace(b"\r", b"\n").split(b"\n")
    for line in reversed(lines):
        text = line.strip(b" \t\0")
        if text:
            return text[:_LONGEST].decode("utf-8", "backslashreplace")
    return ""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU: percent of time that it computes, bytes that are taken in all and by process."""

    use: float
    memory: int
    processes: Mapping[int, int]
    uuid: str = ""


def devices(nvml: Callable[[], ModuleType | None] | None = None) -> dict[int, Device]:
    """The GPUs of this machine by their numbers; none where NVML is not there."""
    module = (nvml or _nvml)()
    if module is None:
        return {}
    found = {}
    for number in range(_count(module)):
        try:
            handle = module.nvmlDeviceGetHandleByIndex(number)
            running = module.nvmlDeviceGetComputeRunningProcesses(handle)
            found[number] = Device(
                use=float(module.nvmlDeviceGetUtilizationRates(handle).gpu),
                memory=int(module.nvmlDeviceGetMemoryInfo(handle).used),
                processes={each.pid: int(each.usedGpuMemory or 0) for each in running},
                uuid=str(module.nvmlDeviceGetUUID(handle)),
            )
        except module.NVMLError:  # one that fell off its bus
            continue
    return found


def _count(nvml: ModuleType) -> int:
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError:
        return 0


def _nvml() -> ModuleType | None:
    if not Path("/dev/nvidiactl").exists():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        return None
    except pynvml.NVMLError:
        return None
    module: ModuleType = pynvml
    return module
