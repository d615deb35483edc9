"""Start a zygote of the Python processes, which imports for them once (--warm)."""

from __future__ import annotations

from fleetrun.elastic.rendezvous.actions import Waiting
from fleetrun.launcher.parts import Event, Launch, Part, Reach
from fleetrun.pod.container import Ended, Pod
from fleetrun.pod.zygote import Zygotes


class Warm(Part):
    """A part of a launch with --warm."""

    def __init__(self, launch: Launch, reach: Reach) -> None:
        self._launch = launch
        self._zygotes = Zygotes(
            launch.loop,
            launch.companions,
            launch.console.info,
            launch.warn,
            launch.runtime,
            watch=launch.settings.watch,
        )
        launch.progress.subscribe(self._zygotes.handle_report)
        self.ready = self._zygotes.ready
        self.take = self._zygotes.take

    def set_pod(self, pod: Pod, restarts: int) -> None:
        self._zygotes.set_pod(pod)

    def handle(self, event: Event) -> None:
        match event:
            case Ended() if event.ok:
                self._zygotes.learn(event.spec, event.pid)
            case Waiting() if event.spare:
                self._zygotes.prepare(self._launch.spec.containers)

    def close(self, urgent: int) -> None:
        self._zygotes.close()
