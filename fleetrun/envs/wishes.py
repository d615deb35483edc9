"""What a job file says besides options: environments, and what is different for one role. Values; reads no
file.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleetrun.envs.members import Role
from fleetrun.envs.options import Option
from fleetrun.frozen import dataclass, field

Variables = tuple[tuple[str, str], ...]
"""Names and values, in the order of the file."""


def table_of(role: Role) -> str:
    return "roles.server" if role is Role.SERVER else f"roles.{role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWish:
    """What is different for the processes of one role. `script` None: the job's, and then `args` None: those
    of the job too. `threads` is OMP_NUM_THREADS.

    Only of evaluators: `count` of them, on every machine (`each`) or on the first one; `devices` that each
    machine has for them.
    """

    role: Role
    where: str = ""
    script: str | None = None
    args: tuple[str, ...] | None = None
    module: bool = False
    no_python: bool = False
    environment: Variables = ()
    threads: int | None = None
    count: int = 0
    each: bool = False
    devices: tuple[str, ...] = ()

    @property
    def table(self) -> str:
        """Its place in a job file: `roles.server`."""
        return table_of(self.role)


@dataclass(frozen=True, slots=True)
class Filed:
    """One option of a job file: `alias` is its name there, `where` its file and line. An option that repeats
    has several texts.
    """

    option: Option
    alias: str
    texts: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """All that job files say, with their variables filled in. `places` says where, of what is no option."""

    options: tuple[Filed, ...] = ()
    script: str | None = None
    args: tuple[str, ...] = ()
    environment: Variables = ()
    roles: tuple[RoleWish, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def typable(self) -> bool:
        """Whether a command line can say all of it."""
        return not self.environment and all(
            wish == RoleWish(role=wish.role, where=wish.where) for wish in self.roles
        )


NOTHING = JobFile()
