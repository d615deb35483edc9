"""Which wishes for roles go with the mode of a job, and what its script is. Pure; reads no file."""

from __future__ import annotations

from collections.abc import Sequence

from fleetrun.envs.argv import CommandLine
from fleetrun.envs.members import Mode, Role
from fleetrun.envs.wishes import NOTHING, JobFile, RoleWish, table_of
from fleetrun.errors import UsageError
from fleetrun.frozen import replace

_MODES = {
    Role.SERVER: (Mode.PS, Mode.PS_HETER),
    Role.COORDINATOR: (Mode.PS, Mode.PS_HETER),
    Role.HETER: (Mode.PS_HETER,),
}
Wishes = tuple[RoleWish, ...]


def fitting(
    roles: Sequence[RoleWish], mode: Mode, overruled: bool, typed_script: bool
) -> tuple[Wishes, list[str]]:
    """The wishes for roles that there are in this mode, and a remark on each other one. A script that was
    typed takes the place of the trainers' own.

    Raises UsageError for a role that a mode does not have which nothing but the file chose: `overruled` tells
    whether something else did.
    """
    kept: list[RoleWish] = []
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
