"""Exchange: when a trainer's gradients leave and new values come, step by step with the others (sync) or on
its own (async). Knows the order of messages; leaves their content to `dense` and `remote`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from trainers.ps.configs import AsyncConfigs
from trainers.ps.net.client import Client, Request, Ticket
from trainers.ps.net.wire import Kind, Message, Part
from trainers.ps.trainer.dense import DenseParameters
from trainers.ps.trainer.merging import Merging
from trainers.ps.trainer.questions import Pull, Question, answer_from
from trainers.ps.trainer.remote import RemoteTable

Batches = Mapping[RemoteTable, Sequence[torch.Tensor]]


class Exchange(Protocol):
    """`step` counts this trainer's steps."""

    @property
    def step(self) -> int: ...

    def start(self, step: int) -> None:
        """Begin at this step."""

    def push(self) -> None:
        """Send the gradients of one step, and see to the values of the next."""

    def prefetch(self, batches: Batches) -> None:
        """Prepare the rows of the next batch."""

    def refresh(self) -> None:
        """Bring the current dense values into the model, with all of this trainer's pushes in them."""

    def flush(self) -> None:
        """Wait until every push has been applied, or, in step with others, is there."""


class SyncExchange:
    """One message to each server and back for a step: gradients there, the values of the next step back, and
    the rows of the next batch where that is known.
    """

    def __init__(
        self, client: Client, dense: DenseParameters, tables: Sequence[RemoteTable], servers: int
    ) -> None:
        self._client = client
        self._dense = dense
        self._tables = tables
        self._servers = servers
        self._next: list[tuple[RemoteTable, Question]] = []
        self.step = 0

    def start(self, step: int) -> None:
        self.step = step
        for table in self._tables:
            table.as_of = step

    def push(self) -> None:
        push: list[list[Part]] = [[] for _ in range(self._servers)]
        self._dense.add_push(push, self._dense.gradients())
        for table in self._tables:
            merged = table.take_gradients()
            if merged is not None:
                table.add_push(push, merged)
        questions = [question for _, question in self._next]
        requests = []
        for server, parts in enumerate(push):
            asked = [part for question in questions if (part := question.part(server)) is not None]
            parts += [*self._dense.trained_wants[server], *asked]
            requests.append(Request(server=server, kind=Kind.PUSH, number=self.step, parts=tuple(parts)))
        self.start(self.step + 1)
        answers = list(enumerate(self._client.ask(requests)))
        self._dense.take(answers)
        for server, reply in answers:
            answer_from(server, reply, questions)
        for table, question in self._next:
            table.arrived(question)
        self._next = []

    def prefetch(self, batches: Batches) -> None:
        """In training the rows come with the answer to the next push; otherwise by themselves."""
        asked = [(table, table.expect(ids)) for table, ids in batches.items()]
        self._next = [(table, question) for table, question in asked if question.insert]
        now = [(table, question) for table, question in asked if not question.insert]
        if now:
            ask_now(self._client, self._servers, now, self.step)

    def refresh(self) -> None:
        pulls = self._dense.pulls(self.step, trained_only=True)
        self._dense.take(answers_of(pulls, self._client.ask(pulls)))

    def flush(self) -> None:
        return


class AsyncExchange:
    """Pushes go out and are waited for later; dense values are taken when they come. See AsyncConfigs."""

    def __init__(
        self,
        client: Client,
        dense: DenseParameters,
        tables: Sequence[RemoteTable],
        servers: int,
        configs: AsyncConfigs,
    ) -> None:
        self._client = client
        self._dense = dense
        self._tables = tables
        self._servers = servers
        self._configs = configs
        self._merging = Merging(tables)
        self._pushes: deque[tuple[list[Request], Ticket]] = deque()
        self._receiving: tuple[list[Request], Ticket] | None = None
        self._sent = 0
        self.step = 0

    def start(self, step: int) -> None:
        self.step = step
        for table in self._tables:
            table.as_of = step

    def push(self) -> None:
        self._merging.add(self._dense.gradients())
        self.start(self.step + 1)
        if self._merging.steps >= self._configs.max_merge_var_num:
            self._send()
        if not self._configs.overlap:
            self.flush()
            return
        self._client.look()
        while self._pushes and (
            not self._pushes[0][1].open or len(self._pushes) > self._configs.send_queue_size
        ):
            self._oldest()
        if self._configs.independent_recv_thread:
            self._receive()

    def prefetch(self, batches: Batches) -> None:
        asked = [(table, table.expect(ids)) for table, ids in batches.items()]
        if self._configs.overlap:
            ask_now(self._client, self._servers, asked, self.step)

    def refresh(self) -> None:
        self.flush()
        pulls = self._dense.pulls(self.step, trained_only=True)
        self._dense.take(answers_of(pulls, self._client.ask(pulls)))

    def flush(self) -> None:
        if self._merging.steps:
            self._send()
        while self._pushes:
            self._oldest()

    def _send(self) -> None:
        push: list[list[Part]] = [[] for _ in range(self._servers)]
        self._merging.add_push(self._dense, push)
        self._sent += 1
        with_values = (
            not self._configs.independent_recv_thread
            and self._sent % self._configs.min_send_grad_num_before_recv == 0
        )
        requests = []
        for server, parts in enumerate(push):
            if with_values:
                parts += self._dense.trained_wants[server]
            requests.append(Request(server=server, kind=Kind.PUSH, number=self.step - 1, parts=tuple(parts)))
        self._pushes.append((requests, self._client.send(requests)))

    def _oldest(self) -> None:
        requests, ticket = self._pushes.popleft()
        self._dense.take(answers_of(requests, self._client.wait(ticket)))

    def _receive(self) -> None:
        if self._receiving is not None:
            requests, ticket = self._receiving
            if ticket.open:
                return
            self._dense.take(answers_of(requests, ticket.replies))
        pulls = self._dense.pulls(self.step, trained_only=True)
        self._receiving = (pulls, self._client.send(pulls))


def ask_now(client: Client, servers: int, asked: Sequence[tuple[RemoteTable, Question]], step: int) -> None:
    """Send questions that tables have prepared, in one message to each server."""
    pull = Pull(client, servers, [question for _, question in asked], step)
    for table, question in asked:
        table.underway(question, pull)


def answers_of(requests: Sequence[Request], replies: Sequence[Message]) -> list[tuple[int, Message]]:
    """(server, its reply) for each request."""
    return [(request.server, reply) for request, reply in zip(requests, replies, strict=True)]
