"""The faults of machines: what each may be to blame for, over all launches with the same log directory, and
which are left out for it. It travels in the rendezvous; a copy is in `log/nodes.json` on every machine, where
the next launch finds it, and `fleetrun nodes`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fleetrun.files import end_of, replacing

MOST = 256
"""Entries that are kept: the newest."""
DIGITS = 3
"""Of the seconds of a time: a process may be killed, started again and killed within 0.1 s."""


class MachineFault(NamedTuple):
    """At `time` (seconds since the epoch) something went wrong for which the machine `node` may be to blame.
    Without `what` it is an acquittal: earlier faults of this machine, of all if it has no name, do not count.

    `suspicion`: of which kind, where a script or a person may be to blame as well (a killed process, a hang).
    It counts while no other machine has had one of the same kind. Without it the machine is to blame.
    """

    time: float
    node: str
    what: str = ""
    suspicion: str = ""


MachineFaults = tuple[MachineFault, ...]
"""In order of time, each fault once."""


def merged(*some: Iterable[MachineFault]) -> MachineFaults:
    return tuple(sorted({fault for faults in some for fault in faults})[-MOST:])


def counted(faults: Iterable[MachineFault]) -> dict[str, list[MachineFault]]:
    """The faults of each machine that count. Empty lists are left out."""
    kept = {node: [fault for fault in own if own[fault]] for node, own in unforgiven(faults).items()}
    return {node: own for node, own in kept.items() if own}


def unforgiven(faults: Iterable[MachineFault]) -> dict[str, dict[MachineFault, bool]]:
    """The faults of each machine since it was acquitted, and whether each counts."""
    found: dict[str, dict[MachineFault, bool]] = {}
    for fault in faults:
        if fault.what:
            found.setdefault(fault.node, {})[fault] = True
            if fault.suspicion:
                _refute(found, fault.suspicion)
        elif fault.node:
            found.pop(fault.node, None)
        else:
            found.clear()
    return found


def _refute(found: Mapping[str, dict[MachineFault, bool]], suspicion: str) -> None:
    """What happens on several machines is the script's, or the cluster's: none of them is blamed for it."""
    alike = [(own, fault) for own in found.values() for fault in own if fault.suspicion == suspicion]
    if len({fault.node for _, fault in alike}) > 1:
        for own, fault in alike:
            own[fault] = False


def excluded(faults: Iterable[MachineFault], after: int) -> Mapping[str, Sequence[MachineFault]]:
    """The machines with at least so many faults; none with `after` 0."""
    if not after:
        return {}
    return {node: own for node, own in counted(faults).items() if len(own) >= after}


def said_faults(faults: Sequence[MachineFault]) -> str:
    """`2 faults`."""
    return "1 fault" if len(faults) == 1 else f"{len(faults)} faults"


def read_faults(value: Any) -> MachineFaults:
    """From JSON. Raises ValueError or TypeError."""
    found = []
    for time, node, what, *more in value:
        if not math.isfinite(float(time)):
            raise ValueError(f"{time} is not a time")
        found.append(MachineFault(float(time), str(node), str(what), *map(str, more[:1])))
    return merged(found)


# ---- The copy of this machine

_LONGEST = 1 << 20


def faults_path(log_dir: Path) -> Path:
    return log_dir / "nodes.json"


class Kept(NamedTuple):
    """What is in the file. `exclude_after`: that of the last launch, for `fleetrun nodes`."""

    faults: MachineFaults = ()
    exclude_after: int = 0


def read_kept(path: Path) -> Kept:
    """Nothing where there is no file. Raises OSError, and ValueError for a file that is something else."""
    try:
        text = end_of(path, _LONGEST)
    except FileNotFoundError:
        return Kept()
    try:
        found = json.loads(text)
        return Kept(read_faults(found["faults"]), int(found["exclude_after"]))
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} does not hold faults of machines: {error}") from None


def keep(path: Path, faults: MachineFaults, exclude_after: int | None = None) -> None:
    """Add these faults to the file. Machines may share the folder: each replaces the file by the union of
    what it has read and what it knows. Raises as `read_kept`: a file that is something else stays.
    """
    known = read_kept(path)
    kept = Kept(merged(known.faults, faults), known.exclude_after if exclude_after is None else exclude_after)
    if kept == known:
        return
    rows = [list(fault) for fault in kept.faults]
    with replacing(path) as aside:
        aside.write_text(json.dumps({"exclude_after": kept.exclude_after, "faults": rows}, indent=1) + "\n")
