"""Which choices fit together, whatever the machines, and which of a job file's roles fit the mode. Knows the
options by name, and no value's syntax. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.settings.command_line import Choice, Choices, CommandLine, Source
from fleetrun.envs.settings.options import NOTHING, JobFile, RoleSettings, table_of
from fleetrun.envs.settings.parsing import PROCESSES_PER_NODE
from fleetrun.errors import UsageError
from fleetrun.values import replace

# ---- Which choices fit together, whatever the machines. Knows the options by name, and no value's syntax.

_EXCLUSIVE = (
    ("standalone", "master"),
    ("master_addr", "master"),
    ("master_port", "master"),
    ("start_port", "port_range"),
    ("gloo_port", "http_port"),
    ("module", "no_python"),
)
_LISTS = (("servers", "server_num"), ("trainers", "trainer_num"), ("coordinators", "coordinator_num"))


def settle(choices: Choices, mode: Mode, reason: Choice | None) -> list[str]:
    """Drop the variables that what was typed overrules, and say so.

    Raises UsageError when two typed options, or two variables, exclude each other.
    """
    notices = []
    stated = choices.get("run_mode")
    if stated is not None and stated.value is not mode:
        notices.append(_dropped(choices, stated, f"{_overruling(choices, stated) or reason} was given"))
    for choice in list(choices.values()):
        if mode in choice.option.modes or choice.value == choice.option.default:
            continue
        if choice.typed or (choice.filed and not overruled(choices, choice.option.modes, reason)):
            raise UsageError(f"{choice} is for {_modes(choice)}, and {_why(mode, reason)}")
        notices.append(_dropped(choices, choice, f"the mode is {mode}"))
    for names in _EXCLUSIVE:
        notices += _exclude(choices, *names)
    return notices


def overruled(choices: Choices, modes: frozenset[Mode], reason: Choice | None) -> bool:
    """Whether something that counts more than a job file is why the mode is none of these."""
    stronger = [choice for choice in choices.values() if choice.source > Source.FILE]
    return (reason is not None and not reason.filed) or any(not c.option.modes & modes for c in stronger)


def _overruling(choices: Choices, stated: Choice) -> Choice | None:
    """What was typed and does not go with the stated mode."""
    stronger = (c for c in choices.values() if c.source > stated.source)
    return next((c for c in stronger if stated.value not in c.option.modes), None)


def _exclude(choices: Choices, first: str, second: str) -> list[str]:
    one, other = choices.get(first), choices.get(second)
    if one is None or other is None or False in (one.value, other.value):
        return []
    if one.source is other.source:
        raise UsageError(f"{one} and {other} exclude each other; give one of them")
    weaker, stronger = (one, other) if one.source < other.source else (other, one)
    return [_dropped(choices, weaker, f"{stronger} was given")]


def _dropped(choices: Choices, choice: Choice, why: str) -> str:
    del choices[choice.option.name]
    return f"{choice} is not used: {why}"


def _modes(choice: Choice) -> str:
    return " and ".join(mode for mode in Mode if mode in choice.option.modes)


def _why(mode: Mode, reason: Choice | None) -> str:
    if reason is None:
        return f"without servers or --run_mode the mode is {mode}"
    return f"{reason} makes the mode {mode}" if reason.option.name != "run_mode" else f"{reason} was given"


def check(choices: Choices, mode: Mode, reason: Choice | None) -> None:
    """Raise UsageError for the first thing that does not fit."""
    if _on(choices, "json") and not _on(choices, "dry_run"):
        raise UsageError(f"{choices['json']} needs --dry_run: it is the plan that is printed as JSON")
    host = choices.get("metrics_host")
    if host is not None and (host.typed or host.filed) and "metrics_port" not in choices:
        raise UsageError(f"{host} needs --metrics_port: nothing would listen there")
    if "save" in choices and not _on(choices, "dry_run"):
        raise UsageError(f"{choices['save']} needs --dry_run: it writes the job file instead of starting it")
    if _on(choices, "legacy"):
        raise UsageError(
            f"{choices['legacy']}: there is one launcher, and it knows the old options; leave it out"
        )
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
            raise UsageError(f"{choices[one]} needs --{other} too: both are lists of endpoints")
    for listed, counted in _LISTS:
        if listed in choices and counted in choices:
            entries, number = len(choices[listed].value), choices[counted]
            if entries != number.value:
                raise UsageError(f"{choices[listed]} has {entries} endpoints, and {number} was given")


def _check_endpoints(choices: Choices) -> None:
    owners: dict[str, Choice] = {}
    for name in ("servers", "trainers", "coordinators", "heter_workers"):
        for endpoint in _endpoints(choices, name):
            if ":" in endpoint and endpoint in owners:
                raise UsageError(
                    f"{endpoint} is in both {owners[endpoint].origin} and {choices[name].origin}"
                )
            owners[endpoint] = choices[name]


def _endpoints(choices: Choices, name: str) -> tuple[str, ...]:
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
        raise UsageError(
            f"{names}: {total} processes on one machine; fleetrun starts at most {PROCESSES_PER_NODE}"
        )


def _check_devices(choices: Choices) -> None:
    processes, devices = choices.get("nproc_per_node"), choices.get("devices")
    if processes is None or devices is None:
        return
    given = len(devices.value)
    if processes.value == "cpu":
        raise UsageError(f"{processes} starts a process per core, and {devices} was given; give one of them")
    if not isinstance(processes.value, int):
        return
    if processes.value > given:
        raise UsageError(f"{processes} asks for more processes than {devices} has devices ({given})")
    if given % processes.value:
        raise UsageError(f"{devices}: {given} devices cannot be divided evenly among {processes}")


def _check_stages(choices: Choices, reason: Choice | None) -> None:
    counts, lists, kinds = (
        choices.get(name) for name in ("heter_worker_num", "heter_workers", "heter_devices")
    )
    workers = counts or lists
    if workers is None:
        raise UsageError(f"{reason} needs --heter_worker_num or --heter_workers: who the heter workers are")
    if counts and lists and tuple(map(len, lists.value)) != counts.value:
        raise UsageError(f"{counts} does not count what {lists} lists")
    if kinds and len(kinds.value) != len(workers.value):
        raise UsageError(f"{kinds} names {len(kinds.value)} of the {len(workers.value)} stages of {workers}")


# ---- Which wishes for roles go with the mode of a job, and what its script is. Pure; reads no file.

_MODES = {
    Role.SERVER: (Mode.PS, Mode.PS_HETER),
    Role.COORDINATOR: (Mode.PS, Mode.PS_HETER),
    Role.HETER: (Mode.PS_HETER,),
}
Wishes = tuple[RoleSettings, ...]


def fitting_roles(
    roles: Sequence[RoleSettings], mode: Mode, overruled: bool, typed_script: bool
) -> tuple[Wishes, list[str]]:
    """The wishes for roles that there are in this mode, and a remark on each other one. A script that was
    typed takes the place of the trainers' own.

    Raises UsageError for a role that a mode does not have which nothing but the file chose: `overruled` tells
    whether something else did.
    """
    kept: list[RoleSettings] = []
    remarks: list[str] = []
    for wish in roles:
        modes = _MODES.get(wish.role, tuple(Mode))
        if mode in modes:
            typed = typed_script and wish.role is Role.TRAINER
            kept.append(
                replace(wish, script=None, args=None, module=False, no_python=False) if typed else wish
            )
            continue
        what = f"{wish.where}: [{wish.table}]"
        if not overruled:
            raise UsageError(
                f"{what} is for {' and '.join(modes)}, and the mode is {mode}",
                hint="Say how many there are: count = 1.",
            )
        remarks.append(f"{what} is not used: the mode is {mode}")
    return tuple(kept), remarks


def script_of(line: CommandLine, file: JobFile, roles: Wishes, mode: Mode) -> tuple[str, tuple[str, ...]]:
    """The job's script and its arguments: what was typed, else what the file says, else the trainers' own.

    Raises UsageError when there is none, or a role is left without one.
    """
    if line.script is not None:
        return line.script, line.script_args
    if file.script is not None:
        return file.script, file.args
    own = {wish.role: wish for wish in roles if wish.script is not None}
    if Role.TRAINER not in own:
        hint = "usage: fleetrun [OPTIONS] SCRIPT [ARGUMENTS]"
        if file != NOTHING:
            hint = f'Write script = "train.py" into the job file, or {hint.partition(" ")[2]}'
        raise UsageError("no script was given", hint=hint)
    needed = {wish.role for wish in roles} | ({Role.SERVER} if mode.has_servers else set())
    for role in sorted(needed - own.keys()):
        raise UsageError(
            f"{own[Role.TRAINER].where}: only some roles have a script, and [{table_of(role)}] has none",
            hint='Write script = "..." there, or at the top of the file for all roles.',
        )
    trainer = own[Role.TRAINER]
    assert trainer.script is not None
    return trainer.script, trainer.args or ()
