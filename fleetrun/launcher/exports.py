"""Sends the record and the reports of progress to the exporters."""

from __future__ import annotations

from fleetrun.aliases import Fields
from fleetrun.exporters.feed import Feed
from fleetrun.launcher.parts import Launch, Part, Reach

_SPENDING = frozenset({"ready", "progress", "exited", "over"})
"""Events after which the time of the job is exported anew."""


class Exports(Part):
    """With --tensorboard, --metrics_port or --export."""

    def __init__(self, launch: Launch, reach: Reach) -> None:
        self._goodput = launch.status.goodput
        self._feed = Feed(launch.loop, launch.companions, launch.progress, launch.console.info, launch.warn)
        self._feed.open(launch.settings, launch.spec)

    def noted(self, line: Fields) -> None:
        if line["event"] != "progress":  # it gets each report
            self._feed.event(line)
        if line["event"] in _SPENDING:
            seconds = self._goodput.seconds()  # what is certain: a counter must never go back
            self._feed.spent({str(kind): spent for kind, spent in seconds.items()})

    def close(self, urgent: int) -> None:
        self._feed.close(urgent)
