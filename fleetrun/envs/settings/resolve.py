"""Resolve the settings from a command line, an environment and a job file.

The module decides which source has priority, which mode the job has, which options go together, and which
nodes they apply to. It does not read files or resolve host names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from fleetrun.aliases import Document, Environ, Strings, Texts
from fleetrun.envs import contract, variables
from fleetrun.envs.channels import inside_container
from fleetrun.envs.contract import Mode, NodeLoss, Role, join_endpoint
from fleetrun.envs.settings.command_line import (
    Choice,
    Choices,
    CommandLine,
    EngineValue,
    Source,
    parsed,
)
from fleetrun.envs.settings.options import (
    BY_VARIABLE,
    DEVICE_KINDS,
    NOTHING,
    OF_JOBS,
    OPTIONS,
    PET,
    PREFIXES,
    SERVERS,
    TORCHRUN,
    EnvironmentItems,
    FileOption,
    JobFile,
    LaunchSettings,
    Resolved,
    RoleSettings,
    normal,
    table_of,
)
from fleetrun.envs.settings.parsing import PROCESSES_PER_NODE, with_ports
from fleetrun.errors import UsageError
from fleetrun.values import replace

TORCHRUN_PORT = 29500
_APART = 1000
"""Distance from --master_port, the trainers' port, to the port where nodes meet. Other jobs rarely use it."""
FIRST_TRAINER_PORT = 6170
"""Paddle gives trainers without ports the numbers from here, plus the number of servers."""

EngineValues = Callable[[Texts, Collection[str]], Mapping[str, EngineValue]]
"""Returns the values that a scheduler gives to options, from an environment, except for the options named
second.
"""


def no_engine(environ: Environ, but: Collection[str]) -> Mapping[str, EngineValue]:
    """Return an empty mapping, for a process without a scheduler."""
    return {}


def resolve(
    line: CommandLine,
    environ: Environ,
    engine_values: EngineValues = no_engine,
    file: JobFile = NOTHING,
) -> Resolved:
    """Return the settings of a job.

    The priority, from high to low, is command line, environment variable, job file, scheduler
    (`engine_values`), default. Raises UsageError for an invalid value or combination.
    """
    readable, notices = _without_leftovers(environ)
    notices += _misplaced(line)
    choices = _one_each(line.options)
    choices |= _from_environment(readable, but=choices.keys())
    choices |= _from_file(file.options, but={*choices, *(_SCRIPT_OPTIONS if line.script else ())})
    if any(name in TORCHRUN or choice.origin.startswith(PET) for name, choice in choices.items()):
        from fleetrun.envs.settings.torchrun import translated  # late, because few runs need it

        choices, remarks = translated(choices)
        notices += remarks
    choices |= _engine_choices(choices, readable, engine_values)
    mode, reason = _mode(choices)
    notices += _drop_overruled(choices, mode, reason)
    _check_options(choices, mode, reason)
    notices += _check_machines(choices)
    overruled = _overruled(choices, SERVERS, reason)
    roles, remarks = _roles_for_mode(file.roles, mode, overruled, line.script is not None)
    script, args = _script_of(line, file, roles, mode)
    environment = _environment(choices, file.environment)
    return Resolved(
        settings=LaunchSettings(
            script=script,
            script_args=args,
            script_in_job_file=line.script is None and not file.typable,
            environment=environment,
            roles=roles,
            **_values(choices, mode),
            run_mode=mode,
        ),
        origins={name: choice.origin for name, choice in choices.items()}
        | ({"run_mode": reason.origin} if reason else {})
        | ({"environment": choices["env"].origin} if environment != file.environment else {})
        | _places(file, line),
        notices=(*notices, *remarks),
        words={
            name: choice.word
            for name, choice in choices.items()
            if not choice.option.secret
            and (name != "config" or not file.typable)
            and (name != "env" or choice.value)
        },
        engine=frozenset(name for name, choice in choices.items() if choice.source is Source.ENGINE),
    )


_OF_LAUNCHERS = (
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "server_num",
    "trainer_num",
    "worker_num",
    "max_restart",
)
"""Options that hardly any script has."""


def _misplaced(line: CommandLine) -> list[str]:
    """Return a notice on the first option of a launcher that follows the script."""
    words = (word.partition("=")[0] for word in line.script_args if word.startswith("--"))
    found = next((word for word in words if normal(word) in _OF_LAUNCHERS), None)
    if found is None:
        return []
    return [f"{found} comes after {line.script}, which receives it; put options of fleetrun first"]


# ---- Values by source: command line, environment, job file, and the scheduler of this process


def _one_each(given: Iterable[Choice]) -> Choices:
    """Return one choice per option. For one spelling the last counts. Different spellings must agree."""
    choices: Choices = {}
    for choice in given:
        name = choice.option.name
        choices[name] = _combined(choices[name], choice) if name in choices else choice
    return {name: choice for name, choice in choices.items() if choice.text or choice.value != ()}


def _combined(earlier: Choice, later: Choice) -> Choice:
    if later.option.repeats:
        text = later.option.joint.join((earlier.text, later.text))
        return replace(later, value=earlier.value + later.value, text=text)
    kinds = [DEVICE_KINDS[choice.alias] for choice in (earlier, later) if choice.alias in DEVICE_KINDS]
    if earlier.alias != later.alias and (earlier.value != later.value or len(set(kinds)) > 1):
        raise UsageError(
            f"{earlier} and {later} set the same option to different values; pass only one of them"
        )
    return earlier if kinds and later.alias not in DEVICE_KINDS else later


def _from_environment(environ: Environ, but: Collection[str]) -> Choices:
    """Return the first set and non-empty variable of each option, except for the options in `but`."""
    choices: Choices = {}
    for option in OF_JOBS:
        found = [name for name in option.env if environ.get(name, "").strip()]
        if found and option.name not in but:
            variable, text = found[0], environ[found[0]].strip()
            value = parsed(option, variable, text, PREFIXES.get(variable, ""))
            choices[option.name] = Choice(option, value, variable, text, option.name, Source.VARIABLE)
    return choices


def _places(file: JobFile, line: CommandLine) -> dict[str, str]:
    """Return where the job file sets script, arguments and tables, unless the command line sets them."""
    typed = ("script", "args") if line.script is not None else ()
    return {name: where for name, where in file.places.items() if name not in typed}


_SCRIPT_OPTIONS = ("module", "no_python")


def _from_file(options: Iterable[FileOption], but: Collection[str]) -> Choices:
    """Return the options of a job file, except options that a stronger source has set."""
    choices = []
    for given in options:
        for text in given.texts:
            value = parsed(given.option, f"{given.where}: {given.alias}", text, PREFIXES.get(given.alias, ""))
            choices.append(Choice(given.option, value, given.where, text, given.alias, Source.FILE))
    return {name: choice for name, choice in _one_each(choices).items() if name not in but}


_LEFTOVERS = ("PADDLE_TRAINER_ENDPOINTS", "DISTRIBUTED_TRAINER_ENDPOINTS", "PADDLE_TRAINER_ID")


def _without_leftovers(environ: Environ) -> tuple[Texts, list[str]]:
    """Return the environment to read, and notices about ignored variables."""
    outer = inside_container(environ)
    if outer or environ.get("PADDLE_CURRENT_ENDPOINT"):
        own = contract.without_contract(environ)
        readable = {name: text for name, text in own.items() if not name.startswith(PET)}
        known = {variable for option in OF_JOBS for variable in option.env}
        ignored = sorted(known & (environ.keys() - readable.keys()))
        where = f"{outer} of another job" if outer else "a process of another launcher"
        notice = f"started inside {where}; these variables are ignored: {', '.join(ignored)}"
        return readable, [notice] if ignored else []
    if on_paddle_cloud(environ):
        return environ, []
    left = [name for name in _LEFTOVERS if environ.get(name)]
    left += (
        ["WORLD_SIZE"] if environ.get("WORLD_SIZE", "1") not in ("", "1") else []
    )  # from a scheduler's script
    return environ, [f"{name} is set, perhaps by another launcher; fleetrun ignores it" for name in left]


_PADDLE_CLOUD = ("PADDLE_TRAINERS", "POD_IP", "PADDLE_TRAINER_ID", "TRAINER_PORTS_NUM")
_PLACEMENT = ("nnodes", "ips", "master", "rank", "master_addr", "standalone", "scheduler")
"""Options that define where the job runs. If one is set, the scheduler's values for all of them are ignored.
"""


def on_paddle_cloud(environ: Environ) -> bool:
    """Return True if all four variables of Paddle's cloud are set, which is Paddle's rule."""
    return all(environ.get(name) for name in _PADDLE_CLOUD)


def _engine_choices(choices: Choices, environ: Environ, engine_values: EngineValues) -> Choices:
    """Return the values of the scheduler that started this process, unless the user sets where the job runs.

    Raises UsageError for an invalid value.
    """
    settled = {*choices, *(_PLACEMENT if any(name in choices for name in _PLACEMENT) else ())}
    if on_paddle_cloud(environ):
        values: Mapping[str, EngineValue] = {
            "ips": EngineValue(environ["PADDLE_TRAINERS"].strip(","), "PADDLE_TRAINERS")
        }
    else:
        values = engine_values(environ, settled)
    found: Choices = {}
    for name, value in values.items():
        if name not in settled:
            option = OPTIONS[name]
            parsed_value = parsed(option, value.origin, value.text)
            found[name] = Choice(option, parsed_value, value.origin, value.text, name, Source.ENGINE)
    if "nnodes" in found and "spares" in choices:
        # Subtract the spares, because a scheduler counts all nodes that it started.
        nodes, spares = found["nnodes"], choices["spares"]
        fewest, most = (number - spares.value for number in nodes.value)
        if fewest < 1:
            raise UsageError(
                f"{spares}: all {nodes.text} nodes ({nodes.origin}) belong to the job, so none can be a spare"
            )
        found["nnodes"] = replace(
            nodes, value=(fewest, most), text=":".join(map(str, dict.fromkeys((fewest, most))))
        )
    return found


def _environment(choices: Choices, of_file: EnvironmentItems) -> EnvironmentItems:
    """Return the job file's variables together with those from --env NAME=VALUE.

    Only names and patterns remain in the --env choice. Raises UsageError.
    """
    given = choices.get("env")
    if given is None:
        return of_file
    typed = variables.assignments(given.value, BY_VARIABLE)
    names = tuple(dict.fromkeys(word for word in given.value if "=" not in word))
    choices["env"] = replace(given, value=names, text=",".join(names))
    return tuple((dict(of_file) | typed).items())


# ---- The mode

_ModeChoice = tuple[Mode, Choice]
"""A mode, and the choice that requests it."""


def _mode(choices: Choices) -> _ModeChoice | tuple[Mode, None]:
    """Return the mode, and the choice that decided it (None for the default).

    The command line has priority. A variable counts if it fits the command line, and a job file if it fits
    both.
    """
    typed = [choice for choice in choices.values() if choice.typed]
    from_file = [choice for choice in choices.values() if choice.from_file]
    variables = [choice for choice in choices.values() if not choice.typed and not choice.from_file]
    fitting = [*_fitting(variables, typed), *_fitting(from_file, [*typed, *variables])]
    stated = [each for each in fitting if each[1].option.name == "run_mode"]
    modes = [*_modes_asked_for(typed, "run_mode"), *stated, *_modes_asked_for(typed), *fitting]
    return modes[0] if modes else (Mode.COLLECTIVE, None)


def _fitting(choices: list[Choice], stronger: list[Choice]) -> list[_ModeChoice]:
    """Return the modes that fit all stronger choices."""
    asked = _modes_asked_for(choices)
    return [each for each in asked if all(each[0] in other.option.modes for other in stronger)]


def _modes_asked_for(choices: list[Choice], only: str | None = None) -> list[_ModeChoice]:
    """Return the modes that these choices request, strongest first: --run_mode, then ps-heter, then ps."""
    asked = [
        (choice.value if choice.option.name == "run_mode" else choice.option.makes, choice)
        for choice in choices
        if only in (None, choice.option.name)
    ]
    found = [(mode, choice) for mode, choice in asked if mode is not None]
    return sorted(found, key=lambda each: (each[1].option.name != "run_mode", each[0] is not Mode.PS_HETER))


# ---- Valid combinations of options, for any number of nodes

_EXCLUSIVE = (
    ("standalone", "master"),
    ("master_addr", "master"),
    ("master_port", "master"),
    ("start_port", "port_range"),
    ("gloo_port", "http_port"),
    ("module", "no_python"),
    ("watch", "timeout"),
)
_LISTS = (("servers", "server_num"), ("trainers", "trainer_num"), ("coordinators", "coordinator_num"))


def _drop_overruled(choices: Choices, mode: Mode, reason: Choice | None) -> list[str]:
    """Drop choices that a stronger source overrules, and return a notice for each.

    Raises UsageError if two options of the same source exclude each other.
    """
    notices = []
    stated = choices.get("run_mode")
    if stated is not None and stated.value is not mode:
        notices.append(_dropped(choices, stated, f"{_overruling(choices, stated) or reason} was given"))
    for choice in list(choices.values()):
        if mode in choice.option.modes or choice.value == choice.option.default:
            continue
        if choice.typed or (choice.from_file and not _overruled(choices, choice.option.modes, reason)):
            raise UsageError(f"{choice} is only for mode {_modes(choice)}, but {_why(mode, reason)}")
        notices.append(_dropped(choices, choice, f"the mode is {mode}"))
    for names in _EXCLUSIVE:
        notices += _exclude(choices, *names)
    return notices


def _overruled(choices: Choices, modes: frozenset[Mode], reason: Choice | None) -> bool:
    """Return True if a source stronger than a job file set a mode outside `modes`."""
    stronger = [choice for choice in choices.values() if choice.source > Source.FILE]
    return (reason is not None and not reason.from_file) or any(not c.option.modes & modes for c in stronger)


def _overruling(choices: Choices, stated: Choice) -> Choice | None:
    """Return the stronger choice that does not fit the stated mode."""
    stronger = (c for c in choices.values() if c.source > stated.source)
    return next((c for c in stronger if stated.value not in c.option.modes), None)


def _exclude(choices: Choices, first: str, second: str) -> list[str]:
    one, other = choices.get(first), choices.get(second)
    if one is None or other is None or False in (one.value, other.value):
        return []
    if one.source is other.source:
        raise UsageError(f"{one} and {other} exclude each other; pass only one of them")
    weaker, stronger = (one, other) if one.source < other.source else (other, one)
    return [_dropped(choices, weaker, f"{stronger} was given")]


def _dropped(choices: Choices, choice: Choice, why: str) -> str:
    del choices[choice.option.name]
    return f"{choice} is ignored: {why}"


def _modes(choice: Choice) -> str:
    return " or ".join(mode for mode in Mode if mode in choice.option.modes)


def _why(mode: Mode, reason: Choice | None) -> str:
    if reason is None:
        return f"the mode is {mode} without servers or --run_mode"
    return f"{reason} makes the mode {mode}" if reason.option.name != "run_mode" else f"{reason} was given"


def _check_options(choices: Choices, mode: Mode, reason: Choice | None) -> None:
    """Raise UsageError for the first invalid combination."""
    display = choices.get("display")
    if _on(choices, "json") and not _on(choices, "dry_run") and display and display.value != "json":
        raise UsageError(f"{choices['json']} and {display} exclude each other")
    host = choices.get("metrics_host")
    if host is not None and (host.typed or host.from_file) and "metrics_port" not in choices:
        raise UsageError(f"{host} needs --metrics_port, the port of the metrics")
    moments = choices.get("notify_on")
    if moments is not None and moments.typed and not {"notify", "scheduler"} & choices.keys():
        raise UsageError(
            f"{moments} needs --notify or FLEETRUN_NOTIFY, which name a receiver of notifications"
        )
    probe = choices.get("probe")
    for name in ("warm", "watch", "debug"):
        on = name in choices and choices[name].value in (True, "on", "error")
        if on and probe is not None and probe.value == "off":
            raise UsageError(f"{choices[name]} needs the probe, but {probe} was given")
    if _on(choices, "legacy"):
        raise UsageError(f"{choices['legacy']}: fleetrun has only one launcher; remove this option")
    if mode.has_servers:
        _check_lists(choices)
        _check_endpoints(choices)
        _check_total(choices)
    else:
        _check_devices(choices)
    if mode is Mode.PS_HETER:
        _check_stages(choices, reason)


def _on(choices: Choices, name: str) -> bool:
    return name in choices and choices[name].value is True


def _check_lists(choices: Choices) -> None:
    for one, other in (("servers", "trainers"), ("trainers", "servers")):
        if one in choices and other not in choices:
            raise UsageError(f"{choices[one]} also needs --{other}, because both are lists of endpoints")
    for listed, counted in _LISTS:
        if listed in choices and counted in choices:
            entries, number = len(choices[listed].value), choices[counted]
            if entries != number.value:
                raise UsageError(f"{choices[listed]} has {entries} endpoints, but {number} was given")


def _check_endpoints(choices: Choices) -> None:
    owners: dict[str, Choice] = {}
    for name in ("servers", "trainers", "coordinators", "heter_workers"):
        for endpoint in _endpoints(choices, name):
            if ":" in endpoint and endpoint in owners:
                raise UsageError(
                    f"{endpoint} is in both {owners[endpoint].origin} and {choices[name].origin}"
                )
            owners[endpoint] = choices[name]


def _endpoints(choices: Choices, name: str) -> Strings:
    value = choices[name].value if name in choices else ()
    return tuple(endpoint for stage in value for endpoint in stage) if name == "heter_workers" else value


def _check_total(choices: Choices) -> None:
    counted = [choices[name] for _, name in _LISTS if name in choices]
    total = sum(choice.value for choice in counted)
    if "heter_worker_num" in choices:
        counted.append(choices["heter_worker_num"])
        total += sum(choices["heter_worker_num"].value)
    if total > PROCESSES_PER_NODE:
        names = ", ".join(map(str, counted))
        raise UsageError(f"{names}: {total} processes on one node; the limit is {PROCESSES_PER_NODE}")


def _check_devices(choices: Choices) -> None:
    processes, devices = choices.get("nproc_per_node"), choices.get("devices")
    if processes is None or devices is None:
        return
    given = len(devices.value)
    if processes.value == "cpu":
        raise UsageError(
            f"{processes} starts a process per core, but {devices} was given; pass only one of them"
        )
    if not isinstance(processes.value, int):
        return
    if processes.value > given:
        raise UsageError(
            f"{processes} needs more devices than {devices} lists: {given}. Start fewer "
            "processes, or list more devices"
        )
    if given % processes.value:
        raise UsageError(f"{devices}: {given} devices cannot be divided evenly among {processes}")


def _check_stages(choices: Choices, reason: Choice | None) -> None:
    counts, lists, kinds = (
        choices.get(name) for name in ("heter_worker_num", "heter_workers", "heter_devices")
    )
    workers = counts or lists
    if workers is None:
        raise UsageError(f"{reason} needs --heter_worker_num or --heter_workers")
    if counts and lists and tuple(map(len, lists.value)) != counts.value:
        raise UsageError(f"{counts} and {lists} do not agree on the number of heter workers")
    if kinds and len(kinds.value) != len(workers.value):
        raise UsageError(
            f"{kinds} has {len(kinds.value)} entries, but {workers} has {len(workers.value)} stages"
        )


# ---- The nodes of a job


def _check_machines(choices: Choices) -> list[str]:
    """Raise UsageError for an invalid combination, and return notices on unneeded options."""
    _check_agreement(choices)
    alone = not _several_machines(choices)
    if alone:
        _check_alone(choices)
    if _on(choices, "standalone") and not alone:
        raise UsageError(f"{choices['standalone']} is for one node, but {_reason(choices)} is for several")
    scheduler = choices.get("scheduler")
    follows = ("local", "ssh", "" if "sync" in choices else "srun")
    if _on(choices, "watch") and scheduler and scheduler.value not in follows:
        raise UsageError(
            f"{choices['watch']} needs a terminal and the files that you edit, but {scheduler} starts a job "
            "without them",
            hint="Use --scheduler ssh, or in an allocation of Slurm --scheduler srun without --sync.",
        )
    if "image" in choices and ("scheduler" not in choices or choices["scheduler"].value != "kubernetes"):
        raise UsageError(f"{choices['image']} needs --scheduler kubernetes")
    if "sync" in choices and ("scheduler" not in choices or choices["scheduler"].value == "local"):
        raise UsageError(
            f"{choices['sync']} needs --scheduler ssh, slurm, srun or kubernetes",
            hint="Without a scheduler, each node runs its own files.",
        )
    if "scheduler_option" in choices and "scheduler" not in choices:
        raise UsageError(f"{choices['scheduler_option']} needs --scheduler")
    master = choices.get("master")
    if alone and master and not master.value.startswith("etcd://"):
        return [f"{master} is ignored, because a job on one node needs no rendezvous"]
    return []


def _several_machines(choices: Choices) -> bool:
    """Return True if the options request several nodes.

    Endpoint lists may also request several, but only the node itself can detect this.
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
    rank, loss, master = (choices.get(name) for name in ("rank", "on_node_loss", "master"))
    listed = "servers" in choices
    if rank and rank.value > 0:
        raise UsageError(f"{rank} needs --nnodes, the number of nodes")
    spares = choices.get("spares")
    if spares and spares.value > 0 and not listed:
        raise UsageError(f"{spares} needs --nnodes 2 or more, because a spare replaces another node")
    if loss and loss.value is not NodeLoss.FAIL and not listed:
        raise UsageError(f"{loss} needs --nnodes 2 or more, because a single node has no replacement")
    if master and not listed and "nnodes" not in choices:
        raise UsageError(f"{master} needs --nnodes, the number of nodes that join there")
    for name in ("server_num", "trainer_num"):
        if name in choices and choices[name].value == 0 and not listed:
            raise UsageError(f"{choices[name]}: a job on one node needs at least 1")


def _check_agreement(choices: Choices) -> None:
    nodes, ips, rank = choices.get("nnodes"), choices.get("ips"), choices.get("rank")
    if nodes and ips and nodes.value != (len(ips.value),) * 2:
        raise UsageError(f"{nodes} and {ips} do not agree: the list has {len(ips.value)} nodes")
    spares = choices.get("spares")
    more = spares.value if spares else 0
    if more and ips:
        raise UsageError(f"{spares} and {ips} exclude each other, because a list names no spares")
    if nodes and rank and rank.value >= nodes.value[1] + more:
        raise UsageError(
            f"{rank} is out of range for {nodes}: ranks go from 0 to {nodes.value[1] + more - 1}"
        )
    meets = {"master", "master_addr", "servers"} & choices.keys()
    if nodes and nodes.value[1] > 1 and rank and rank.value > 0 and not meets:
        raise UsageError(f"{rank} needs --master, the address of the first node")


# ---- Roles of a job file, and the script

_MODES_OF_ROLE = {
    Role.SERVER: (Mode.PS, Mode.PS_HETER),
    Role.COORDINATOR: (Mode.PS, Mode.PS_HETER),
    Role.HETER: (Mode.PS_HETER,),
}


def _roles_for_mode(
    roles: Sequence[RoleSettings], mode: Mode, overruled: bool, typed_script: bool
) -> tuple[tuple[RoleSettings, ...], list[str]]:
    """Return the roles that exist in this mode, and a notice on each other role.

    A script on the command line replaces the trainers' script. Raises UsageError for a role that the mode
    does not have, unless a source stronger than the file set the mode (`overruled`).
    """
    kept: list[RoleSettings] = []
    remarks: list[str] = []
    for role_settings in roles:
        modes = _MODES_OF_ROLE.get(role_settings.role, tuple(Mode))
        if mode in modes:
            typed = typed_script and role_settings.role is Role.TRAINER
            kept.append(
                replace(role_settings, script=None, args=None, module=False, no_python=False)
                if typed
                else role_settings
            )
            continue
        what = f"{role_settings.where}: [{role_settings.table}]"
        if not overruled:
            raise UsageError(
                f"{what} is only for mode {' or '.join(modes)}, but the mode is {mode}",
                hint="Set their number, for example: count = 1",
            )
        remarks.append(f"{what} is ignored: the mode is {mode}")
    return tuple(kept), remarks


def _script_of(
    line: CommandLine, file: JobFile, roles: Sequence[RoleSettings], mode: Mode
) -> tuple[str, Strings]:
    """Return the job's script and arguments, from the command line, else from the file, else from the
    trainers' role.

    Raises UsageError if the job or a role lacks a script.
    """
    if line.script is not None:
        return line.script, line.script_args
    if file.script is not None:
        return file.script, file.args
    own = {role_settings.role: role_settings for role_settings in roles if role_settings.script is not None}
    if Role.TRAINER not in own:
        hint = "usage: fleetrun [run] [OPTIONS] SCRIPT [ARGUMENTS]"
        if file != NOTHING:
            hint = f'Write script = "train.py" into the job file, or {hint.partition(" ")[2]}'
        raise UsageError("the script is missing", hint=hint)
    needed = {role_settings.role for role_settings in roles} | ({Role.SERVER} if mode.has_servers else set())
    for role in sorted(needed - own.keys()):
        raise UsageError(
            f"{own[Role.TRAINER].where}: some roles have a script, but [{table_of(role)}] has none",
            hint='Write script = "..." there, or at the top of the file for all roles.',
        )
    trainer = own[Role.TRAINER]
    assert trainer.script is not None
    return trainer.script, trainer.args or ()


# ---- Values that follow from others


def _values(choices: Choices, mode: Mode) -> Document:
    """Return the value of each field, including values that follow from others."""
    values = {name: choice.value for name, choice in choices.items() if name != "run_mode"}
    if "devices" in choices:
        values["device_kind"] = DEVICE_KINDS.get(choices["devices"].alias, "gpu")
    elif values.get("nproc_per_node") == "xpu":
        values["device_kind"] = "xpu"
    values |= _implied_values(choices)
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


def _implied_values(choices: Choices) -> Document:
    """Return values that follow from other choices. A range of nodes is elastic, and nodes meet at
    MASTER_ADDR.
    """
    values: Document = {}
    nodes = choices.get("nnodes")
    if "ips" in choices:
        values["nnodes"] = (len(choices["ips"].value),) * 2
    if nodes and nodes.value[0] < nodes.value[1] and "on_node_loss" not in choices:
        values["on_node_loss"] = NodeLoss.SHRINK
    if _on(choices, "watch") and "max_restart" not in choices:
        values["max_restart"] = 0
    if _on(choices, "json") and not _on(choices, "dry_run"):
        values["display"] = "json"
    address, port = choices.get("master_addr"), choices.get("master_port")
    if address and _several_machines(choices) and "ips" not in choices:
        number = port.value if port else TORCHRUN_PORT  # the port of the trainers' own store
        meeting = number - _APART if number > 1023 + _APART else number + _APART
        values["master"] = join_endpoint(address.value, meeting)
        values |= {"master_addr": None, "master_port": number}
    return values
