"""Which processes of a job a person means, and which moment. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from fleetrun.errors import UsageError
from fleetrun.record.history import Known

Chosen = Known

_WORDS = {"server": "ps", "pserver": "ps", "worker": "trainer", "heter_worker": "heter", "hook": "pre_hook"}
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "": 1}
_AGO = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(s|m|min|h|d|)(?:\s+ago)?", re.ASCII)
_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d")
_CLOCK = ("%H:%M:%S", "%H:%M")
_MOST_RANKS = 1_000_000


def choose(there: Sequence[Known], role: str | None, rank: str | None) -> list[Known]:
    """Of the processes of a job those with these roles and ranks; all without either. Raises UsageError when
    that is none.
    """
    if not there:
        raise UsageError("the record of this job names no processes", hint="Its logs are files in --log_dir.")
    roles = _roles(role, {each.role for each in there}) if role is not None else None
    if roles is None and rank is not None:
        roles = {"trainer"}
    ranks = _ranks(rank) if rank is not None else None
    found = [
        each
        for each in there
        if (roles is None or each.role in roles) and (ranks is None or each.rank in ranks)
    ]
    if not found:
        asked = " ".join(
            f"--{name} {text}" for name, text in (("role", role), ("rank", rank)) if text is not None
        )
        raise UsageError(f"{asked}: there is no such process here", hint=f"There are {described(there)}.")
    return found


def described(there: Sequence[Known]) -> str:
    """`trainer 0-3, ps 0`"""
    by_role: dict[str, list[int]] = {}
    for each in there:
        by_role.setdefault(each.role, []).extend([] if each.rank is None else [each.rank])
    return ", ".join(f"{role} {_written(sorted(ranks))}".strip() for role, ranks in by_role.items())


def _written(ranks: Sequence[int]) -> str:
    """`0-2,5`"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


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
    """`0,3`, `0-2,5`"""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low or high > _MOST_RANKS:
            raise UsageError(f"--rank {text}: it must be ranks, such as 0, 0,3 or 0-2,5")
        found.update(range(low, high + 1))
    return frozenset(found)


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
