"""Starting: the pod's hook first, to its end, then containers. Decides nothing about failures."""

from __future__ import annotations

from collections.abc import Callable

from fleetrun.pod.container import Container, Ended
from fleetrun.pod.pod import Pod

Watch = Callable[[Container, Callable[[Ended], None]], None]
"""Starts one container and tells when it has ended. Raises LaunchError when it cannot be started."""


class Deployer:
    """Starts containers of one pod, as often as asked."""

    def __init__(
        self,
        pod: Pod,
        watch: Watch,
        *,
        exited: Callable[[Container, Ended], None],
        failed: Callable[[Ended, list[Container]], None],
        started: Callable[[list[Container]], None],
        goes_on: Callable[[], bool],
    ) -> None:
        """`exited` is told of the end of a container, `failed` of a hook that failed and of whom it kept from
        starting. What waits for a hook is started only while the job `goes_on`.
        """
        self._pod = pod
        self._watch = watch
        self._exited = exited
        self._failed = failed
        self._started = started
        self._goes_on = goes_on
        self._behind_hook: list[list[Container]] = []

    def deploy(self, containers: list[Container]) -> None:
        """Raises LaunchError when one cannot be started."""
        hook = self._pod.hook
        if hook is None:
            self.start(containers)
        elif hook.alive:  # that of another restart; this one has its own run after it
            self._behind_hook.append(containers)
        else:
            hook.renew()
            self._watch(hook, lambda ended: self._hook_ended(ended, containers))

    def call_off(self) -> None:
        """What waits for a hook is not started."""
        self._behind_hook.clear()

    def _hook_ended(self, ended: Ended, containers: list[Container]) -> None:
        if ended.exit.ok:
            self.start(containers)
        else:
            self._failed(ended, containers)
        if self._behind_hook and self._goes_on():
            self.deploy(self._behind_hook.pop(0))

    def start(self, containers: list[Container]) -> None:
        """At once, without the hook. Raises LaunchError when one cannot be started."""
        for container in containers:
            self._watch(container, lambda ended, container=container: self._exited(container, ended))  # type: ignore[misc]
        self._pod.running()
        self._started(containers)
