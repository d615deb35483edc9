"""The fleet API: module-level functions on one Fleet object. Knows how a job begins; the calls are in
`trainers.calls`, the work is done in `collective` and `ps`.
"""

from __future__ import annotations

import os

from trainers.calls.continuing import Continuing
from trainers.calls.place import Place
from trainers.calls.saving import Saving
from trainers.calls.servers import Servers
from trainers.calls.training import Training
from trainers.collective.runtime import CollectiveRuntime
from trainers.errors import UsageError
from trainers.lastwords import install
from trainers.roles.environment import EnvironmentRoleMaker
from trainers.roles.identity import Identity, RoleMaker
from trainers.runtime import Runtime
from trainers.strategy import DistributedStrategy

__all__ = [
    "DistributedStrategy",
    "barrier_worker",
    "distributed_model",
    "distributed_optimizer",
    "infer_from_dataset",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load_checkpoint",
    "prefetch",
    "resume_step",
    "run_server",
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
    "worker_endpoints",
    "worker_index",
    "worker_num",
]


class Fleet(Place, Training, Servers, Saving, Continuing):
    """One process's view of its job. Every method but `init` raises UsageError before `init`."""

    def init(
        self,
        is_collective: bool = False,
        role_maker: RoleMaker | None = None,
        strategy: DistributedStrategy | None = None,
    ) -> None:
        """Find out who this process is and, for a collective job, join the process group.

        Raises UsageError when the job was not started for this kind of training.
        """
        install()
        if self._runtime is not None:
            raise UsageError("fleet.init() was called before; call it once, at the start of the script")
        identity = (role_maker or EnvironmentRoleMaker(os.environ)).identity()
        _check_kind(is_collective, identity)
        self._runtime = _runtime(is_collective, identity, strategy or DistributedStrategy())
        self._identity = identity


def _check_kind(is_collective: bool, identity: Identity) -> None:
    if is_collective and identity.launched_as_ps:
        raise UsageError(
            "fleet.init(is_collective=True), but this job was started with parameter servers; "
            "start it without --server_num and --trainer_num, or call fleet.init(is_collective=False)"
        )
    if not is_collective and not identity.servers:
        raise UsageError(
            f"fleet.init(is_collective=False) wants parameter servers, and {identity.source} has none; "
            "start with `fleetrun --server_num=1 --trainer_num=2`, or call fleet.init(is_collective=True)"
        )


def _runtime(is_collective: bool, identity: Identity, strategy: DistributedStrategy) -> Runtime:
    if is_collective:
        return CollectiveRuntime(identity, strategy)
    # Late: its kernels take a third of a second to load, which a collective job need not wait for.
    from trainers.ps.runtime import ServerRuntime, TrainerRuntime

    return ServerRuntime(identity, strategy) if identity.is_server else TrainerRuntime(identity, strategy)


_fleet = Fleet()
init = _fleet.init
distributed_model = _fleet.distributed_model
distributed_optimizer = _fleet.distributed_optimizer
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
load_checkpoint = _fleet.load_checkpoint
stop_requested = _fleet.stop_requested
train_from_dataset = _fleet.train_from_dataset
infer_from_dataset = _fleet.infer_from_dataset
save_persistables = _fleet.save_persistables
save_inference_model = _fleet.save_inference_model
shrink = _fleet.shrink
init_server = _fleet.init_server
run_server = _fleet.run_server
init_worker = _fleet.init_worker
stop_worker = _fleet.stop_worker
