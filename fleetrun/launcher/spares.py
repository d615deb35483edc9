"""What standbys of spares import (--warm): from the node that runs to those that wait, through the store."""

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
    """Of a job with --warm and --spares."""

    def __init__(self, agent: Agent, session: LaunchSession) -> None:
        self._agent = agent
        self._session = session
        self.trusted = False
        """Only nodes of this job write into the store."""
        self._waits = False
        self.membership: Membership | None = None
        """Of this node; None until there is one."""

    def listed(self, imports: bytes) -> None:
        """By the last node: what its last trainer has imported. The first one often imports more."""
        place, membership = self._agent.place, self.membership
        if place is None or membership is None or membership.closed or not imports:
            return
        if place.rank == len(place.members) - 1:
            membership.store.put(IMPORTS_KEY, imports, leased=True)

    def handle(self, event: Event) -> None:
        """This node may be a spare from now on."""
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
