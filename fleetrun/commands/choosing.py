"""Which processes of a job a person means, and which moment. Pure."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterable, Sequence

from fleetrun.commands.elsewhere import Away
from fleetrun.envs import ranges
from fleetrun.errors import UsageError
from fleetrun.record.history import Known

Chosen = Known

_WORDS = {"server": "ps", "pserver": "ps", "worker": "trainer", "heter_worker": "heter", "hook": "pre_hook"}
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "": 1}
_AGO = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(s|m|min|h|d|)(?:\s+ago)?", re.ASCII)
_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d")
_CLOCK = ("%H:%M:%S", "%H:%M")
_MOST_NODES = 8


def choose(
    there: Sequence[Known],
    role: str | None,
    rank: str | None,
    away: Callable[[], Sequence[Away]] = tuple,
    command: str = "",
) -> list[Known]:
    """Of the processes of a job those with these roles and ranks; all without either. Raises UsageError when
    that is none. It says then which other machine has them, and to type `command` there.
    """
    if not there:
        raise UsageError("the record of this job names no processes", hint="Its logs are files in --log_dir.")
    roles = _roles(role, {each.role for each in there}) if role is not None else None
    if roles is None and rank is not None:
        roles = {"trainer"}
    ranks = _ranks(rank) if rank is not None else None

    def wanted(each: Known | Away) -> bool:
        return (roles is None or each.role in roles) and (ranks is None or each.rank in ranks)

    found = [each for each in there if wanted(each)]
    if not found:
        asked = [f"--{name} {text}" for name, text in (("role", role), ("rank", rank)) if text is not None]
        others = [each for each in away() if wanted(each)]
        hint = f"There are {described(there)}."
        if others:
            words = (
                f"--{name} {shlex.quote(text)}" for name, text in (("role", role), ("rank", rank)) if text
            )
            hint = f"{_where(others)}\nType there: {command} {' '.join(words)}\nHere are {described(there)}."
        raise UsageError(f"{' '.join(asked)}: there is no such process here", hint=hint)
    return found


def described(there: Iterable[Known | Away]) -> str:
    """`trainer 0-3, ps 0`"""
    by_role: dict[str, list[int]] = {}
    for each in there:
        by_role.setdefault(each.role, []).extend([] if each.rank is None else [each.rank])
    return ", ".join(f"{role} {ranges.written(ranks)}".strip() for role, ranks in by_role.items())


def _where(others: Sequence[Away]) -> str:
    """`On node 1, h2 (10.0.0.2): trainer 2-3`, a line for each machine."""
    nodes = list(dict.fromkeys(each.node for each in others))
    lines = [
        f"On {node}: {described(each for each in others if each.node == node)}"
        for node in nodes[:_MOST_NODES]
    ]
    if len(nodes) > _MOST_NODES:
        lines.append(f"and on {len(nodes) - _MOST_NODES} more")
    return "\n".join(lines)


def _roles(text: str, there: set[str]) -> set[str]:
    words = {word.strip().lower().rstrip("s") or word for word in text.split(",")}
    roles = {"ps" if word in ("p", "ps") else _WORDS.get(word, word) for word in words}
    unknown = roles - there - {"trainer", "ps", "heter", "coordinator", "pre_hook", "evaluator"}
    if unknown:
        raise UsageError(
            f"--role {text}: there is no such role", hint=f"Roles here: {', '.join(sorted(there))}."
        )
    return roles


def _ranks(text: str) -> frozenset[int]:
    found = ranges.read(text)
    if found is None:
        raise UsageError(f"--rank {text}: it must be ranks, such as 0, 0,3 or 0-2,5")
    return found


def moment(text: str, now: float) -> float:
    """`10m` (ago), `07:15` (the last time it was that late), `2026-11-22 07:15`: seconds since the epoch.

    Raises UsageError.
    """
    ago = _AGO.fullmatch(text.strip())
    if ago is not None:
        return now - float(ago[1]) * _UNITS[ago[2]]
    for form in _FORMATS:
        parsed = _parsed(text, form)
        if parsed is not None:
            return parsed
    today = time.strftime("%Y-%m-%d", time.localtime(now))
    for form in _CLOCK:
        parsed = _parsed(f"{today} {text}", f"%Y-%m-%d {form}")
        if parsed is not None:
            return parsed if parsed <= now else parsed - 86400
    raise UsageError(f"--since {text}: it must be 30s, 10m, 2h or 1d (ago), or 07:15, or 2026-11-22 07:15")


def _parsed(text: str, form: str) -> float | None:
    try:
        return time.mktime(time.strptime(text.strip(), form))
    except (ValueError, OverflowError):
        return None
