"""Save the tables of all servers. The trainer that requests the save leads it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from trainers.ps.client import Client, to_all
from trainers.ps.saves.manifest import SaveMode, abandon_save, check_target, commit_save, new_id
from trainers.ps.server.saving import SaveRequest
from trainers.ps.tables.spec import ShrinkPolicy
from trainers.ps.wire import Field, Kind, Message, Part, text_part
from trainers.storage.errors import SaveError
from trainers.storage.manifest import FileRecord

AGEING = ShrinkPolicy(
    show_click_decay_rate=1.0, delete_threshold=-math.inf, delete_after_unseen_days=math.inf
)
"""One day passes and no row is removed."""


_MOST_AFTER = 16
"""The most earlier saves of a directory that are named to the servers."""


class SaveCoordinator:
    """Saves of all servers, in the order turn, check, write, commit."""

    def __init__(self, client: Client, servers: int) -> None:
        self._client = client
        self._servers = servers
        self._has_turn = False

    @contextmanager
    def turn(self, where: str, mode: SaveMode, step: int, kind: str) -> Iterator[bool]:
        """Wait while another trainer saves. Yield False if another trainer has saved the same with this
        `kind`, and no table has changed since. Inside another turn of this trainer, the turn comes
        immediately.
        """
        if self._has_turn:
            yield True
            return
        request = SaveRequest(where, new_id(step), int(mode), turn=kind)
        if self._client.ask(to_all(1, Kind.SAVE, step, text_part(request.encode())))[0].text:
            yield False
            return
        self._has_turn, saved = True, False
        try:
            yield True
            saved = True
        finally:
            self._has_turn = False
            self._client.ask(to_all(1, Kind.SAVED, int(saved), text_part(request.id)))

    def save(self, where: str, mode: SaveMode, step: int) -> None:
        """Write and commit saved tables as of `step`. Raises SaveError, or ServerError with the server that
        could not write. The former saved tables then stay current.
        """
        after = check_target(where, mode)
        save = SaveRequest(where, new_id(step), int(mode), after[-_MOST_AFTER:])
        part = text_part(save.encode())
        committed = False
        try:
            replies = self._client.ask(to_all(self._servers, Kind.SAVE, step, part))
            records = [_record(reply) for reply in replies]
            commit_save(where, save.id, mode, step, records, after=after[-1] if after else None)
            committed = True
        finally:
            self._client.forget(Kind.SAVE)
            self._client.ask(to_all(self._servers, Kind.SAVED, int(committed), text_part(save.id)))
            if not committed:
                abandon_save(where, save.id)

    def shrink(self, tables: Sequence[int], policy: ShrinkPolicy, step: int) -> int:
        """Age these tables by one day. Return the number of removed rows."""
        numbers = torch.from_numpy(policy.numbers())
        parts = [Part(table, Field.VALUES, numbers) for table in tables]
        return sum(
            reply.number for reply in self._client.ask(to_all(self._servers, Kind.SHRINK, step, *parts))
        )


def _record(reply: Message) -> FileRecord:
    if not reply.text:
        raise SaveError(
            "The save was abandoned, because a server had no connection to this trainer for longer than "
            "ps_configs trainer_timeout_s. Save again."
        )
    return FileRecord(**json.loads(reply.text))
