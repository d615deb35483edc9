"""Which machines a job is for: what was chosen, what an engine says, and whether they fit. Resolves no
name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fleetrun.envs.addresses import join_endpoint
from fleetrun.envs.choices import Choice, Choices, Placed, Source, parsed
from fleetrun.envs.settings import OPTIONS
from fleetrun.errors import UsageError

STORE_PORT = 6768
"""Where machines of a list meet on the first of them; the port of Paddle's documents."""

TORCHRUN_PORT = 29500

_PADDLE_CLOUD = ("PADDLE_TRAINERS", "POD_IP", "PADDLE_TRAINER_ID", "TRAINER_PORTS_NUM")
_WHERE = ("nnodes", "ips", "master", "rank", "master_addr", "standalone", "scheduler")
"""Who chooses one of these says where the job runs: then an engine is not asked."""


def on_paddle_cloud(environ: Mapping[str, str]) -> bool:
    """Paddle's rule: all four variables of its cloud are set."""
    return all(environ.get(name) for name in _PADDLE_CLOUD)


Place = Callable[[Mapping[str, str], Collection[str]], Mapping[str, Placed]]
"""What an engine says, out of an environment; not of the options that are settled without it."""


def nowhere(environ: Mapping[str, str], but: Collection[str]) -> Mapping[str, Placed]:
    """No engine started this process."""
    return {}


def placed(choices: Choices, environ: Mapping[str, str], place: Place) -> Choices:
    """What the engine that started this process says, unless the person says where the job runs.

    Raises UsageError for a value that is none.
    """
    settled = {*choices, *(_WHERE if any(name in choices for name in _WHERE) else ())}
    if on_paddle_cloud(environ):
        said: Mapping[str, Placed] = {"ips": Placed(environ["PADDLE_TRAINERS"].strip(","), "PADDLE_TRAINERS")}
    else:
        said = place(environ, settled)
    found: Choices = {}
    for name, value in said.items():
        if name not in settled:
            option = OPTIONS[name]
            parsed_value = parsed(option, value.origin, value.text)
            found[name] = Choice(option, parsed_value, value.origin, value.text, name, Source.ENGINE)
    return found


def check(choices: Choices) -> list[str]:
    """Raise UsageError for what does not fit together; return remarks on what is not needed."""
    _check_agreement(choices)
    alone = not several(choices)
    if alone:
        _check_alone(choices)
    elif "standalone" in choices and choices["standalone"].value:
        raise UsageError(f"{choices['standalone']} is for one machine, and {_reason(choices)} for several")
    if "image" in choices and ("scheduler" not in choices or choices["scheduler"].value != "kubernetes"):
        raise UsageError(f"{choices['image']} is for --scheduler kubernetes")
    if "scheduler_option" in choices and "scheduler" not in choices:
        raise UsageError(f"{choices['scheduler_option']} needs --scheduler: whose option it is")
    master = choices.get("master")
    if alone and master and not master.value.startswith("etcd://"):
        return [f"{master} is not used: one machine needs no meeting point"]
    return []


def several(choices: Choices) -> bool:
    """Whether what was chosen speaks of several machines. Endpoint lists may, too: that only shows on the
    machine.
    """
    nodes, ips, master = (choices.get(name) for name in ("nnodes", "ips", "master"))
    return bool(
        (nodes and nodes.value != (1, 1))
        or (ips and len(ips.value) > 1)
        or (master and master.value.startswith("etcd://"))
    )


def _reason(choices: Choices) -> Choice:
    return next(choices[name] for name in ("nnodes", "ips", "master") if name in choices)


def _check_alone(choices: Choices) -> None:
    rank, level, master = (choices.get(name) for name in ("rank", "elastic_level", "master"))
    listed = "servers" in choices
    if rank and rank.value > 0:
        raise UsageError(f"{rank} needs --nnodes: of how many machines")
    if level and level.value >= 0 and not listed:
        raise UsageError(f"{level} needs --nnodes: one machine has no other in its place")
    if master and not listed and "nnodes" not in choices:
        raise UsageError(f"{master} needs --nnodes: how many machines meet there")
    for name in ("server_num", "trainer_num"):
        if name in choices and choices[name].value == 0 and not listed:
            raise UsageError(f"{choices[name]}: one machine needs at least one of them")


def _check_agreement(choices: Choices) -> None:
    nodes, ips, rank = choices.get("nnodes"), choices.get("ips"), choices.get("rank")
    if nodes and ips and nodes.value != (len(ips.value),) * 2:
        raise UsageError(f"{nodes} and {ips} do not agree: {len(ips.value)} machines are listed")
    if nodes and rank and rank.value >= nodes.value[1]:
        raise UsageError(f"{rank} is not a rank of {nodes}: ranks go from 0 to {nodes.value[1] - 1}")
    if nodes and nodes.value[1] > 1 and rank and rank.value > 0 and not _meeting(choices):
        raise UsageError(f"{rank} needs --master: where the first machine is")


def _meeting(choices: Choices) -> bool:
    return "master" in choices or "master_addr" in choices or "servers" in choices


def implied(choices: Choices) -> dict[str, Any]:
    """What follows from other choices: ranges are elastic, and torchrun's address is a meeting point."""
    values: dict[str, Any] = {}
    nodes = choices.get("nnodes")
    if "ips" in choices:
        values["nnodes"] = (len(choices["ips"].value),) * 2
    if nodes and nodes.value[0] < nodes.value[1] and "elastic_level" not in choices:
        values["elastic_level"] = 1
    address, port = choices.get("master_addr"), choices.get("master_port")
    if address and several(choices) and "ips" not in choices:
        values["master"] = join_endpoint(address.value, port.value if port else TORCHRUN_PORT)
        values |= {"master_addr": None, "master_port": None}
    return values
