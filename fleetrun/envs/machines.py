"""What asks for more than one machine: understood, and refused by this version in one line."""

from __future__ import annotations

from collections.abc import Mapping

from fleetrun.envs.choices import Choice, Choices
from fleetrun.errors import NotSupportedError, UsageError

_PADDLE_CLOUD = ("PADDLE_TRAINERS", "POD_IP", "PADDLE_TRAINER_ID", "TRAINER_PORTS_NUM")
_ONE = "this version of fleetrun runs on one"


def on_paddle_cloud(environ: Mapping[str, str]) -> bool:
    """Paddle's rule: all four variables of its cloud are set."""
    return all(environ.get(name) for name in _PADDLE_CLOUD)


def refuse_many(choices: Choices, environ: Mapping[str, str]) -> list[str]:
    """Raise NotSupportedError for a job on several machines; return remarks on what one does not need."""
    _check_agreement(choices)
    nodes, ips = choices.get("nnodes"), choices.get("ips")
    if nodes and nodes.value != (1, 1):
        raise _refused(nodes)
    if ips and len(ips.value) > 1:
        raise _refused(ips)
    for name, alone in (("rank", (-1, 0)), ("elastic_level", (-1,))):
        if name in choices and choices[name].value not in alone:
            raise _refused(choices[name])
    if on_paddle_cloud(environ) and "," in environ["PADDLE_TRAINERS"].strip(","):
        raise NotSupportedError(
            f"PADDLE_TRAINERS={environ['PADDLE_TRAINERS']} asks for several machines; {_ONE}"
        )
    return _refuse_meeting(choices)


def _refuse_meeting(choices: Choices) -> list[str]:
    """A meeting point is for several machines, unless it is said that there is one."""
    master = choices.get("master")
    if master is None:
        return []
    if "nnodes" not in choices or master.value.startswith("etcd://"):
        raise NotSupportedError(f"{master} is where several machines meet; {_ONE}", hint="Leave it out.")
    return [f"{master} is not used: one machine needs no meeting point"]


def _check_agreement(choices: Choices) -> None:
    nodes, ips, rank = choices.get("nnodes"), choices.get("ips"), choices.get("rank")
    if nodes and ips and nodes.value != (len(ips.value),) * 2:
        raise UsageError(f"{nodes} and {ips} do not agree: {len(ips.value)} machines are listed")
    if nodes and rank and rank.value >= nodes.value[1]:
        raise UsageError(f"{rank} is not a rank of {nodes}: ranks go from 0 to {nodes.value[1] - 1}")


def _refused(choice: Choice) -> NotSupportedError:
    return NotSupportedError(f"{choice} asks for several machines; {_ONE}")
