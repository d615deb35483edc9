"""Questions: rows of sparse tables that are asked for, and put together from the servers' answers. Knows
which server has a key; leaves the moment of asking to others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainers.errors import ServerError, UsageError
from trainers.ps.net.client import Client, Request
from trainers.ps.net.wire import MAX_FRAME_BYTES, Field, Kind, Message, Part


class Question:
    """(n,) int64 different keys of one table. `cuts`: those of server s are at [cuts[s], cuts[s + 1]).
    `insert`: keys without a row get one. `as_of`: the step whose rows have been asked for; None: none yet.
    """

    def __init__(
        self, table: int, dim: int, keys: torch.Tensor, cuts: Sequence[int], *, insert: bool
    ) -> None:
        if 4 * len(keys) * dim > MAX_FRAME_BYTES:
            raise UsageError(
                f"one batch asks for {len(keys)} rows of {dim} values, more than the "
                f"{MAX_FRAME_BYTES >> 20} MB that a message may have; use smaller batches"
            )
        self.table = table
        self.keys = keys
        self.insert = insert
        self.as_of: int | None = None
        self._cuts = cuts
        self._dim = dim
        self._field = Field.KEYS if insert else Field.PEEK
        self._underway: Underway | None = None
        self._rows: torch.Tensor | None = None

    def asks(self, server: int) -> bool:
        """Whether this server has any of the keys."""
        return self._cuts[server] < self._cuts[server + 1]

    def part(self, server: int) -> Part:
        """What to ask of this server."""
        return Part(self.table, self._field, self.keys[self._cuts[server] : self._cuts[server + 1]])

    def asked(self, underway: Underway, as_of: int) -> None:
        """The parts have been sent."""
        self._underway, self.as_of = underway, as_of

    def answer(self, server: int, part: Part) -> None:
        """Take this server's rows."""
        start, stop = self._cuts[server], self._cuts[server + 1]
        wanted = [stop - start, self._dim]
        if part.field is not Field.ROWS or part.table != self.table or list(part.data.shape) != wanted:
            raise ServerError(
                f"server {server} answered a question for {wanted} values of table {self.table} with "
                f"{part.field.name} {list(part.data.shape)} of table {part.table}"
            )
        if stop - start == len(self.keys):
            self._rows = part.data.float()
            return
        if self._rows is None:
            self._rows = torch.empty(len(self.keys), self._dim)
        self._rows[start:stop] = part.data

    @property
    def rows(self) -> torch.Tensor:
        """(n, dim) float32 in the order of the keys; waits until every server that was asked has answered."""
        if self._underway is not None:
            self._underway.wait()
            self._underway = None
        return torch.empty(0, self._dim) if self._rows is None else self._rows


class Underway:
    """One message for each server, with questions or without: sent at construction. `as_of`: the step whose
    rows are asked for.
    """

    def __init__(
        self, client: Client, requests: Sequence[Request], questions: Sequence[Question], as_of: int
    ) -> None:
        self._client = client
        self._requests = requests
        self._questions = questions
        self._ticket = client.send(requests)
        self._answers: list[tuple[int, Message]] | None = None
        for question in questions:
            question.asked(self, as_of)

    @property
    def open(self) -> bool:
        """Whether an answer is missing, as far as was looked."""
        return self._ticket.open

    def wait(self) -> list[tuple[int, Message]]:
        """(server, its answer) of all; the questions have their rows then."""
        if self._answers is None:
            replies = self._client.wait(self._ticket)
            servers = [request.server for request in self._requests]
            self._answers = list(zip(servers, replies, strict=True))
            for server, reply in self._answers:
                self._hand_out(server, reply)
            self._questions = ()
        return self._answers

    def _hand_out(self, server: int, reply: Message) -> None:
        asked = [question for question in self._questions if question.asks(server)]
        rows = [part for part in reply.parts if part.field is Field.ROWS]
        if len(rows) != len(asked):
            raise ServerError(f"server {server} answered {len(asked)} questions with rows for {len(rows)}")
        for question, part in zip(asked, rows, strict=True):
            question.answer(server, part)


def add_questions(messages: Sequence[list[Part]], questions: Sequence[Question]) -> None:
    """Append what is asked of each server to its message."""
    for server, parts in enumerate(messages):
        parts += [question.part(server) for question in questions if question.asks(server)]


def ask(client: Client, servers: int, questions: Sequence[Question], as_of: int) -> Underway:
    """Questions in messages of their own, one for each server that has an answer."""
    messages: list[list[Part]] = [[] for _ in range(servers)]
    add_questions(messages, questions)
    requests = [
        Request(server=server, kind=Kind.PULL, number=as_of, parts=tuple(parts))
        for server, parts in enumerate(messages)
        if parts
    ]
    return Underway(client, requests, questions, as_of)


def pushes(messages: Sequence[Sequence[Part]], step: int) -> list[Request]:
    """The gradients of `step`, a message for each server."""
    return [
        Request(server=server, kind=Kind.PUSH, number=step, parts=tuple(parts))
        for server, parts in enumerate(messages)
    ]
