"""The status of a job whose processes report nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from fleetrun.control.server import JobStatus
from fleetrun.envs.progress_report import Report


class _NoReports:
    def latest(self, container: str, /) -> Report | None:
        return None

    def age(self, container: str, /) -> float | None:
        return None

    def speeds(self, container: str, /) -> tuple[float | None, float | None, float | None]:
        return None, None, None


def job_status(clock: Callable[[], float] = time.time) -> JobStatus:
    return JobStatus(_NoReports(), clock)
