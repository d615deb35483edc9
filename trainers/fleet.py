"""The fleet API: module-level functions on one Fleet object. Knows how a job begins; the calls are in
`trainers.calls`, the work is done in `collective` and `ps`.
"""

from __future__ import annotations

import os
from typing import Any

from trainers import progress
from trainers.calls.continuing import Continuing
from trainers.calls.place import Place
from trainers.calls.saving import Saving
from trainers.calls.servers import Servers
from trainers.calls.sharing import Sharing
from trainers.calls.training import Training
from trainers.collective.runtime import CollectiveRuntime
from trainers.errors import NotSupportedError, UsageError
from trainers.lastwords import install
from trainers.legacy import DistributeTranspilerConfig, strategy_of
from trainers.optimizer import DistributedOptimizer
from trainers.roles.choice import settle
from trainers.roles.cloud import PaddleCloudRoleMaker
from trainers.roles.current import ask_first
from trainers.roles.identity import Identity, Role, RoleMaker
from trainers.roles.symmetric import MPISymmetricRoleMaker
from trainers.roles.userdefined import UserDefinedRoleMaker
from trainers.runtime import Runtime
from trainers.strategy import DistributedStrategy

__all__ = [
    "DistributeTranspilerConfig",
    "DistributedOptimizer",
    "DistributedStrategy",
    "MPISymetricRoleMaker",
    "MPISymmetricRoleMaker",
    "PaddleCloudRoleMaker",
    "Role",
    "UserDefinedRoleMaker",
    "activity",
    "barrier_worker",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scaler",
    "heartbeat",
    "infer_from_dataset",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load",
    "load_checkpoint",
    "load_latest",
    "log_scalar",
    "metrics",
    "minimize",
    "prefetch",
    "report",
    "resume_step",
    "run_server",
    "save",
    "save_checkpoint",
    "save_inference_model",
    "save_persistables",
    "server_endpoints",
    "server_index",
    "server_num",
    "shrink",
    "stop_requested",
    "stop_worker",
    "train_from_dataset",
    "util",
    "wait_checkpoint",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]


class Fleet(Place, Training, Servers, Saving, Continuing, Sharing):
    """One process's view of its job. Every method but `init` raises UsageError before `init`."""

    def init(
        self,
        role_maker: RoleMaker | None = None,
        is_collective: bool = False,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
    ) -> None:
        """Find out who this process is and, for a collective job, join the process group.

        Without a role maker the environment decides: fleetrun, torchrun, Paddle's launchers and mpirun, which
        alone has no servers: a job under it that is not collective takes MPISymmetricRoleMaker. A role maker
        that says `is_collective` need not be told again here.

        Raises UsageError when the job was not started for this kind of training, and what the role maker
        raises.
        """
        install()
        if self._runtime is not None:
            raise UsageError("fleet.init() was called before; call it once, at the start of the script")
        wishes = strategy_of(strategy) if strategy is not None else DistributedStrategy()
        collective, identity = settle(role_maker, is_collective, os.environ)
        wishes.fits(collective)
        self._runtime = _runtime(collective, identity, wishes)
        self._identity = identity


def _runtime(is_collective: bool, identity: Identity, strategy: DistributedStrategy) -> Runtime:
    if is_collective:
        return CollectiveRuntime(identity, strategy)
    # Late: its kernels take a third of a second to load, which a collective job need not wait for.
    from trainers.ps.runtime import ServerRuntime, TrainerRuntime

    return ServerRuntime(identity, strategy) if identity.is_server else TrainerRuntime(identity, strategy)


MPISymetricRoleMaker = MPISymmetricRoleMaker  # as Paddle spells it

_fleet = Fleet()
ask_first(_fleet.found)
init = _fleet.init
report = progress.report
log_scalar = progress.log_scalar
heartbeat = progress.heartbeat
activity = progress.activity
distributed_model = _fleet.distributed_model
distributed_optimizer = _fleet.distributed_optimizer
distributed_scaler = _fleet.distributed_scaler
minimize = _fleet.minimize
is_server = _fleet.is_server
is_worker = _fleet.is_worker
is_first_worker = _fleet.is_first_worker
worker_num = _fleet.worker_num
worker_index = _fleet.worker_index
server_num = _fleet.server_num
server_index = _fleet.server_index
worker_endpoints = _fleet.worker_endpoints
server_endpoints = _fleet.server_endpoints
barrier_worker = _fleet.barrier_worker
prefetch = _fleet.prefetch
resume_step = _fleet.resume_step
save_checkpoint = _fleet.save_checkpoint
wait_checkpoint = _fleet.wait_checkpoint
load_checkpoint = _fleet.load_checkpoint
load_latest = _fleet.load_latest
stop_requested = _fleet.stop_requested
train_from_dataset = _fleet.train_from_dataset
infer_from_dataset = _fleet.infer_from_dataset
save = _fleet.save
load = _fleet.load
save_persistables = _fleet.save_persistables
save_inference_model = _fleet.save_inference_model
shrink = _fleet.shrink
util = _fleet.util
metrics = _fleet.metrics
init_server = _fleet.init_server
run_server = _fleet.run_server
init_worker = _fleet.init_worker
stop_worker = _fleet.stop_worker

_INSTEAD = {
    "main_program": "make a static.Program and give it to static.Executor().run",
    "startup_program": "torch modules hold their first values when they are made: leave the run out",
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise NotSupportedError(f"NotSupported: fleet.{name}; {_INSTEAD[name]}")
    raise AttributeError(f"module 'trainers.fleet' has no attribute {name!r}")
