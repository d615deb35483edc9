"""What a launch leaves in the kernel: processes, their states, cgroups, reserved ports. Only looks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

BOUND = 200.0
"""Seconds. For hangs: no test measures time. A disk that is busy may take a hundred to import torch."""


def left_behind(token: str) -> dict[int, str]:
    """The processes that have this token in their environment: pid and command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and token.encode() in (entry / "environ").read_bytes():
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                found[int(entry.name)] = " ".join(words).strip()[:150]
    return found


def wait_until(condition: Callable[[], bool], what: object = "", bound: float = BOUND) -> None:
    """For what the kernel does not tell: look again and again. AssertionError after `bound` seconds."""
    deadline = time.monotonic() + bound
    while not condition():
        said = what() if callable(what) else what
        assert time.monotonic() < deadline, f"not within {bound} s: {said}"
        time.sleep(0.005)


def state_of(pid: int) -> str:
    """`S`, `T` (stopped), `Z`, ...; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def has_ended(pid: int) -> bool:
    """With all its threads, and so its files: reaped, or a zombie that only has to be."""
    try:
        return state_of(pid) in ("", "Z") and len([*Path(f"/proc/{pid}/task").iterdir()]) == 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def cgroup_of(guard: int) -> list[Path]:
    """The group that the guard of that pid made, where there is cgroup v2."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    roots = [Path(fields[4]) for fields in mounts if "cgroup2" in fields]
    with contextlib.suppress(FileNotFoundError):  # one went away while we looked
        return [found for root in roots for found in root.glob(f"**/fleetrun-{guard}")]
    return cgroup_of(guard)


def port_names(endpoints: Sequence[str]) -> set[str]:
    """Those of the endpoints' ports that some launcher has reserved at this moment."""
    wanted = {f"@fleetrun-port-{endpoint.rpartition(':')[2]}" for endpoint in endpoints}
    return wanted & set(Path("/proc/net/unix").read_text().split())
