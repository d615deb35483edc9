"""Keep the faults of nodes, over all launches with the same log directory, and exclude nodes with many
faults.

The rendezvous carries the faults from node to node. Every node also has a copy in `log/nodes.json`, for the
next launch and for `fleetrun nodes`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fleetrun.files import end_of, replacing

MOST = 256
"""Number of kept entries. The newest ones are kept."""
DIGITS = 3
"""Decimal places of a time in seconds. A process may be killed, restarted and killed again within 0.1 s."""


class MachineFault(NamedTuple):
    """A fault of the node `node` at `time`, in seconds since the epoch. The node may be to blame.

    Without `what`, the entry is an acquittal: earlier faults of this node no longer count. Without a name,
    the acquittal is for all nodes.

    `suspicion`: the kind of a fault that may also come from a script or a person, such as a killed process or
    a hang. Such a fault counts while no other node has a fault of the same kind. Without `suspicion`, the
    node is to blame.
    """

    time: float
    node: str
    what: str = ""
    suspicion: str = ""


MachineFaults = tuple[MachineFault, ...]
"""Faults in order of time, each one once."""


def merged(*some: Iterable[MachineFault]) -> MachineFaults:
    return tuple(sorted({fault for faults in some for fault in faults})[-MOST:])


def counted(faults: Iterable[MachineFault]) -> dict[str, list[MachineFault]]:
    """Return the faults of each node that count. Nodes without such faults are omitted."""
    kept = {node: [fault for fault in own if own[fault]] for node, own in unforgiven(faults).items()}
    return {node: own for node, own in kept.items() if own}


def unforgiven(faults: Iterable[MachineFault]) -> dict[str, dict[MachineFault, bool]]:
    """Return the faults of each node since its acquittal, each with True if it counts."""
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
    """Blame no node for a suspicion on several nodes, because the script or the cluster causes it."""
    alike = [(own, fault) for own in found.values() for fault in own if fault.suspicion == suspicion]
    if len({fault.node for _, fault in alike}) > 1:
        for own, fault in alike:
            own[fault] = False


def excluded(faults: Iterable[MachineFault], after: int) -> Mapping[str, Sequence[MachineFault]]:
    """Return the nodes with at least `after` faults. With `after` 0, return no node."""
    if not after:
        return {}
    return {node: own for node, own in counted(faults).items() if len(own) >= after}


def describe_faults(faults: Sequence[MachineFault]) -> str:
    """Return `2 faults`."""
    return "1 fault" if len(faults) == 1 else f"{len(faults)} faults"


def read_faults(value: Any) -> MachineFaults:
    """Read faults from JSON. Raises ValueError or TypeError."""
    found = []
    for time, node, what, *more in value:
        if not math.isfinite(float(time)):
            raise ValueError(f"{time} is not a time")
        found.append(MachineFault(float(time), str(node), str(what), *map(str, more[:1])))
    return merged(found)


# ---- The copy of this node

_LONGEST = 1 << 20


def faults_path(log_dir: Path) -> Path:
    return log_dir / "nodes.json"


class Kept(NamedTuple):
    """The content of the file. `exclude_after` is the setting of the last launch, for `fleetrun nodes`."""

    faults: MachineFaults = ()
    exclude_after: int = 0


def read_kept(path: Path) -> Kept:
    """Read the file. Return an empty result if the file is missing.

    Raises OSError, and ValueError for a file with other content.
    """
    try:
        text = end_of(path, _LONGEST)
    except FileNotFoundError:
        return Kept()
    try:
        found = json.loads(text)
        return Kept(read_faults(found["faults"]), int(found["exclude_after"]))
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} does not contain faults of nodes: {error}") from None


def keep(path: Path, faults: MachineFaults, exclude_after: int | None = None) -> None:
    """Add these faults to the file.

    Nodes may share the directory. Each node therefore replaces the file with the union of its faults and the
    faults in the file. Raises like `read_kept`: a file with other content stays unchanged.
    """
    known = read_kept(path)
    kept = Kept(merged(known.faults, faults), known.exclude_after if exclude_after is None else exclude_after)
    if kept == known:
        return
    rows = [list(fault) for fault in kept.faults]
    with replacing(path) as aside:
        aside.write_text(json.dumps({"exclude_after": kept.exclude_after, "faults": rows}, indent=1) + "\n")
