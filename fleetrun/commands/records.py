"""From a job that was found to its record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fleetrun.commands.finding import NoJobError, Past
from fleetrun.control.running import Running
from fleetrun.record.history import History, UnreadableError, names, read, records


def history_of(found: Past | Running) -> History:
    """What is on record of it, without its progress. Raises NoJobError when there is nothing."""
    path = found.record if found.job else _of_pod(found.log_dir, found.pod) or found.record
    try:
        history = read(path, but=("progress",))
    except UnreadableError as error:
        raise NoJobError(
            f"the record of {found.job or found.pod} cannot be used: {error}",
            hint="It lies beside the logs: --log_dir names their folder.",
        ) from None
    if history.running is None and isinstance(found, Running):  # no locks there, but its launcher was heard
        return replace(history, running=history.over is None)
    return history


def _of_pod(log_dir: Path, pod: str) -> Path | None:
    """One whose launcher does not answer is known by its pod only."""
    return next((path for path in records(log_dir) if (names(path) or ("", ""))[1] == pod), None)
