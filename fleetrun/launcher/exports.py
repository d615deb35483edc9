"""Sends the record and the reports of progress to the exporters."""

from __future__ import annotations

from fleetrun.aliases import Fields
from fleetrun.exporters.feed import Feed
from fleetrun.launcher.parts import Launch, Part, Reach


class Exports(Part):
    """With --tensorboard, --metrics_port or --export."""

    def __init__(self, launch: Launch, reach: Reach) -> None:
        self._feed = Feed(launch.loop, launch.companions, launch.progress, launch.console.info, launch.warn)
        self._feed.open(launch.settings, launch.spec)

    def noted(self, line: Fields) -> None:
        self._feed.event(line)

    def close(self, urgent: int) -> None:
        self._feed.close(urgent)
