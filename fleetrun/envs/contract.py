"""The environment contract: what a started process finds in its environment, written and read in one place.

The launcher writes with `write`, the runtime reads with `read`; `read(write(member)) == member` for every
role. Values are those of Paddle's launchers (both generations) and of torchrun, so that scripts of either
world run unmodified. `trainers` imports this file and no other of the launcher: so it hands on what
its siblings define. Standard library only, all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleetrun.envs.inherited import OWNED, OWNED_PREFIXES, without_contract
from fleetrun.envs.members import Cluster, Gloo, Member, Mode, Role
from fleetrun.envs.names import LONG, LONGEST, MARK, NOTICE, PROGRESS, VISIBLE_VARIABLE
from fleetrun.envs.reading import read
from fleetrun.envs.secret import TOKEN, derive_key, token_flaw
from fleetrun.envs.variables import ContractError

__all__ = [
    "LONG",
    "LONGEST",
    "MARK",
    "NOTICE",
    "OWNED",
    "OWNED_PREFIXES",
    "PROGRESS",
    "TOKEN",
    "VISIBLE_VARIABLE",
    "Cluster",
    "ContractError",
    "Gloo",
    "Member",
    "Mode",
    "Role",
    "derive_key",
    "inside_container",
    "read",
    "token_flaw",
    "without_contract",
    "write",
]


def write(member: Member) -> dict[str, str]:
    """The variables of one process. Values are complete: nothing else of the contract may stay in its
    environment.

    An evaluator takes no part in the training: it is told who does, and has no rank among them.
    """
    values = _common(member)
    of_mode = {
        Mode.COLLECTIVE: _collective,
        Mode.RPC: _rpc,
        Mode.PS: _parameter_server,
        Mode.PS_HETER: _parameter_server,
    }[member.cluster.mode]
    values |= _evaluator(member) if member.role is Role.EVALUATOR else of_mode(member)
    if member.role in (Role.TRAINER, Role.HETER, Role.EVALUATOR):
        values |= _devices(member)
    if member.role is Role.TRAINER:
        values |= _torch(member)
    if member.omp_threads is not None:
        values["OMP_NUM_THREADS"] = str(member.omp_threads)
    return values


def _join(endpoints: tuple[str, ...]) -> str:
    return ",".join(endpoints)


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")


def _common(member: Member) -> dict[str, str]:
    return {
        "POD_NAME": member.pod,
        "PADDLE_JOB_ID": member.cluster.job_id,
        "PADDLE_LOG_DIR": member.log_dir,
        "PADDLE_RESTART_COUNT": str(member.restart_count),
        "PADDLE_TRAINERS_NUM": str(len(member.cluster.trainers)),
        "PADDLE_TRAINER_ENDPOINTS": _join(member.cluster.trainers),
        "PADDLE_CURRENT_ENDPOINT": member.endpoint,
        MARK: f"{member.pod}.{member.role}.{member.rank}",
        "FLEETRUN_LOCAL": f"{member.local_rank}/{member.local_size}",
        "FLEETRUN_NODE": f"{member.node_rank}/{member.cluster.nnodes}",
        "FLEETRUN_MASTER": member.cluster.master,
        "FLEETRUN_MAX_RESTART": str(member.cluster.max_restart),
        "FLEETRUN_ERROR_FILE": member.error_file,
    }


def _evaluator(member: Member) -> dict[str, str]:
    cluster = member.cluster
    return {
        "TRAINING_ROLE": member.role.training_role,
        "PADDLE_ROLE": member.role.training_role,
        "PADDLE_PSERVERS_IP_PORT_LIST": _join(cluster.servers),
        "PADDLE_NNODES": str(cluster.nnodes),
        "FLEETRUN_MODE": str(cluster.mode),
    }


def _collective(member: Member) -> dict[str, str]:
    cluster = member.cluster
    values = {
        "PADDLE_MASTER": cluster.master,
        "PADDLE_TRAINER_ID": str(member.rank),
        "PADDLE_GLOBAL_RANK": str(member.rank),
        "PADDLE_GLOBAL_SIZE": str(len(cluster.trainers)),
        "PADDLE_LOCAL_RANK": str(member.local_rank),
        "PADDLE_LOCAL_SIZE": str(member.local_size),
        "PADDLE_RANK_IN_NODE": str(member.local_rank),
        "PADDLE_NNODES": str(cluster.nnodes),
    }
    if member.backend is not None:
        values["PADDLE_DISTRI_BACKEND"] = member.backend
    return values


def _rpc(member: Member) -> dict[str, str]:
    return {
        "PADDLE_MASTER_ENDPOINT": member.cluster.master,
        "PADDLE_WORKER_ENDPOINT": member.endpoint,
        "PADDLE_TRAINER_ID": str(member.rank),
    }


def _parameter_server(member: Member) -> dict[str, str]:
    cluster = member.cluster
    values = {
        "PADDLE_PSERVERS_IP_PORT_LIST": _join(cluster.servers),
        "PADDLE_HETER_TRAINER_IP_PORT_LIST": _join(cluster.heter_flat),
        "PADDLE_COORDINATOR_ENDPOINTS": _join(cluster.coordinators),
        "PADDLE_COORDINATOR_NUM": str(len(cluster.coordinators)),
        "PADDLE_PORT": _port(member.endpoint),
        "POD_IP": _host(member.endpoint),
        "TRAINING_ROLE": member.role.training_role,
        "PADDLE_ROLE": member.role.training_role,
        "PADDLE_NNODES": str(cluster.nnodes),
    }
    if member.role is not Role.SERVER:
        values["PADDLE_TRAINER_ID"] = str(member.rank)
    if cluster.gloo is not None:
        values |= {
            "PADDLE_WITH_GLOO": str(cluster.gloo.with_gloo),
            "PADDLE_GLOO_RENDEZVOUS": str(cluster.gloo.rendezvous),
            "PADDLE_GLOO_FS_PATH": cluster.gloo.fs_path,
            "PADDLE_GLOO_HTTP_ENDPOINT": cluster.gloo.endpoint,
        }
    if cluster.mode is Mode.PS_HETER:
        values |= _stages(member)
    return values


def _stages(member: Member) -> dict[str, str]:
    cluster = member.cluster
    values = {
        "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": _join(cluster.heter_flat),
        "PADDLE_STAGE_TRAINERS_NUM": str([len(cluster.trainers), *map(len, cluster.heter)]),
        "STAGE_NUM": str(len(cluster.heter) + 1),
        "FLEETRUN_STAGE_DEVICES": ";".join(cluster.stage_devices),
    }
    if member.stage:
        values |= {
            "STAGE_ID": str(member.stage),
            "HETER_DEVICE_TYPE": cluster.stage_devices[member.stage - 1],
            "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST": _join(cluster.stage(member.stage - 1)),
            "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": _join(cluster.stage(member.stage + 1)),
        }
    return values


def _devices(member: Member) -> dict[str, str]:
    if not member.devices:
        return {}
    own = ",".join(map(str, member.devices))
    values = {f"FLAGS_selected_{member.device_kind}s": own, "FLAGS_selected_accelerators": own}
    values["PADDLE_LOCAL_DEVICE_IDS"] = own
    if member.visible is not None:
        values[VISIBLE_VARIABLE[member.device_kind]] = member.visible
    return values


def _torch(member: Member) -> dict[str, str]:
    cluster = member.cluster
    return {
        "RANK": str(member.rank),
        "WORLD_SIZE": str(len(cluster.trainers)),
        "LOCAL_RANK": str(member.local_rank),
        "LOCAL_WORLD_SIZE": str(member.local_size),
        "GROUP_RANK": str(member.node_rank),
        "GROUP_WORLD_SIZE": str(cluster.nnodes),
        "NNODES": str(cluster.nnodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(member.rank),
        "ROLE_WORLD_SIZE": str(len(cluster.trainers)),
        "MASTER_ADDR": _host(cluster.master),
        "MASTER_PORT": _port(cluster.master),
        "TORCHELASTIC_RESTART_COUNT": str(member.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(cluster.max_restart),
        "TORCHELASTIC_RUN_ID": cluster.job_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": member.error_file,
    }


def inside_container(environ: Mapping[str, str]) -> str | None:
    """`pod.role.rank` when this process was started by fleetrun, else None."""
    return environ.get(MARK) or None
