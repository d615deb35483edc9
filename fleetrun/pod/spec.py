"""Describe what to run, as values that you can print, compare and test without a process."""

from __future__ import annotations

from pathlib import Path

from fleetrun.aliases import Environ, Strings, Texts
from fleetrun.envs.channels import CONTAINER_VARIABLE
from fleetrun.envs.contract import Mode, Role
from fleetrun.values import field, frozen_by_name


@frozen_by_name
class ContainerSpec:
    """One process, with its command, its complete environment and its files.

    `rank` counts within the role over the whole job. `index` counts within the role on this node and is the
    number in file names. `restart_variables` name the variables that count restarts, and `environment(n)`
    fills them in. `label` names a process without a role (the pre-hook). `notice_file` holds the reason for a
    stop. `long_file` holds the `long_values`, which are too long for an environment.
    """

    role: Role
    rank: int
    index: int
    argv: Strings
    env: Environ = field(repr=False)
    log: Path
    endpoint: str = ""
    error_file: Path | None = None
    notice_file: Path | None = None
    long_file: Path | None = None
    long_values: Texts = field(default_factory=dict, repr=False)
    restart_variables: Strings = ("PADDLE_RESTART_COUNT",)
    label: str = ""

    @property
    def name(self) -> str:
        """The label on the console and the middle part of the log file's name, such as `trainer.0`."""
        return self.label or f"{self.role}.{self.index}"

    @property
    def title(self) -> str:
        """The name in messages, with the rank in the job, such as `trainer 3`."""
        return self.label or f"{'server' if self.role is Role.SERVER else self.role} {self.rank}"

    @property
    def mark(self) -> str:
        """`NAME=value` as in the environment of every process that this container started."""
        return f"{CONTAINER_VARIABLE}={self.env.get(CONTAINER_VARIABLE, '')}"

    def environment(self, restart_count: int) -> dict[str, str]:
        return {**self.env, **dict.fromkeys(self.restart_variables, str(restart_count))}


@frozen_by_name
class PodSpec:
    """The processes of one job on this node, servers first. `pre_hook` runs to its end before every start."""

    name: str
    job_id: str
    mode: Mode
    containers: tuple[ContainerSpec, ...]
    log_dir: Path
    pre_hook: ContainerSpec | None = None

    @property
    def replicas(self) -> int:
        return len(self.containers)

    @property
    def uses_gpus(self) -> bool:
        return any("FLAGS_selected_gpus" in each.env for each in self.containers)


def log_path(log_dir: Path, job: str, pod: str, role: str, index: int) -> Path:
    return log_dir / f"{job}.{pod}.{role}.{index}.log"
