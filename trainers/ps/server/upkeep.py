"""Upkeep: what trainers ask of the tables as a whole - saves, and the removal of rows. Knows which of it
waits for what; leaves messages about training to `service`.
"""

from __future__ import annotations

from collections.abc import Callable

from trainers.ps.net.wire import Field, Kind, Message, bytes_part
from trainers.ps.server.members import Member, Members
from trainers.ps.server.saving import Ordered, Saving
from trainers.ps.server.store import Store


class Upkeep:
    """Every method answers one kind of request; None: later."""

    def __init__(
        self, members: Members, store: Store, saving: Saving, record: Callable[[Message], None]
    ) -> None:
        self._members = members
        self._store = store
        self._saving = saving
        self._record = record

    def save(self, member: Member, request: Message, step: int) -> Message | None:
        """Write this server's part of a save, as of now."""
        order = Ordered.decode(request.text)
        by = (request.rank, request.incarnation)
        record = self._saving.part(order, by, step, list(self._store.tables.values()))
        return None if record is None else request.reply(Kind.DONE, parts=(bytes_part(Field.TEXT, record),))

    def saved(self, member: Member, request: Message) -> Message:
        """A save was committed, or given up."""
        self._saving.end(request.text, saved=request.number == 1)
        return request.reply(Kind.DONE)

    def shrink(self, member: Member, request: Message) -> Message | None:
        """A day has passed in some tables."""
        if self._saving.reading:
            return None
        if request.sequence in member.applied:
            return request.reply(Kind.DONE)
        checked = self._store.read_shrink(request.parts)
        self._record(request)
        member.applied.add(request.sequence)
        self._saving.since = None  # a delta does not tell which rows went
        return request.reply(Kind.DONE, number=self._store.shrink(checked))

    def release(self) -> None:
        """A save whose trainer is gone will not be committed."""
        if self._saving.orderer is None:
            return
        rank, incarnation = self._saving.orderer
        lost = {member.rank for member in self._members.lost()}
        if self._members.incarnation(rank) != incarnation or rank in lost:
            self._saving.give_up()
