"""A sparse table seen from a trainer: rows pulled by key, gradients kept by key until they are pushed.
Leaves lookups in a forward pass to `embedding` and the moment of a push to `exchange`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from trainers.ps.kernels.merge import merge_rows
from trainers.ps.kernels.owners import split
from trainers.ps.net.client import Client, Request
from trainers.ps.net.wire import Field, Kind, Part
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.trainer.lookup import Lookup, lookup_of, lookups_of, same_ids, version_of
from trainers.ps.trainer.modules import bound
from trainers.ps.trainer.questions import Pull, Question

_CHUNK_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class _Expected:
    """A batch that comes next. `version`: of the tensor, which grows when it is changed in place; `asked_at`:
    the step in which it was prepared. `pull`: its rows are underway; `arrived`: they are here.
    """

    ids: torch.Tensor
    lookup: Lookup
    question: Question
    version: int
    asked_at: int
    pull: Pull | None = None
    arrived: bool = False
    age: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """The gradient of one table since the last push: each key once. `stats` (keys, 2): shows and clicks."""

    keys: torch.Tensor
    rows: torch.Tensor
    stats: torch.Tensor | None


class RemoteTable:
    """One table of the model."""

    def __init__(
        self, sparse: SparseParameter, servers: int, client: Client, *, row_dtype: torch.dtype
    ) -> None:
        self.sparse = sparse
        self.as_of = 0
        self._servers = servers
        self._client = client
        self._row_dtype = row_dtype
        self._expected: list[_Expected] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stats: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def has_gradients(self) -> bool:
        return bool(self._gradients)

    def look_up(self, ids: torch.Tensor, *, insert: bool) -> tuple[Lookup, torch.Tensor]:
        """The keys of a batch and their rows, (u, dim) float32."""
        each = self._take_expected(ids)
        if each is not None:
            return each.lookup, self._rows_of(each, insert=insert)
        lookup = lookup_of(ids)
        return lookup, self.pull_rows(lookup.keys, insert=insert)

    def prepared(self, ids: torch.Tensor) -> Lookup:
        """The keys of a batch, which may have been expected."""
        each = self._take_expected(ids)
        return lookup_of(ids) if each is None else each.lookup

    def _take_expected(self, ids: torch.Tensor) -> _Expected | None:
        """The batch that was prepared with this tensor, unless the tensor has changed since."""
        for number, each in enumerate(self._expected):
            if same_ids(each.ids, ids):
                del self._expected[number]
                return each if each.version == version_of(ids) else None
        return None

    def _rows_of(self, each: _Expected, *, insert: bool) -> torch.Tensor:
        late = self.as_of - each.asked_at > 1  # the batch was left out when its turn came
        if each.pull is not None:
            each.pull.wait()
        if late or (each.pull is None and not each.arrived):
            return self.pull_rows(each.lookup.keys, insert=insert)
        return each.question.rows

    def expect(self, batches: Sequence[torch.Tensor]) -> Question:
        """Prepare a batch that comes next: the tensors of ids with which this table's module will be
        called.
        """
        lookups = lookups_of(batches)
        question = self.question(lookups[0].keys, insert=self.sparse.module.training)
        for each in self._expected:
            each.age += 1
        self._expected = [each for each in self._expected if each.age < 2]  # a batch that never came
        self._expected += [
            _Expected(ids, lookup, question, version_of(ids), self.as_of)
            for ids, lookup in zip(batches, lookups, strict=True)
        ]
        return question

    def underway(self, question: Question, pull: Pull) -> None:
        """This question has been asked."""
        for each in self._expected:
            if each.question is question:
                each.pull = pull

    def arrived(self, question: Question) -> None:
        """This question has been answered."""
        for each in self._expected:
            if each.question is question:
                each.arrived = True

    def pull_rows(self, keys: torch.Tensor, *, insert: bool) -> torch.Tensor:
        """(n, dim) float32 for (n,) int64 different keys."""
        question = self.question(keys, insert=insert)
        Pull(self._client, self._servers, [question], self.as_of).wait()
        return question.rows

    def pull_all(self) -> torch.Tensor | None:
        """Every row of the module's table, (num_embeddings, dim) float32; None when it has no end."""
        total = bound(self.sparse.module)
        if total is None:
            return None
        rows = torch.empty(total, self.sparse.spec.size)
        for keys in self._chunks(total):
            rows[keys] = self.pull_rows(keys, insert=False)
        return rows

    def initial(self) -> Iterator[list[Request]]:
        """The module's own weights, some rows at a time; nothing for a table without an end."""
        total = bound(self.sparse.module)
        if total is None:
            return
        weight = self.sparse.module.weight.detach().cpu()
        for keys in self._chunks(total):
            yield [
                Request(
                    server=server, kind=Kind.ASSIGN, parts=tuple(self._rows(keys[share], weight[keys[share]]))
                )
                for server, share in enumerate(split(keys, self._servers))
            ]

    def add_gradient(self, keys: torch.Tensor, grad: torch.Tensor) -> None:
        """Keep the gradient of these rows for the next push."""
        if self.sparse.trained:
            self._gradients.append((keys, grad))

    def add_stats(self, keys: torch.Tensor, stats: torch.Tensor) -> None:
        """Keep shows and clicks for the next push: of keys that have a gradient then."""
        if self.sparse.trained:
            self._stats.append((keys, stats))

    def drop_gradients(self) -> None:
        self._gradients.clear()
        self._stats.clear()

    def take_gradients(self) -> Merged | None:
        """The merged gradient since the last time; None when no backward pass has touched the table."""
        if not self._gradients:
            return None
        keys, rows = self._gradients[0] if len(self._gradients) == 1 else merge_rows(self._gradients)
        stats = None
        if self._stats:  # in the order of the gradient's keys: theirs come first
            stats = merge_rows([(keys, torch.zeros(len(keys), 2)), *self._stats])[1][: len(keys)]
        self._gradients, self._stats = [], []
        return Merged(keys, rows, stats)

    def add_push(self, push: Sequence[list[Part]], merged: Merged, lr: float | None = None) -> None:
        """Append a gradient to each server's push: to those without a key too, whose step count must go
        on. With the learning rate of now, unless told another.
        """
        lr = self.sparse.lr if lr is None else lr
        if self._servers == 1:
            push[0].extend(self._rows(merged.keys, merged.rows.to(self._row_dtype), lr, merged.stats))
            return
        for server, share in enumerate(split(merged.keys, self._servers)):
            stats = None if merged.stats is None else merged.stats[share]
            rows = merged.rows[share].to(self._row_dtype)
            push[server].extend(self._rows(merged.keys[share], rows, lr, stats))

    def question(self, keys: torch.Tensor, *, insert: bool) -> Question:
        """To ask for these rows with a message of one's own."""
        return Question(self.sparse.table, self.sparse.spec.size, keys, self._servers, insert=insert)

    def _rows(
        self, keys: torch.Tensor, rows: torch.Tensor, lr: float = 0.0, stats: torch.Tensor | None = None
    ) -> list[Part]:
        table = self.sparse.table
        parts = [Part(table, Field.KEYS, keys), Part(table, Field.ROWS, rows.contiguous(), lr)]
        return parts if stats is None else [*parts, Part(table, Field.STATS, stats)]

    def _chunks(self, total: int) -> Iterator[torch.Tensor]:
        rows = max(1, _CHUNK_BYTES // (4 * self.sparse.spec.size))
        for start in range(0, total, rows):
            yield torch.arange(start, min(start + rows, total))
