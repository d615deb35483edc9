"""The answer of a launcher, and what can be seen from outside: processor, memory, GPUs, last lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fleetrun.control.usage import (
    Device,
    Families,
    Snapshot,
    devices,
    last_line,
    memory,
    processor,
    snapshot,
)

Status = dict[str, Any]

MOMENT = 0.25
"""Seconds between two looks: the share of a processor that was used is that of this time."""


class Observer:
    """Looks again and again. The share of a processor is that of the time since the look before."""

    def __init__(
        self,
        look: Callable[[], Snapshot] = snapshot,
        gpus: Callable[[], Mapping[int, Device]] = devices,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._gpus = gpus
        self._clock = clock
        self._before: Snapshot = look()
        self._when = clock()

    def complete(self, status: Mapping[str, Any]) -> Status:
        """`status` with `cpu` (percent of one processor), `memory` (bytes), `gpu` (percent), `gpu_memory`
        (bytes) and `last_line` of each container; what is not known is None.
        """
        containers = parts(status, "containers")
        now, when = self._look(), self._clock()
        gpus = self._gpus() if any(each.get("gpus") for each in containers) else {}
        families = Families(now)
        seen = []
        for each in containers:
            pid = each.get("pid")
            pids = families.of(pid) if isinstance(pid, int) else []
            used = _usage(each, pids, self._before, now, when - self._when)
            seen.append({**each, **used, **_on_gpus(each, pids, gpus)})
        self._before, self._when = now, when
        return {**status, "containers": seen}


def parts(status: Mapping[str, Any], name: str) -> list[Status]:
    """The objects in a list of an answer, which may have any form."""
    found = status.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _usage(
    container: Mapping[str, Any], pids: list[int], before: Snapshot, now: Snapshot, seconds: float
) -> Status:
    log = container.get("log")
    return {
        "cpu": processor(pids, before, now, seconds) if pids else None,
        "memory": memory(pids, now) if pids else None,
        "last_line": last_line(Path(log)) if isinstance(log, str) else "",
    }


def _on_gpus(container: Mapping[str, Any], pids: list[int], gpus: Mapping[int, Device]) -> Status:
    """Of the GPUs that it has. Where NVML does not know its processes (in a container they have other
    numbers) the memory is all that is taken on them.
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
    """By its number, or the beginning of `GPU-...`."""
    if name.isdecimal():
        return gpus.get(int(name))
    return next((each for each in gpus.values() if name and each.uuid.startswith(name)), None)
