"""The launches of this user that run on this machine, as their sockets know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetrun.control.client import Gone, NoAnswer, ask_all
from fleetrun.control.places import folders, sockets, take_away
from fleetrun.record.history import names

TIMEOUT = 6.0
"""Seconds in which all launchers answer, unless they are very busy: a disk may hold one up for three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """One launch. Times are seconds since the epoch.

    `status` is its answer, empty when there was none; `silence` says why then, and what is known of it was
    found from outside: `job` may be empty.
    """

    job: str
    pod: str
    log_dir: Path
    socket: Path
    pid: int
    started: float | None = None
    status: Mapping[str, Any] = field(default_factory=dict)
    silence: str = ""

    @property
    def record(self) -> Path:
        """The journal of this launch."""
        from fleetrun.record.journal import journal_path

        return journal_path(self.log_dir, self.job, self.pod)


def running(environ: Mapping[str, str], timeout: float = TIMEOUT) -> list[Running]:
    """All of them, the oldest first. What launchers that were killed have left is taken away."""
    paths = [path for folder in folders(environ) for path in sockets(folder)]
    found = []
    for path, answer in zip(paths, ask_all(paths, {"ask": "status"}, timeout), strict=True):
        if isinstance(answer, Gone):
            take_away(path)
        elif isinstance(answer, NoAnswer):
            found.append(_silent(path, answer.pid, str(answer)))
        else:
            found.append(_answered(path, answer))
    return sorted(found, key=lambda each: (each.started or 0.0, each.pod))


def _answered(path: Path, status: dict[str, Any]) -> Running:
    """One that says something else than the name of its socket is somebody's joke, and not listened to."""
    job, log_dir, started = status.get("job"), status.get("log_dir"), status.get("started")
    pid = status.get("pid")
    sound = isinstance(job, str) and isinstance(log_dir, str) and isinstance(pid, int) and 0 < pid < 1 << 31
    if not sound or status.get("pod") != path.stem:
        return _silent(path, 0, "it speaks another language")
    return Running(
        job=str(job),
        pod=path.stem,
        log_dir=Path(str(log_dir)),
        socket=path,
        pid=int(str(pid)),
        started=float(started) if isinstance(started, int | float) and 0 <= started < 1e12 else None,
        status=status,
    )


def _silent(path: Path, pid: int, why: str) -> Running:
    """Its record is open in the launcher: that tells its name and place."""
    record = _record_of(pid, path.stem)
    known = names(record) if record is not None else None
    return Running(
        job=known[0] if known is not None else "",
        pod=path.stem,
        log_dir=record.parent if record is not None else Path(),
        socket=path,
        pid=pid,
        started=_began(pid),
        silence=why,
    )


def _record_of(pid: int, pod: str) -> Path | None:
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = entry.readlink()
            known = names(target)
            if known is not None and known[1] == pod:
                return target
    except OSError:
        return None
    return None


def _began(pid: int) -> float | None:
    try:
        return Path(f"/proc/{pid}").stat().st_mtime
    except OSError:
        return None
