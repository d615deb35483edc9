"""The pod of a Kubernetes job: one container that runs fleetrun, its environment, its probes. A value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """`grace` is in seconds; `python` runs the probes (None: there are none); `shm` bounds /dev/shm."""

    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    resources: Mapping[str, Any]
    grace: int
    token_secret: str = ""
    python: str | None = None
    shm: str = ""

    def spec(self, *, subdomain: str | None) -> dict[str, Any]:
        """With /dev/shm in memory: the 64 MB of a container are too few for data loaders."""
        memory = {"medium": "Memory"} | ({"sizeLimit": self.shm} if self.shm else {})
        container = self.container()
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        return {
            **({} if subdomain is None else {"subdomain": subdomain}),
            "restartPolicy": "Never",  # a policy on exit codes needs it
            "terminationGracePeriodSeconds": self.grace,
            "containers": [container],
            "volumes": [{"name": "shm", "emptyDir": memory}],
        }

    def container(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": "fleetrun",
            "image": self.image,
            # Kubernetes puts $(NAME) into commands: a doubled dollar is a dollar.
            "command": [word.replace("$(", "$$(") for word in self.command],
            "env": self._env(),
        }
        if self.resources:
            found["resources"] = dict(self.resources)
        return found | self._probes()

    def _env(self) -> list[dict[str, Any]]:
        env: list[dict[str, Any]] = [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        ]
        env += [{"name": name, "value": value} for name, value in self.environment.items()]
        if self.token_secret:
            key = {"secretKeyRef": {"name": self.token_secret, "key": "token"}}
            env.append({"name": "FLEETRUN_TOKEN", "valueFrom": key})
        return env

    def _probes(self) -> dict[str, Any]:
        """A minute to begin; then whether the launcher lives, and whether it runs processes."""
        if self.python is None:
            return {}

        def probe(question: str, period: int, failures: int) -> dict[str, Any]:
            command = [self.python, "-m", "fleetrun.schedulers.probe", question]
            return {
                "exec": {"command": command},
                "periodSeconds": period,
                "timeoutSeconds": 10,
                "failureThreshold": failures,
            }

        return {
            "startupProbe": probe("live", 2, 30),
            "livenessProbe": probe("live", 30, 3),
            "readinessProbe": probe("ready", 10, 1),
        }
