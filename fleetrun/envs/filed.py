"""What of a launch only a job file can say, as plain values: for its record, and to make a job file of."""

from __future__ import annotations

from typing import Any

from fleetrun.envs.settings import LaunchSettings
from fleetrun.envs.wishes import RoleWish


def parts(settings: LaunchSettings) -> dict[str, Any]:
    """Tables as they stand in a job file; empty when options say everything. Texts are filled in."""
    found: dict[str, Any] = {}
    if settings.script_filed:
        found |= {"script": settings.script, "args": list(settings.script_args)}
    if settings.environment:
        found["environment"] = dict(settings.environment)
    roles = {wish.table.partition(".")[2]: _role(wish) for wish in settings.roles}
    roles = {name: said for name, said in roles.items() if said}
    return found | ({"roles": roles} if roles else {})


def _role(wish: RoleWish) -> dict[str, Any]:
    resources = {"devices": list(wish.devices), "threads": wish.threads}
    said = {
        "script": wish.script,
        "args": None if wish.args is None else list(wish.args),
        "module": wish.module or None,
        "no_python": wish.no_python or None,
        "count": wish.count or None,
        "on": "each" if wish.each else None,
        "environment": dict(wish.environment) or None,
        "resources": {name: value for name, value in resources.items() if value} or None,
    }
    return {name: value for name, value in said.items() if value is not None}
