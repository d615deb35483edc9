"""Start standbys of the processes, in which a restart continues (--warm)."""

from __future__ import annotations

from fleetrun.aliases import Environ
from fleetrun.launcher.parts import Launch, Part, Reach
from fleetrun.pod.container import Pod
from fleetrun.pod.process import Process
from fleetrun.pod.spec import ContainerSpec, PodSpec
from fleetrun.pod.standby import Standbys


class Warm(Part):
    """A part of a launch with --warm."""

    def __init__(self, launch: Launch, reach: Reach) -> None:
        self._launch = launch
        console = launch.console
        self._standbys = Standbys(launch.loop, launch.companions, console.info, console.warning, reach.listed)
        launch.progress.subscribe(self._standbys.heard)

    def set_pod(self, pod: Pod, restarts: int) -> None:
        self._standbys.set_pod(pod)

    def take(self, spec: ContainerSpec, env: Environ) -> Process | None:
        """Return a warm process for this one, or None, as `TakeWarm` of the pods of this launch."""
        return self._standbys.take(spec, env)

    def prepare(self, spec: PodSpec, imports: bytes, trusted: bool) -> None:
        """Start standbys on a spare, for a node like this one. For `imports` and `trusted`, see
        `Standbys.prepare`.
        """
        try:
            self._standbys.prepare(spec.containers, imports, trusted=trusted)
        except (OSError, ValueError) as error:
            self._launch.warn(f"this spare will not be warm: {error}")

    def close(self, urgent: int) -> None:
        self._standbys.close()
