"""Warn about a server without a listening process at its endpoint. Its script has trained alone."""

from __future__ import annotations

from fleetrun.envs.contract import Role, split_endpoint
from fleetrun.host.network import ports_in_use
from fleetrun.launcher.parts import Event, Launch, Part, Reach
from fleetrun.pod.container import Ended
from fleetrun.pod.events import Leaving


class Served(Part):
    """A part of a job with servers."""

    def __init__(self, launch: Launch, reach: Reach) -> None:
        self._warn = launch.console.warning

    def handle(self, event: Event) -> None:
        if isinstance(event, Leaving):
            servers = [each.spec for each in event.rest]
        elif isinstance(event, Ended) and event.exit.ok and not event.dismissed and event.asked is None:
            servers = [event.spec]
        else:
            return
        # Read twice, because the kernel's list may skip an entry while connections end.
        seen = ports_in_use() | ports_in_use()
        for spec in servers:
            if spec.role is Role.SERVER and spec.endpoint and split_endpoint(spec.endpoint)[1] not in seen:
                self._warn(
                    f"{spec.title}: no process listened at its endpoint {spec.endpoint}. A script for "
                    "parameter servers must call fleet.run_server() in this process; any other script "
                    "has trained in this process too"
                )
