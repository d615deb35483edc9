"""Exchange: when a trainer's gradients leave and new values come, step by step with the others (sync) or on
its own (async). Knows the order of messages; leaves their content to `dense` and `remote`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from trainers.ps.configs import AsyncConfigs
from trainers.ps.net.client import Client
from trainers.ps.net.wire import Part
from trainers.ps.trainer.dense import DenseParameters
from trainers.ps.trainer.merging import Merging
from trainers.ps.trainer.questions import Question, Underway, add_questions, ask, pushes
from trainers.ps.trainer.remote import RemoteTable

Batches = Mapping[RemoteTable, Sequence[torch.Tensor]]


class Exchange(Protocol):
    """`step` counts this trainer's steps. `ahead`: how many batches before its turn a batch shall be
    prefetched.
    """

    @property
    def step(self) -> int: ...

    @property
    def ahead(self) -> int: ...

    def start(self, step: int) -> None:
        """Begin at this step."""

    def push(self) -> None:
        """Send the gradients of one step, and see to the values of the next."""

    def prefetch(self, batches: Batches) -> None:
        """Prepare the rows of a batch that comes soon."""

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
        self.step = 0
        self.ahead = 1

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
        for parts, wants in zip(push, self._dense.trained_wants, strict=True):
            parts += wants
        questions = for_training(self._tables)
        add_questions(push, questions)
        requests = pushes(push, self.step)
        self.start(self.step + 1)
        self._dense.take(Underway(self._client, requests, questions, self.step).wait())

    def prefetch(self, batches: Batches) -> None:
        """In training the rows come with the answer to the next push; otherwise by themselves."""
        asked = [table.expect(ids) for table, ids in batches.items()]
        ask(self._client, self._servers, [each for each in asked if not each.insert], self.step)

    def refresh(self) -> None:
        pulls = self._dense.pulls(self.step, trained_only=True)
        self._dense.take(Underway(self._client, pulls, [], self.step).wait())

    def flush(self) -> None:
        return


class AsyncExchange:
    """Pushes go out and are waited for later; dense values are taken when they come. See AsyncConfigs.

    A push of step i carries the questions of batch i + 2, which is prefetched before step i: by then that of
    batch i + 1 is underway. Rows are so as old as if they were asked for right after the push. With
    `max_staleness` they are asked for by themselves: a push must not wait for other trainers.
    """

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
        self._carries = configs.overlap and configs.max_staleness is None
        self._merging = Merging(tables)
        self._pushes: deque[Underway] = deque()
        self._receiving: Underway | None = None
        self._sent = 0
        self.step = 0
        self.ahead = 2 if self._carries else 1

    def start(self, step: int) -> None:
        self.step = step
        for table in self._tables:
            table.as_of = step

    def push(self) -> None:
        self._merging.add(self._dense.gradients())
        self.start(self.step + 1)
        if self._merging.steps >= self._configs.max_merge_var_num:
            self._send(for_training(self._tables) if self._carries else [])
        if not self._configs.overlap:
            self.flush()
            return
        self._client.look()
        while self._pushes and (
            not self._pushes[0].open or len(self._pushes) > self._configs.send_queue_size
        ):
            self._oldest()
        if self._configs.independent_recv_thread:
            self._receive()

    def prefetch(self, batches: Batches) -> None:
        """What no push has taken along by the time that the next batch is prepared is asked for by itself."""
        now = unasked(self._tables)
        coming = [table.expect(ids) for table, ids in batches.items()]
        if not self._carries:
            now = coming
        if self._configs.overlap:
            ask(self._client, self._servers, now, self.step)

    def refresh(self) -> None:
        self.flush()
        pulls = self._dense.pulls(self.step, trained_only=True)
        self._dense.take(Underway(self._client, pulls, [], self.step).wait())

    def flush(self) -> None:
        if self._merging.steps:
            self._send([])
        while self._pushes:
            self._oldest()

    def _send(self, questions: Sequence[Question]) -> None:
        push: list[list[Part]] = [[] for _ in range(self._servers)]
        self._merging.add_push(self._dense, push)
        self._sent += 1
        with_values = (
            not self._configs.independent_recv_thread
            and self._sent % self._configs.min_send_grad_num_before_recv == 0
        )
        if with_values:
            for parts, wants in zip(push, self._dense.trained_wants, strict=True):
                parts += wants
        add_questions(push, questions)
        self._pushes.append(Underway(self._client, pushes(push, self.step - 1), questions, self.step))

    def _oldest(self) -> None:
        self._dense.take(self._pushes.popleft().wait())

    def _receive(self) -> None:
        if self._receiving is not None:
            if self._receiving.open:
                return
            self._dense.take(self._receiving.wait())
        pulls = self._dense.pulls(self.step, trained_only=True)
        self._receiving = Underway(self._client, pulls, [], self.step)


def unasked(tables: Sequence[RemoteTable]) -> list[Question]:
    """What has been prepared and not been asked for yet."""
    return [question for table in tables for question in table.unasked()]


def for_training(tables: Sequence[RemoteTable]) -> list[Question]:
    """Of that what a push may ask for: it makes rows."""
    return [question for question in unasked(tables) if question.insert]
