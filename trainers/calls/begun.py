"""What all calls of the fleet API stand on: this process's identity and runtime, once there are any."""

from __future__ import annotations

from trainers.errors import UsageError
from trainers.roles.identity import Identity
from trainers.runtime import Runtime


class Begun:
    """Nothing until `fleet.init`; every call but that raises UsageError before it."""

    def __init__(self) -> None:
        self._identity: Identity | None = None
        self._runtime: Runtime | None = None

    def found(self) -> Identity | None:
        """Who this process is; None before `fleet.init`."""
        return self._identity

    def _who(self, call: str) -> Identity:
        if self._identity is None:
            raise UsageError(f"fleet.{call}() was called before fleet.init()")
        return self._identity

    def _ready(self, call: str) -> Runtime:
        if self._runtime is None:
            raise UsageError(f"fleet.{call}() was called before fleet.init()")
        return self._runtime
