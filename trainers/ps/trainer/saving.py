"""Saving: one save by all servers, ordered by this trainer. Knows the order - check, write, commit; leaves
files to `saved`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from trainers.ps.net.client import Client, Request
from trainers.ps.net.wire import Field, Kind, Message, Part, bytes_part
from trainers.ps.saved.errors import SaveError
from trainers.ps.saved.manifest import FileRecord
from trainers.ps.saved.modes import SaveMode
from trainers.ps.saved.saves import abandon, check_target, commit, new_id
from trainers.ps.server.saving import Ordered
from trainers.ps.tables.shrink import ShrinkPolicy

AGEING = ShrinkPolicy(
    show_click_decay_rate=1.0, delete_threshold=-math.inf, delete_after_unseen_days=math.inf
)
"""A day passes and no row goes."""


class Saver:
    """`last` is the save since which the servers have noted which rows changed."""

    def __init__(self, client: Client, servers: int) -> None:
        self._client = client
        self._servers = servers
        self._last: str | None = None

    def save(self, where: str, mode: SaveMode, step: int) -> None:
        """Write and commit a save as of `step`. Raises SaveError, or ServerError naming the server that could
        not write; the former save is current then.
        """
        check_target(where, mode, self._last)
        order = Ordered(where, new_id(step), int(mode), self._last if mode is SaveMode.DELTA else None)
        part = (bytes_part(Field.TEXT, order.encode()),)
        committed = False
        try:
            replies = self._client.ask(self._all(Kind.SAVE, step, part))
            records = [_record(reply) for reply in replies]
            commit(where, order.id, mode, step, records, after=self._last)
            committed = True
        finally:
            id = (bytes_part(Field.TEXT, order.id.encode()),)
            self._client.ask(self._all(Kind.SAVED, int(committed), id))
            if not committed:
                _abandon(where, order.id)
        if mode is not SaveMode.VALUES:
            self._last = order.id

    def shrink(self, tables: Sequence[int], policy: ShrinkPolicy) -> int:
        """A day has passed in these tables; returns how many rows went. What went no delta tells, so the
        next save must be whole.
        """
        self._last = None
        numbers = torch.from_numpy(policy.numbers())
        parts = tuple(Part(table, Field.VALUES, numbers) for table in tables)
        return sum(reply.number for reply in self._client.ask(self._all(Kind.SHRINK, 0, parts)))

    def _all(self, kind: Kind, number: int, parts: tuple[Part, ...] = ()) -> list[Request]:
        return [
            Request(server=server, kind=kind, number=number, parts=parts) for server in range(self._servers)
        ]


def _record(reply: Message) -> FileRecord:
    if not reply.text:
        raise SaveError(
            "this save was given up: a server had no connection to this trainer for too long (ps_configs "
            "trainer_timeout_s); save again"
        )
    return FileRecord(**json.loads(reply.text))


def absolute(where: str | os.PathLike[str]) -> str:
    """The same place for processes with other working directories; URLs as they are."""
    name = os.fspath(where)
    return name if "://" in name else str(Path(name).absolute())


def _abandon(where: str, id: str) -> None:
    try:
        abandon(where, id)
    except SaveError:
        return  # the error that is on its way says why; what is left, the next save removes
