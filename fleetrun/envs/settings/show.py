"""Show settings in other forms.

The forms are the rows of the banner, and the command line for the same run. Others are the values that must
agree on all nodes, and the tables that only a job file can hold.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fleetrun.aliases import Document, Strings
from fleetrun.envs.contract import NodeLoss, Role
from fleetrun.envs.settings import parsing
from fleetrun.envs.settings.options import OPTIONS, LaunchSettings, Resolved, RoleSettings

_ALWAYS_SHOWN = (
    "devices", "on_node_loss", "elastic_timeout", "gloo_port", "host", "job_id", "legacy", "log_dir",
    "log_level", "master", "max_restart", "nnodes", "nproc_per_node", "rank", "run_mode", "server_num",
    "servers", "trainer_num", "trainers", "with_gloo",
)  # fmt: skip
_PADDLE_LEVELS = {NodeLoss.FAIL: "-1", NodeLoss.WAIT: "0", NodeLoss.SHRINK: "1"}
_EMPTY_AS_TEXT = frozenset({"servers", "trainers"})


Row = tuple[str, str, str | None]
"""A name, its value, and where it was set."""


def banner(resolved: Resolved) -> list[Row]:
    """Return the rows (name, value, origin) of the configuration banner, sorted by name.

    The 22 rows of Paddle's banner always appear, in Paddle's notation. Other rows appear if you set them. The
    origin of a default is None.
    """
    return sorted(
        ("elastic_level", _PADDLE_LEVELS[NodeLoss(value)], origin)
        if name == "on_node_loss"
        else (name, value, origin)
        for name, value, origin in _rows(resolved)
    )


def _rows(resolved: Resolved) -> list[Row]:
    rows = [
        ("training_script", resolved.settings.script, resolved.origins.get("script")),
        ("training_script_args", str(list(resolved.settings.script_args)), resolved.origins.get("args")),
        *_job_file_rows(resolved),
    ]
    for name in OPTIONS:
        origin = resolved.origins.get(name)
        if name in _ALWAYS_SHOWN or origin is not None:
            rows.append((name, _shown(name, getattr(resolved.settings, name)), origin))
    return rows


_NOT_SHOWN = frozenset({"job_id", "run_mode", "training_script", "training_script_args", "save"})
"""The first lines of the job show these rows, or the row does not describe the job."""


def changed(resolved: Resolved) -> list[tuple[str, str, str]]:
    """Return the rows of the banner that are not defaults and are missing from the job's first lines."""
    return [
        (name, value, origin)
        for name, value, origin in sorted(_rows(resolved))
        if origin is not None and name not in _NOT_SHOWN and value != _default(name)
    ]


def _default(name: str) -> str | None:
    return _shown(name, OPTIONS[name].default) if name in OPTIONS else None


def _job_file_rows(resolved: Resolved) -> list[Row]:
    """Return rows for settings that only a job file can express.

    Environments appear with names only, because values may be secret.
    """
    settings = resolved.settings
    rows = []
    if settings.environment:
        names = ", ".join(name for name, _ in settings.environment)
        rows.append(("environment", names, resolved.origins.get("environment")))
    for own in settings.roles:
        named = {
            "script": own.script,
            "args": None if own.args is None else str(list(own.args)),
            "environment": ", ".join(name for name, _ in own.environment),
            "threads": own.threads,
            "count": own.count,
            "devices": ",".join(own.devices),
        }
        shown = [f"{name} {value}" for name, value in named.items() if value]
        if shown:
            rows.append((own.table, "; ".join(shown), own.where))
    return rows


def _shown(name: str, value: Any) -> str:
    if name == "follow":
        return parsing.written_follow(value)
    if name == "notify":
        return parsing.written_notifiers(value)
    if name == "export":
        return ", ".join(f"{each}={argument}" if argument else each for each, argument in value)
    if name in ("nnodes", "port_range") and isinstance(value, tuple):
        return ":".join(map(str, value if name == "port_range" else dict.fromkeys(value)))
    if value == ():
        return "" if name in _EMPTY_AS_TEXT else "None"
    if isinstance(value, tuple):
        joint = ";" if name.startswith("heter") else ","
        return joint.join(",".join(part) if isinstance(part, tuple) else str(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


FUNCTION = "fleetrun.function"
"""The module that runs a Python function given to `fleetrun.run`. Its last argument is the function's
name.
"""


def program(settings: LaunchSettings) -> str:
    """Return the script, or the name of the function."""
    is_function = settings.module and settings.script == FUNCTION and settings.script_args
    return settings.script_args[-1] if is_function else settings.script


def words(resolved: Resolved, but: Collection[str] = ()) -> Strings:
    """Return the words after `fleetrun` for the same run, without the options in `but`."""
    given = [word for name, word in resolved.words.items() if name not in but and name != "module"]
    settings = resolved.settings
    if settings.script_in_job_file:
        return tuple(given)
    script = ("-m", settings.script) if settings.module else (settings.script,)
    if settings.script.startswith("-"):
        script = ("--", *script)
    return (*given, *script, *settings.script_args)


_AGREED = (
    "run_mode", "backend", "nnodes", "spares", "exclude_after", "check", "ips", "servers", "trainers",
    "heter_workers", "coordinators",
    "max_restart", "restart_window", "on_node_loss", "elastic_timeout", "heartbeat_timeout", "with_gloo",
    "module", "watch",
)  # fmt: skip


def agreed(resolved: Resolved) -> dict[str, str]:
    """Return the options that must agree on all nodes of a job, by flag, and the script's name."""
    settings = resolved.settings
    texts = {f"--{name}": _shown(name, getattr(settings, name)) for name in _AGREED}
    scripts = {
        f"the script of {own.table}": own.script.rpartition("/")[2]
        for own in settings.roles
        if own.script is not None
    }
    evaluators = settings.role_settings(Role.EVALUATOR)
    where = "each node" if evaluators.each else "the first node"
    number = f"{evaluators.count} on {where}" if evaluators.count else "none"
    return {**texts, "the script": settings.script.rpartition("/")[2], **scripts, "roles.evaluator": number}


# ---- Settings that only a job file can express, as plain values, for the event log and for job files


def job_file_parts(settings: LaunchSettings) -> Document:
    """Return the tables of a job file, with variables filled in, or `{}` if options express all settings."""
    found: Document = {}
    if settings.script_in_job_file:
        found |= {"script": settings.script, "args": list(settings.script_args)}
    if settings.environment:
        found["environment"] = dict(settings.environment)
    roles = {own.table.partition(".")[2]: _role(own) for own in settings.roles}
    roles = {name: fields for name, fields in roles.items() if fields}
    return found | ({"roles": roles} if roles else {})


def _role(own: RoleSettings) -> Document:
    resources = {"devices": list(own.devices), "threads": own.threads}
    fields = {
        "script": own.script,
        "args": None if own.args is None else list(own.args),
        "module": own.module or None,
        "no_python": own.no_python or None,
        "count": own.count or None,
        "on": "each" if own.each else None,
        "environment": dict(own.environment) or None,
        "resources": {name: value for name, value in resources.items() if value} or None,
    }
    return {name: value for name, value in fields.items() if value is not None}
