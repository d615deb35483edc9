"""The role maker of whoever starts the processes by hand: the script says who it is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from trainers.errors import UsageError
from trainers.roles.endpoints import apart, endpoints, position
from trainers.roles.identity import Identity, Role
from trainers.roles.variables import Variables

_WHO = "UserDefinedRoleMaker"


class UserDefinedRoleMaker:
    """Process `current_id` of its role. Servers and workers are counted on their own, from 0 each.

    All processes of a job give the same lists: `server_endpoints` are `host:port` of every server, which
    binds its own; `worker_endpoints`, those of the workers, are needed for collective training of several
    (the first is where they meet), and with servers only for what workers do among themselves, as
    `global_shuffle`. `worker_num` may be left out when they are given.

    Raises UsageError at once for what cannot be: an id out of range, an endpoint that is malformed or there
    twice, a server in a collective job, and so on.
    """

    def __init__(
        self,
        current_id: int = 0,
        role: Role = Role.WORKER,
        worker_num: int = 0,
        server_endpoints: Sequence[str] | None = None,
        worker_endpoints: Sequence[str] | None = None,
        is_collective: bool = False,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.is_collective = is_collective
        self._role = _role(role)
        self._servers = endpoints(f"{_WHO} server_endpoints", server_endpoints)
        self._workers = endpoints(f"{_WHO} worker_endpoints", worker_endpoints)
        apart(self._servers, self._workers, ("server_endpoints", "worker_endpoints"))
        self._check_kind()
        self._worker_num = self._count(worker_num)
        self._index = self._place(current_id)
        self._environ = os.environ if environ is None else environ

    def identity(self) -> Identity:
        """Who was said. The variables PADDLE_DISTRI_BACKEND, FLAGS_selected_gpus and PADDLE_RESTART_COUNT
        say the rest.
        """
        told = Variables(self._environ, "it is needed")
        here = self._servers if self._role is Role.SERVER else self._workers
        return Identity(
            index=self._index,
            worker_num=self._worker_num,
            trainers=self._workers,
            servers=self._servers,
            is_server=self._role is Role.SERVER,
            launched_as_ps=not self.is_collective,
            local_rank=position(here[self._index], here) if here else self._index,
            master=self._workers[0] if self._workers and self._worker_num > 1 else "",
            device=told.first("FLAGS_selected_gpus"),
            backend=self._environ.get("PADDLE_DISTRI_BACKEND"),
            restart_count=told.number("PADDLE_RESTART_COUNT", 0),
            source=_WHO,
        )

    def _check_kind(self) -> None:
        if not isinstance(self.is_collective, bool):
            raise UsageError(f"{_WHO} is_collective is {self.is_collective!r}; it must be True or False")
        if self.is_collective and (self._servers or self._role is Role.SERVER):
            raise UsageError(
                f"{_WHO} is_collective is True, and there are server_endpoints or the role is SERVER; "
                "collective jobs have workers only"
            )
        if not self.is_collective and not self._servers:
            raise UsageError(
                f"{_WHO} has no server_endpoints; give those of all servers, or is_collective=True"
            )

    def _count(self, worker_num: int) -> int:
        if isinstance(worker_num, bool) or not isinstance(worker_num, int) or worker_num < 0:
            raise UsageError(f"{_WHO} worker_num is {worker_num!r}; it must be a whole number")
        known = len(self._workers)
        if worker_num and known and worker_num != known:
            raise UsageError(f"{_WHO} worker_num is {worker_num}, but there are {known} worker_endpoints")
        count = worker_num or known
        if not count:
            raise UsageError(f"{_WHO} has neither worker_num nor worker_endpoints; give one of them")
        if self.is_collective and count > 1 and not known:
            raise UsageError(
                f"{_WHO} has {count} collective workers and no worker_endpoints; give them, the workers meet "
                "at the first"
            )
        return count

    def _place(self, current_id: int) -> int:
        if isinstance(current_id, bool) or not isinstance(current_id, int):
            raise UsageError(f"{_WHO} current_id is {current_id!r}; it must be a whole number")
        count = len(self._servers) if self._role is Role.SERVER else self._worker_num
        if not 0 <= current_id < count:
            raise UsageError(
                f"{_WHO} current_id is {current_id}; {self._role.name}s of this job are 0 to {count - 1}"
            )
        return current_id


def _role(role: object) -> Role:
    if isinstance(role, bool) or role not in tuple(Role):
        raise UsageError(f"{_WHO} role is {role!r}; it must be Role.WORKER or Role.SERVER")
    return Role(role)  # type: ignore[arg-type]  # one of its values
