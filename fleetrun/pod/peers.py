"""What a supervisor tells the other machines of its job: the seam between one pod and all of them."""

from __future__ import annotations

from typing import Protocol

from fleetrun.pod.container import Ended
from fleetrun.pod.restarts import GiveUp, Restart
from fleetrun.pod.result import Hang


class Peers(Protocol):
    """The other machines. Calls come from the loop and must return at once. What they answer comes back as
    `Supervisor.finish` and `Supervisor.stop_for`.
    """

    def pod_failed(self, ended: Ended, decision: Restart | GiveUp) -> None:
        """This pod stops because of this failure; `decision` is what the policy here says to it."""
        ...

    def pod_failed_too(self, ended: Ended) -> None:
        """Another failure, seen while the pod stops; it may be the older one."""
        ...

    def pod_hung(self, hang: Hang) -> None:
        """This pod stops because its trainers give no sign of life."""
        ...

    def pod_completed(self) -> None:
        """All trainers of this machine ended well."""
        ...
