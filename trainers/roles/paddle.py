"""This process's place out of the variables of Paddle's own launchers, and of platforms that start Paddle's
jobs. Knows their names; where they contradict each other it says so.

Servers: TRAINING_ROLE, PADDLE_PSERVERS_IP_PORT_LIST, POD_IP and PADDLE_PORT. Trainers: PADDLE_TRAINER_ID,
PADDLE_TRAINERS_NUM, PADDLE_TRAINER_ENDPOINTS.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainers.errors import NotSupportedError, UsageError
from trainers.roles.endpoints import apart, endpoints, position
from trainers.roles.identity import Identity
from trainers.roles.variables import Variables

_SERVERS, _TRAINERS = "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINER_ENDPOINTS"
SOURCE = "Paddle's launcher"


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether somebody has started this process as one of Paddle's."""
    return bool(environ.get("TRAINING_ROLE") or environ.get("PADDLE_TRAINER_ID"))


def identity(environ: Mapping[str, str]) -> Identity:
    """Raises UsageError for variables that are missing, malformed or contradict each other."""
    found = Variables(environ, "TRAINING_ROLE or PADDLE_TRAINER_ID is; Paddle's launchers set all of them")
    servers = endpoints(_SERVERS, found.listed(_SERVERS))
    trainers = endpoints(_TRAINERS, found.listed(_TRAINERS))
    apart(servers, trainers, (_SERVERS, _TRAINERS))
    role = environ.get("TRAINING_ROLE") or "TRAINER"
    if role not in ("TRAINER", "PSERVER"):
        raise NotSupportedError(
            f"TRAINING_ROLE is {role!r}; this version of trainers runs TRAINER and PSERVER"
        )
    if environ.get("TRAINING_ROLE"):
        found.text(_SERVERS)  # only jobs with servers have roles
    count = _trainers_num(found, trainers)
    index = _server_index(found, servers) if role == "PSERVER" else _trainer_index(found, trainers, count)
    return Identity(
        index=index,
        worker_num=count,
        trainers=trainers,
        servers=servers,
        is_server=role == "PSERVER",
        launched_as_ps=bool(servers),
        local_rank=position(trainers[index], trainers) if trainers and role == "TRAINER" else 0,
        master=_master(found, trainers, count),
        device=found.first("FLAGS_selected_gpus"),
        backend=environ.get("PADDLE_DISTRI_BACKEND"),
        restart_count=found.number("PADDLE_RESTART_COUNT", 0),
        source=SOURCE,
    )


def _trainers_num(found: Variables, trainers: tuple[str, ...]) -> int:
    count = found.number("PADDLE_TRAINERS_NUM", len(trainers) or None)
    if trainers and count != len(trainers):
        raise UsageError(f"PADDLE_TRAINERS_NUM is {count}, but {_TRAINERS} has {len(trainers)} endpoints")
    if not count:
        raise UsageError("PADDLE_TRAINERS_NUM is 0; a job has at least one trainer")
    return count


def _trainer_index(found: Variables, trainers: tuple[str, ...], count: int) -> int:
    index = found.number("PADDLE_TRAINER_ID")
    if index >= count:
        raise UsageError(f"PADDLE_TRAINER_ID is {index} of {count} trainers; they are counted from 0")
    own = found.environ.get("PADDLE_CURRENT_ENDPOINT")
    if own and trainers and trainers[index] != own:
        raise UsageError(
            f"PADDLE_TRAINER_ID is {index}, which is {trainers[index]} in {_TRAINERS}, but "
            f"PADDLE_CURRENT_ENDPOINT is {own}"
        )
    for name, mine in (("RANK", index), ("WORLD_SIZE", count)):
        if found.environ.get(name) not in (None, "", str(mine)):
            raise UsageError(
                f"{name} is {found.environ[name]!r}, but by PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM it is "
                f"{mine}: two launchers contradict each other. Unset the variables of one, or give "
                "fleet.init a role maker"
            )
    return index


def _server_index(found: Variables, servers: tuple[str, ...]) -> int:
    own = found.environ.get("PADDLE_CURRENT_ENDPOINT") or (
        f"{found.text('POD_IP')}:{found.number('PADDLE_PORT')}"
    )
    if own not in servers:
        raise UsageError(f"this server is {own}, which is not in {_SERVERS}: {', '.join(servers)}")
    return servers.index(own)


def _master(found: Variables, trainers: tuple[str, ...], count: int) -> str:
    """Where trainers meet: PADDLE_MASTER, else the first of them; nowhere when it is not told."""
    told = endpoints("PADDLE_MASTER", found.listed("PADDLE_MASTER"))
    master = (told or trainers or ("",))[0]
    return master if count > 1 or found.environ.get("TRAINING_ROLE") else ""
