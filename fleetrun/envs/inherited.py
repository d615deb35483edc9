"""What of an environment is the contract's, and so never handed down from the launcher's own. Knows names,
no values.
"""

from __future__ import annotations

from collections.abc import Mapping

# Whatever the contract may set, and what earlier launchers leave behind. A child's environment is the
# launcher's without these, plus `write`: so a launcher that runs inside a trainer, or after one in the same
# shell, starts clean.
OWNED_PREFIXES = ("TORCHELASTIC_", "FLAGS_selected_", "FLEETRUN_")
# The job's secret is the user's: a nested launch has the same.
GIVEN = frozenset({"FLEETRUN_TOKEN"})
# fmt: off
OWNED = frozenset(
    {
        "POD_NAME", "POD_IP", "PADDLE_JOB_ID", "PADDLE_LOG_DIR", "PADDLE_RESTART_COUNT",
        "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT",
        "PADDLE_MASTER", "PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK", "PADDLE_GLOBAL_SIZE",
        "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE", "PADDLE_RANK_IN_NODE", "PADDLE_NNODES",
        "PADDLE_DISTRI_BACKEND", "PADDLE_MASTER_ENDPOINT", "PADDLE_WORKER_ENDPOINT",
        "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_HETER_TRAINER_IP_PORT_LIST",
        "PADDLE_COORDINATOR_ENDPOINTS", "PADDLE_COORDINATOR_NUM", "PADDLE_PORT", "TRAINING_ROLE",
        "PADDLE_ROLE", "PADDLE_WITH_GLOO", "PADDLE_GLOO_RENDEZVOUS", "PADDLE_GLOO_FS_PATH",
        "PADDLE_GLOO_HTTP_ENDPOINT", "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST",
        "PADDLE_STAGE_TRAINERS_NUM", "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST",
        "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST", "STAGE_ID", "STAGE_NUM", "HETER_DEVICE_TYPE",
        "PADDLE_BACKUP_ENV_PATH", "PADDLE_WORLD_DEVICE_IDS", "PADDLE_LOCAL_DEVICE_IDS",
        "DISTRIBUTED_TRAINER_ENDPOINTS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        "GROUP_RANK", "GROUP_WORLD_SIZE", "NNODES", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT",
    }
)
# fmt: on


def without_contract(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment with no variable of the contract in it."""
    return {
        name: value
        for name, value in environ.items()
        if name in GIVEN or (name not in OWNED and not name.startswith(OWNED_PREFIXES))
    }
