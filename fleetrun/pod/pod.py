"""A pod: the containers of one job on this node. Knows who is who; decides nothing."""

from __future__ import annotations

from fleetrun.envs.contract import Role
from fleetrun.pod.container import Container, Status, move
from fleetrun.pod.spec import PodSpec


class Pod:
    def __init__(self, spec: PodSpec, attempt: int = 0) -> None:
        """`attempt` counts the pods of this job that ran on this node before, with the same log files."""
        self.spec = spec
        self.status = Status.UNINIT
        self.containers = [Container(each, attempt) for each in spec.containers]
        self.hook = Container(spec.pre_hook, attempt) if spec.pre_hook is not None else None

    def prepare(self) -> None:
        """Make the log files. Raises LaunchError when that cannot be; nothing runs then."""
        for container in [*self.containers, *([self.hook] if self.hook else [])]:
            container.prepare()
        self._to(Status.READY)

    def running(self) -> None:
        if self.status is not Status.RUNNING:
            self._to(Status.RUNNING)

    def _to(self, status: Status) -> None:
        self.status = move(self.status, status)

    @property
    def alive(self) -> list[Container]:
        return [each for each in self._all if each.alive]

    @property
    def stop_order(self) -> list[list[Container]]:
        """Whom to stop together, one group after the other: servers last, so that no trainer loses its server
        first.
        """
        workers = [each for each in self._all if each.spec.role is not Role.SERVER]
        return [workers, [each for each in self._all if each.spec.role is Role.SERVER]]

    @property
    def trainers_completed(self) -> bool:
        """Whether the job is done. Servers, heter trainers and coordinators serve the trainers; they do not
        decide.
        """
        return all(
            each.status is Status.COMPLETED for each in self.containers if each.spec.role is Role.TRAINER
        )

    def pids(self) -> set[int]:
        return {each.process.pid for each in self.alive if each.process is not None}

    @property
    def _all(self) -> list[Container]:
        return [*self.containers, *([self.hook] if self.hook else [])]
