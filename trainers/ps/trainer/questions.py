"""Questions: rows of sparse tables that are asked for, and put together from the servers' answers. Knows
which server has a key; leaves the moment of asking to others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trainers.errors import ServerError, UsageError
from trainers.ps.kernels.owners import split
from trainers.ps.net.client import Client, Request, Ticket
from trainers.ps.net.wire import MAX_FRAME_BYTES, Field, Kind, Message, Part


class Question:
    """(n,) int64 different keys of one table. `insert`: keys without a row get one."""

    def __init__(self, table: int, dim: int, keys: torch.Tensor, servers: int, *, insert: bool) -> None:
        if 4 * len(keys) * dim > MAX_FRAME_BYTES:
            raise UsageError(
                f"one batch asks for {len(keys)} rows of {dim} values, more than the "
                f"{MAX_FRAME_BYTES >> 20} MB that a message may have; use smaller batches"
            )
        self.table = table
        self.keys = keys
        self.insert = insert
        self._dim = dim
        self._field = Field.KEYS if insert else Field.PEEK
        self._shares = split(keys, servers) if servers > 1 else [None]
        self._rows: torch.Tensor | None = None

    def part(self, server: int) -> Part | None:
        """What to ask of this server; None: nothing."""
        share = self._shares[server]
        keys = self.keys if share is None else self.keys[share]
        return Part(self.table, self._field, keys) if len(keys) else None

    def answer(self, server: int, part: Part) -> None:
        """Take this server's rows."""
        share, rows = self._shares[server], part.data.float()
        wanted = [len(self.keys) if share is None else len(share), self._dim]
        if part.field is not Field.ROWS or part.table != self.table or list(rows.shape) != wanted:
            raise ServerError(
                f"server {server} answered a pull of {wanted} values of table {self.table} with "
                f"{part.field.name} {list(rows.shape)} of table {part.table}"
            )
        if share is None:
            self._rows = rows
            return
        if self._rows is None:
            self._rows = torch.empty(len(self.keys), self._dim)
        self._rows[share] = rows

    @property
    def rows(self) -> torch.Tensor:
        """(n, dim) float32 in the order of the keys; once every server has answered."""
        return torch.empty(0, self._dim) if self._rows is None else self._rows


class Pull:
    """Questions about several tables, one message for each server, underway from construction on."""

    def __init__(self, client: Client, servers: int, questions: Sequence[Question], step: int) -> None:
        self._client = client
        self._asked: list[tuple[int, list[Question]]] = []
        requests = []
        for server in range(servers):
            parts = [(each, part) for each in questions if (part := each.part(server)) is not None]
            if parts:
                self._asked.append((server, [each for each, _ in parts]))
                only = tuple(part for _, part in parts)
                requests.append(Request(server=server, kind=Kind.PULL, number=step, parts=only))
        self._ticket: Ticket | None = client.send(requests)

    def wait(self) -> None:
        """Until all rows are here."""
        if self._ticket is None:
            return
        replies = self._client.wait(self._ticket)
        self._ticket = None
        for (server, questions), reply in zip(self._asked, replies, strict=True):
            for question, part in zip(questions, reply.parts, strict=True):
                question.answer(server, part)


def answer_from(server: int, reply: Message, questions: Iterable[Question]) -> None:
    """Take rows that came with the answer to a push."""
    by_table = {question.table: question for question in questions}
    for part in reply.parts:
        if part.field is Field.ROWS and part.table in by_table:
            by_table[part.table].answer(server, part)
