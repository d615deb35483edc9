"""From a job that was found to its record."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fleetrun.commands.finding import NoJobError, Past, Running
from fleetrun.record.history import History, UnreadableError, names, read, records


def history_of(found: Past | Running, but: Collection[str] = ("progress",)) -> History:
    """What is on record of it, without the events named in `but`. Raises NoJobError when there is nothing."""
    path = found.record if found.job else _of_pod(found.log_dir, found.pod) or found.record
    try:
        return read(path, but=but)
    except UnreadableError as error:
        raise NoJobError(
            f"the record of {found.job or found.pod} cannot be used: {error}",
            hint="It lies beside the logs: --log_dir names their folder.",
        ) from None


def _of_pod(log_dir: Path, pod: str) -> Path | None:
    """One whose launcher does not answer is known by its pod only."""
    return next((path for path in records(log_dir) if (names(path) or ("", ""))[1] == pod), None)
