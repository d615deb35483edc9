"""The fleet API's questions about this process's place in the job."""

from __future__ import annotations

from trainers.calls.begun import Begun
from trainers.errors import NotSupportedError, UsageError


class Place(Begun):
    """Who am I, and who are the others."""

    def is_server(self) -> bool:
        return self._who("is_server").is_server

    def is_worker(self) -> bool:
        return not self._who("is_worker").is_server

    def is_first_worker(self) -> bool:
        identity = self._who("is_first_worker")
        return not identity.is_server and identity.index == 0

    def worker_num(self) -> int:
        return self._who("worker_num").worker_num

    def worker_index(self) -> int:
        """This trainer's rank. On a server too, as in Paddle, it is the process's index in its own role."""
        return self._who("worker_index").index

    def server_num(self) -> int:
        return len(self._who("server_num").servers)

    def server_index(self) -> int:
        identity = self._who("server_index")
        if not identity.is_server:
            raise UsageError("fleet.server_index() was called on a trainer; ask fleet.is_server() first")
        return identity.index

    def worker_endpoints(self, to_string: bool = False) -> str | list[str]:
        """`host:port` of every trainer in rank order; joined by commas with `to_string`."""
        identity = self._who("worker_endpoints")
        if not identity.trainers:
            raise NotSupportedError(f"{identity.source} has no trainer endpoints; start with fleetrun")
        return ",".join(identity.trainers) if to_string else list(identity.trainers)

    def server_endpoints(self, to_string: bool = False) -> str | list[str]:
        """`host:port` of every server in rank order; joined by commas with `to_string`."""
        identity = self._who("server_endpoints")
        return ",".join(identity.servers) if to_string else list(identity.servers)
