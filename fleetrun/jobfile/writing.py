"""A launch as a job file. What it writes, `meaning` reads as the same settings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetrun.envs.argv import Given, read
from fleetrun.envs.filed import parts
from fleetrun.envs.options import Takes
from fleetrun.envs.settings import Resolved
from fleetrun.errors import UsageError
from fleetrun.jobfile import toml
from fleetrun.jobfile.filling import escaped

_NOT_KEPT = frozenset({"config", "save", "dry_run", "json", "module"})
_OF_ONE_MACHINE = frozenset({"rank", "host", "nic"})


def document(resolved: Resolved) -> str:
    """All that was chosen for a launch, wherever; not what an engine said. Variables are filled in."""
    settings = resolved.settings
    said = literal(parts(settings))
    lines = [
        "# A job file of fleetrun: start it with `fleetrun up FILE`.",
        "",
        f"script = {toml.text(escaped(settings.script))}",
    ]
    if settings.script_args:
        lines.append(f"args = {toml.value(literal(list(settings.script_args)))}")
    if settings.module:
        lines.append("module = true")
    lines.append("")
    lines += [_row(given, resolved) for given in read(_words(resolved)).given]
    if "environment" in said:
        lines += toml.table(("environment",), said["environment"])
    if "roles" in said:
        lines += toml.table(("roles",), said["roles"])
    return "\n".join(lines).rstrip() + "\n"


def tables(said: Mapping[str, Any], head: str) -> str:
    """A job file of what only job files can say (`envs.filed.parts`)."""
    rows = literal(said)
    lines = [head, *(f"{name} = {toml.value(rows[name])}" for name in ("script", "args") if name in rows)]
    for name in ("environment", "roles"):
        lines += toml.table((name,), rows[name]) if name in rows else []
    return "\n".join(lines) + "\n"


def _words(resolved: Resolved) -> list[str]:
    left_out = _NOT_KEPT | resolved.engine
    return [word for name, word in resolved.words.items() if name not in left_out]


def _row(given: Given, resolved: Resolved) -> str:
    """`trainer_num = 2  # --worker_num`; of an option that is one machine's the same as a comment."""
    name, origin = given.option.name, resolved.origins.get(given.option.name, "")
    value: Any = escaped(given.text)
    if given.option.takes is not Takes.VALUE:
        value = getattr(resolved.settings, name)
    elif name == "scheduler_option":  # a list, which one text cannot be
        value = literal(list(resolved.settings.scheduler_option))
    elif isinstance(getattr(resolved.settings, name), int) and given.text.isdecimal():
        value = int(given.text)
    row = f"{given.alias} = {toml.value(value)}"
    if name in _OF_ONE_MACHINE:
        return f"# {row}  # of the machine where it was {_came(origin)}"
    return f"{row}  # {_came(origin)}" if not origin.startswith("--") else row


def _came(origin: str) -> str:
    return "typed" if origin.startswith("--") else f"from {origin}"


def literal(value: Any) -> Any:
    """As it has to stand in a job file: with no text in it taken for a variable."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, list):
        return [literal(each) for each in value]
    if isinstance(value, Mapping):
        return {name: literal(each) for name, each in value.items()}
    return value


def save(resolved: Resolved, name: str) -> None:
    """Raises UsageError when there is such a file, or none can be made."""
    try:
        text = document(resolved)
    except UnicodeEncodeError as error:
        raise UsageError(f"--save {name}: {error.object!r} has bytes that are no UTF-8") from None
    create(name, text, "--save")


def typed(name: str) -> str:
    """The name of a job file as it is typed after `fleetrun up`."""
    import shlex  # late: few launches tell this

    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def create(name: str, text: str, origin: str) -> None:
    """A new file with this text, for its owner only: environments may hold secrets. Raises UsageError."""
    data = text.encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o600)
    except FileExistsError:
        hint = "Move it away, or choose another name."
        raise UsageError(f"{origin} {name}: there is such a file already", hint=hint) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no file name"
        raise UsageError(f"{origin} {name} cannot be written: {why}") from None
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise UsageError(f"{origin} {name} cannot be written: {error.strerror}") from None
