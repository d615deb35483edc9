"""Which role maker decides who a process is: the script's, or the one that its environment calls for."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.errors import UsageError
from trainers.roles.cloud import PaddleCloudRoleMaker
from trainers.roles.environment import Starter, starter
from trainers.roles.identity import EVALUATOR, Identity, RoleMaker
from trainers.roles.symmetric import MPISymmetricRoleMaker


def settle(
    role_maker: RoleMaker | None, is_collective: bool, environ: Mapping[str, str]
) -> tuple[bool, Identity]:
    """Whether the job is collective, and who this process is.

    Raises UsageError for what is no role maker, and when it, the wish and the way in which the job was
    started do not fit together.
    """
    if not isinstance(is_collective, bool):
        raise UsageError(f"fleet.init is_collective is {is_collective!r}; it must be True or False")
    chosen = choose(is_collective, environ) if role_maker is None else _checked(role_maker)
    collective = bool(getattr(chosen, "is_collective", is_collective))
    if is_collective and not collective:
        raise UsageError(
            f"fleet.init(is_collective=True), but its {type(chosen).__name__} is for parameter servers; "
            "make a role maker with is_collective=True, or leave one of the two out"
        )
    identity = chosen.identity()
    _check_launch(collective, identity)
    return collective, identity


def choose(is_collective: bool, environ: Mapping[str, str]) -> RoleMaker:
    """What `fleet.init` takes when it is given no role maker.

    mpirun alone names no servers: there, a job that is not collective makes them itself, as Paddle's fleet
    does.
    """
    if not is_collective and starter(environ) is Starter.MPIRUN:
        return MPISymmetricRoleMaker(environ=environ)
    return PaddleCloudRoleMaker(is_collective, environ=environ)


def _checked(role_maker: object) -> RoleMaker:
    if isinstance(role_maker, bool):
        raise UsageError(
            f"fleet.init({role_maker}): the first argument is a role maker; write "
            f"fleet.init(is_collective={role_maker})"
        )
    if isinstance(role_maker, type):
        name = role_maker.__name__
        raise UsageError(f"fleet.init was given the class {name}; give an object of it: {name}(...)")
    if not isinstance(role_maker, RoleMaker):
        raise UsageError(
            f"fleet.init was given {role_maker!r} as its role maker; give a fleet.PaddleCloudRoleMaker, "
            "UserDefinedRoleMaker or MPISymmetricRoleMaker, or any object with an identity() method"
        )
    return role_maker


def _check_launch(is_collective: bool, identity: Identity) -> None:
    if is_collective and identity.launched_as_ps:
        raise UsageError(
            "fleet.init(is_collective=True), but this job was started with parameter servers; "
            "start it without --server_num and --trainer_num, or call fleet.init(is_collective=False)"
        )
    if not is_collective and identity.source == EVALUATOR:
        raise UsageError(
            "fleet.init(is_collective=False) in an evaluator, which has no part in the training and no "
            "servers; call fleet.init(is_collective=True), which makes it a job of its own, and load what "
            "the trainers save"
        )
    if not is_collective and not identity.servers:
        also = "take fleet.MPISymmetricRoleMaker(), " if identity.source == Starter.MPIRUN.value else ""
        raise UsageError(
            f"fleet.init(is_collective=False) wants parameter servers, and {identity.source} has none; {also}"
            "start with `fleetrun --server_num=1 --trainer_num=2`, or call fleet.init(is_collective=True)"
        )
