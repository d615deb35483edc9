"""From a command line, an environment and a job file to settings: which source wins, which mode the job has,
and which machines it is for. Pure: reads no file and resolves no name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from fleetrun.envs import contract
from fleetrun.envs.channels import inside_container
from fleetrun.envs.contract import Mode
from fleetrun.envs.settings import checks
from fleetrun.envs.settings.command_line import (
    Choice,
    Choices,
    CommandLine,
    EngineValue,
    Given,
    Source,
    parsed,
)
from fleetrun.envs.settings.options import (
    DEVICE_KINDS,
    NOTHING,
    OPTIONS,
    PREFIXES,
    SERVERS,
    FileOption,
    JobFile,
    LaunchSettings,
    Resolved,
)
from fleetrun.envs.settings.parsing import join_endpoint, with_ports
from fleetrun.errors import UsageError
from fleetrun.values import replace

# ---- Which machines a job is for: what was chosen, what an engine says, and whether they fit. Resolves no
# name.

STORE_PORT = 6768
"""Where machines of a list meet on the first of them; the port of Paddle's documents."""

TORCHRUN_PORT = 29500

_PADDLE_CLOUD = ("PADDLE_TRAINERS", "POD_IP", "PADDLE_TRAINER_ID", "TRAINER_PORTS_NUM")
_WHERE = ("nnodes", "ips", "master", "rank", "master_addr", "standalone", "scheduler")
"""Who chooses one of these says where the job runs: then an engine is not asked."""


def on_paddle_cloud(environ: Mapping[str, str]) -> bool:
    """Paddle's rule: all four variables of its cloud are set."""
    return all(environ.get(name) for name in _PADDLE_CLOUD)


Place = Callable[[Mapping[str, str], Collection[str]], Mapping[str, EngineValue]]
"""What an engine says, out of an environment; not of the options that are settled without it."""


def nowhere(environ: Mapping[str, str], but: Collection[str]) -> Mapping[str, EngineValue]:
    """No engine started this process."""
    return {}


def engine_choices(choices: Choices, environ: Mapping[str, str], place: Place) -> Choices:
    """What the engine that started this process says, unless the person says where the job runs.

    Raises UsageError for a value that is none.
    """
    settled = {*choices, *(_WHERE if any(name in choices for name in _WHERE) else ())}
    if on_paddle_cloud(environ):
        said: Mapping[str, EngineValue] = {
            "ips": EngineValue(environ["PADDLE_TRAINERS"].strip(","), "PADDLE_TRAINERS")
        }
    else:
        said = place(environ, settled)
    found: Choices = {}
    for name, value in said.items():
        if name not in settled:
            option = OPTIONS[name]
            parsed_value = parsed(option, value.origin, value.text)
            found[name] = Choice(option, parsed_value, value.origin, value.text, name, Source.ENGINE)
    return found


def check_machines(choices: Choices) -> list[str]:
    """Raise UsageError for what does not fit together; return remarks on what is not needed."""
    _check_agreement(choices)
    alone = not several_machines(choices)
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


def several_machines(choices: Choices) -> bool:
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


def implied_values(choices: Choices) -> dict[str, Any]:
    """What follows from other choices: ranges are elastic, and torchrun's address is a meeting point."""
    values: dict[str, Any] = {}
    nodes = choices.get("nnodes")
    if "ips" in choices:
        values["nnodes"] = (len(choices["ips"].value),) * 2
    if nodes and nodes.value[0] < nodes.value[1] and "elastic_level" not in choices:
        values["elastic_level"] = 1
    address, port = choices.get("master_addr"), choices.get("master_port")
    if address and several_machines(choices) and "ips" not in choices:
        values["master"] = join_endpoint(address.value, port.value if port else TORCHRUN_PORT)
        values |= {"master_addr": None, "master_port": None}
    return values


# ---- From a command line and an environment to settings: who wins, and which mode it is. Pure.

FIRST_TRAINER_PORT = 6170
"""Paddle numbers trainers that were listed without ports from here, plus the number of servers."""

_LEFTOVERS = ("PADDLE_TRAINER_ENDPOINTS", "DISTRIBUTED_TRAINER_ENDPOINTS", "PADDLE_TRAINER_ID")


def resolve(
    line: CommandLine, environ: Mapping[str, str], place: Place = nowhere, file: JobFile = NOTHING
) -> Resolved:
    """Settings of a job. A typed option wins over a variable, a variable over the job file, that over what
    the engine says that started this process (`place`), and that over the default.

    Raises UsageError for a value or a combination that cannot be meant.
    """
    readable, notices = _without_leftovers(environ)
    choices = _from_command_line(line.given)
    choices |= _from_environment(readable, but=choices.keys())
    choices |= _from_file(file.options, but={*choices, *(_OF_A_SCRIPT if line.script else ())})
    choices |= engine_choices(choices, readable, place)
    mode, reason = _mode(choices)
    notices += checks.settle(choices, mode, reason)
    checks.check(choices, mode, reason)
    notices += check_machines(choices)
    overruled = checks.overruled(choices, SERVERS, reason)
    roles, remarks = checks.fitting_roles(file.roles, mode, overruled, line.script is not None)
    script, args = checks.script_of(line, file, roles, mode)
    return Resolved(
        settings=LaunchSettings(
            script=script,
            script_args=args,
            script_in_job_file=line.script is None and not file.typable,
            environment=file.environment,
            roles=roles,
            **_values(choices, mode),
            run_mode=mode,
        ),
        origins={name: choice.origin for name, choice in choices.items()}
        | ({"run_mode": reason.origin} if reason else {})
        | _places(file, line),
        notices=(*notices, *remarks),
        words={name: c.word for name, c in choices.items() if name != "config" or not file.typable},
        engine=frozenset(name for name, choice in choices.items() if choice.source is Source.ENGINE),
    )


def _from_command_line(given: Iterable[Given]) -> Choices:
    """One choice per option: of the same spelling the last counts, of different spellings all must agree."""
    choices: Choices = {}
    for word in given:
        name = word.option.name
        value = parsed(word.option, word.spelling, word.text, PREFIXES.get(word.alias, ""))
        choice = Choice(word.option, value, word.spelling, word.text, word.alias, Source.TYPED)
        choices[name] = _combined(choices[name], choice) if name in choices else choice
    return {name: choice for name, choice in choices.items() if choice.text or choice.value != ()}


def _combined(earlier: Choice, later: Choice) -> Choice:
    if later.option.repeats:
        return replace(later, value=earlier.value + later.value, text=f"{earlier.text}+{later.text}")
    kinds = [DEVICE_KINDS[choice.alias] for choice in (earlier, later) if choice.alias in DEVICE_KINDS]
    if earlier.alias != later.alias and (earlier.value != later.value or len(set(kinds)) > 1):
        raise UsageError(f"{earlier} and {later} are one option with two values; give one of them")
    return earlier if kinds and later.alias not in DEVICE_KINDS else later


def _from_environment(environ: Mapping[str, str], but: Collection[str]) -> Choices:
    """The first variable of each option that is set and not empty, except for the options in `but`."""
    choices: Choices = {}
    for option in OPTIONS.values():
        found = [name for name in option.env if environ.get(name, "").strip()]
        if found and option.name not in but:
            variable, text = found[0], environ[found[0]].strip()
            value = parsed(option, variable, text, PREFIXES.get(variable, ""))
            choices[option.name] = Choice(option, value, variable, text, option.name, Source.VARIABLE)
    return choices


def _places(file: JobFile, line: CommandLine) -> dict[str, str]:
    """Where the job file says what is no option, as far as nothing was typed instead."""
    typed = ("script", "args") if line.script is not None else ()
    return {name: where for name, where in file.places.items() if name not in typed}


_OF_A_SCRIPT = ("module", "no_python")


def _from_file(options: Iterable[FileOption], but: Collection[str]) -> Choices:
    """What a job file says of the options that were not chosen already."""
    choices: Choices = {}
    for filed in options:
        for text in filed.texts:
            name, origin = filed.option.name, f"{filed.where}: {filed.alias}"
            value = parsed(filed.option, origin, text, PREFIXES.get(filed.alias, ""))
            choice = Choice(filed.option, value, filed.where, text, filed.alias, Source.FILE)
            choices[name] = _combined(choices[name], choice) if name in choices else choice
    return {name: c for name, c in choices.items() if name not in but and (c.text or c.value != ())}


def _without_leftovers(environ: Mapping[str, str]) -> tuple[Mapping[str, str], list[str]]:
    """The environment that may be read, and what is said about the rest."""
    outer = inside_container(environ)
    if outer or environ.get("PADDLE_CURRENT_ENDPOINT"):
        readable = contract.without_contract(environ)
        known = {variable for option in OPTIONS.values() for variable in option.env}
        ignored = sorted(known & (environ.keys() - readable.keys()))
        where = f"{outer} of another job" if outer else "a process of another launcher"
        notice = f"started inside {where}; not read from its environment: {', '.join(ignored)}"
        return readable, [notice] if ignored else []
    if on_paddle_cloud(environ):
        return environ, []
    left = [name for name in _LEFTOVERS if environ.get(name)]
    left += (
        ["WORLD_SIZE"] if environ.get("WORLD_SIZE", "1") not in ("", "1") else []
    )  # of a scheduler's script
    return environ, [f"{name} is set, perhaps by another launcher; it is not used" for name in left]


_Wish = tuple[Mode, Choice]


def _mode(choices: Choices) -> _Wish | tuple[Mode, None]:
    """The mode, and the choice that made it so (None: nothing did).

    What was typed goes first; a variable counts as far as it fits what was typed, a job file as far as it
    fits both.
    """
    typed = [choice for choice in choices.values() if choice.typed]
    filed = [choice for choice in choices.values() if choice.filed]
    variables = [choice for choice in choices.values() if not choice.typed and not choice.filed]
    fitting = [*_fitting(variables, typed), *_fitting(filed, [*typed, *variables])]
    stated = [wish for wish in fitting if wish[1].option.name == "run_mode"]
    wishes = [*_wishes(typed, "run_mode"), *stated, *_wishes(typed), *fitting]
    return wishes[0] if wishes else (Mode.COLLECTIVE, None)


def _fitting(choices: list[Choice], stronger: list[Choice]) -> list[_Wish]:
    """The wishes that go with what was said more strongly."""
    return [wish for wish in _wishes(choices) if all(wish[0] in other.option.modes for other in stronger)]


def _wishes(choices: list[Choice], only: str | None = None) -> list[_Wish]:
    """The modes that these choices ask for, the strongest wish first: stated, then ps-heter, then ps."""
    wishes = [
        (choice.value if choice.option.name == "run_mode" else choice.option.makes, choice)
        for choice in choices
        if only in (None, choice.option.name)
    ]
    found = [(mode, choice) for mode, choice in wishes if mode is not None]
    return sorted(found, key=lambda wish: (wish[1].option.name != "run_mode", wish[0] is not Mode.PS_HETER))


def _values(choices: Choices, mode: Mode) -> dict[str, Any]:
    """The value of each field, with what follows from others filled in."""
    values = {name: choice.value for name, choice in choices.items() if name != "run_mode"}
    if "devices" in choices:
        values["device_kind"] = DEVICE_KINDS.get(choices["devices"].alias, "gpu")
    values |= implied_values(choices)
    if not mode.has_servers:
        return values
    if "servers" in values:
        values["trainers"] = with_ports(values["trainers"], FIRST_TRAINER_PORT + len(values["servers"]))
    else:
        values = {"server_num": 1, "trainer_num": 1} | values
    if mode is Mode.PS_HETER:
        stages = values.get("heter_worker_num") or values["heter_workers"]
        values = {"heter_devices": ("gpu",) * len(stages)} | values
    return values
