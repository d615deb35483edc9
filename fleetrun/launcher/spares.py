"""Send the modules that standbys of spares import (--warm), from the running node to the waiting nodes,
through the store.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleetrun.elastic.agent import Agent
from fleetrun.elastic.membership import Membership
from fleetrun.elastic.rendezvous.actions import Waiting
from fleetrun.elastic.rendezvous.records import IMPORTS_KEY
from fleetrun.elastic.store import Entry
from fleetrun.launcher.parts import Event, Part
from fleetrun.launcher.session import LaunchSession


class Spares(Part):
    """A part of a job with --warm and --spares."""

    def __init__(self, agent: Agent, session: LaunchSession) -> None:
        self._agent = agent
        self._session = session
        self.trusted = False
        """True if only nodes of this job write to the store."""
        self._waits = False
        self.membership: Membership | None = None
        """The membership of this node, or None before the node has one."""

    def listed(self, imports: bytes) -> None:
        """Write the imports of the last node's last trainer to the store. The first trainer often imports
        more.
        """
        place, membership = self._agent.place, self.membership
        if place is None or membership is None or membership.closed or not imports:
            return
        if place.rank == len(place.members) - 1:
            membership.store.put(IMPORTS_KEY, imports, leased=True)

    def handle(self, event: Event) -> None:
        """Watch the imports when this node becomes a spare."""
        spare = isinstance(event, Waiting) and event.spare
        if spare and self.membership is not None and not self._waits:
            self._waits = True
            self.membership.store.watch(IMPORTS_KEY)

    def look(self, others: Mapping[str, Entry]) -> None:
        assert self.membership is not None
        if self._waits and (IMPORTS_KEY in others or self.membership.members):
            self._waits = False
            self.membership.store.unwatch(IMPORTS_KEY)
            if not self.membership.members and self._session.warm is not None:
                self._session.warm.prepare(self._session.spec, others[IMPORTS_KEY].value, self.trusted)
