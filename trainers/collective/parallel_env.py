"""Paddle's short way to data parallel training: `init_parallel_env`, `get_rank`, `get_world_size`."""

from __future__ import annotations

import torch.distributed as dist

from trainers.collective.group import start
from trainers.errors import UsageError
from trainers.lastwords import install
from trainers.roles.current import current_identity


def init_parallel_env() -> None:
    """Join the process group that the environment describes; a process on its own is a group of one."""
    install()
    identity = current_identity()
    if identity.launched_as_ps:
        raise UsageError(
            "init_parallel_env() is collective, and this job was started with parameter servers; "
            "start it without --server_num and --trainer_num, or use fleet.init(is_collective=False)"
        )
    start(identity)


def get_rank() -> int:
    """This process's rank, before init_parallel_env too."""
    return dist.get_rank() if dist.is_initialized() else current_identity().index


def get_world_size() -> int:
    """The number of processes (in a parameter-server job: of trainers), before init_parallel_env too."""
    return dist.get_world_size() if dist.is_initialized() else current_identity().worker_num
