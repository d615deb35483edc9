"""Which fleetrun this is: nodes of one job must run the same."""

from __future__ import annotations

from functools import cache


@cache
def running_version() -> str:
    from importlib.metadata import version

    return version("fleetrun")
