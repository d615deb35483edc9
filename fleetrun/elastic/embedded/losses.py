"""What a node tells its user when the embedded store will never answer it. Words only."""

from __future__ import annotations

from fleetrun.errors import StoreError, StoreLostError

_HINT = "With --master etcd://... a job outlives any one node."


def gone(endpoint: str) -> StoreLostError:
    return StoreLostError(
        f"the meeting point {endpoint} is gone, and the launcher that served it: connection refused",
        hint=_HINT,
    )


def silent(endpoint: str, lease: float) -> StoreLostError:
    return StoreLostError(
        f"the meeting point {endpoint} has not answered for {lease:g} s: its machine or the network is gone",
        hint=_HINT,
    )


def replaced(endpoint: str) -> StoreLostError:
    return StoreLostError(
        f"the meeting point {endpoint} is another one: the launcher that served it was started again",
        hint=_HINT,
    )


def refused(endpoint: str, why: str) -> StoreError:
    return StoreError(f"the meeting point {endpoint} refuses this node: {why}")


def denied(endpoint: str, *, secret: bool) -> StoreError:
    """`secret`: whether this node has one."""
    theirs = (
        "has one, and the meeting point has another or none"
        if secret
        else "has none, and the meeting point has one"
    )
    return StoreError(
        f"the meeting point {endpoint} does not take this node: their secrets differ (this node {theirs})",
        hint="Give every node the same FLEETRUN_TOKEN or --token_file, or none of them any.",
    )
