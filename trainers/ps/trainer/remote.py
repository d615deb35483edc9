"""A sparse table as a trainer sees it: requests for rows by key and their assembly from the servers' answers.

Batches and gradients belong to `group`, forward passes to `embedding`, the moment of a push to `exchange`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from trainers.errors import ServerError, UsageError
from trainers.ps.client import Client, Request
from trainers.ps.kernels.batch import order_by_server
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.trainer.modules import row_limit
from trainers.ps.wire import INITIAL, MAX_FRAME_BYTES, Field, Kind, Message, Part

if TYPE_CHECKING:
    from trainers.ps.trainer.group import Call, TableGroup


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """The distinct ids of a call. `keys` (u,) int64; `place`: the position of each id's key, in the shape of
    the ids; `counts` (u,) int64: how often each key occurs, perhaps never.
    """

    keys: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor


def same_ids(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether both tensors are the same memory."""
    return left is right or (
        left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.dtype == right.dtype
        and left.device == right.device
    )


def version_of(ids: torch.Tensor) -> int:
    """Grows with every change in place; inference tensors cannot be changed."""
    return 0 if ids.is_inference() else ids._version


class RowRequest:
    """A request for the rows of (n,) int64 distinct keys of a run of tables, the first of which is `table`.
    `cuts`: the keys of server s are at [cuts[s], cuts[s + 1]); `spans` (servers, tables): how many of them
    each table has, one after the other; None: there is one table. `insert`: keys without a row get one.
    `as_of`: the step whose rows have been requested; None: not sent yet.
    """

    def __init__(
        self,
        table: int,
        dim: int,
        keys: torch.Tensor,
        cuts: Sequence[int],
        *,
        insert: bool,
        spans: NDArray[np.int64] | None = None,
    ) -> None:
        if 4 * len(keys) * dim > MAX_FRAME_BYTES:
            raise UsageError(
                f"one batch needs {len(keys)} rows of {dim} values, more than the {MAX_FRAME_BYTES >> 20} MB "
                "of one message; use smaller batches"
            )
        self.table = table
        self.keys = keys
        self.insert = insert
        self.as_of: int | None = None
        self._cuts = cuts
        self._dim = dim
        self._spans = spans
        self._field = Field.KEYS if insert else Field.PEEK
        self._sent: SentRequests | None = None
        self._rows: torch.Tensor | None = None

    def concerns(self, server: int) -> bool:
        """Whether this server has any of the keys."""
        return self._cuts[server] < self._cuts[server + 1]

    def parts(self, server: int) -> list[Part]:
        """The parts of a message to this server."""
        keys = Part(self.table, self._field, self.keys[self._cuts[server] : self._cuts[server + 1]])
        if self._spans is None:
            return [keys]
        return [Part(self.table, Field.SPANS, torch.from_numpy(self._spans[server])), keys]

    def mark_sent(self, sent: SentRequests, as_of: int) -> None:
        """The parts have been sent, with the messages of `sent`."""
        self._sent, self.as_of = sent, as_of

    def answer(self, server: int, part: Part) -> None:
        """Store this server's rows."""
        start, stop = self._cuts[server], self._cuts[server + 1]
        wanted = [stop - start, self._dim]
        if part.field is not Field.ROWS or part.table != self.table or list(part.data.shape) != wanted:
            raise ServerError(
                f"server {server} answered a request for {wanted} values of table {self.table} with "
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
        """(n, dim) float32 in the order of the keys; waits for the answers of all servers concerned."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = None
        return torch.empty(0, self._dim) if self._rows is None else self._rows


class SentRequests:
    """One message for each server, sent at construction, and the row requests in it. `as_of`: the step whose
    rows are requested.
    """

    def __init__(
        self, client: Client, requests: Sequence[Request], row_requests: Sequence[RowRequest], as_of: int
    ) -> None:
        self._client = client
        self._requests = requests
        self._row_requests = row_requests
        self._pending = client.send(requests)
        self._answers: list[tuple[int, Message]] | None = None
        for request in row_requests:
            request.mark_sent(self, as_of)

    @property
    def open(self) -> bool:
        """Whether an answer was missing when the sockets were last read."""
        return self._pending.open

    def wait(self) -> list[tuple[int, Message]]:
        """(server, its answer) of all; then the row requests have their rows."""
        if self._answers is None:
            replies = self._client.wait(self._pending)
            servers = [request.server for request in self._requests]
            self._answers = list(zip(servers, replies, strict=True))
            for server, reply in self._answers:
                self._distribute(server, reply)
            self._row_requests = ()
        return self._answers

    def _distribute(self, server: int, reply: Message) -> None:
        concerned = [request for request in self._row_requests if request.concerns(server)]
        rows = [part for part in reply.parts if part.field is Field.ROWS]
        if len(rows) != len(concerned):
            raise ServerError(
                f"server {server} answered {len(concerned)} requests for rows with {len(rows)} ROWS parts"
            )
        for request, part in zip(concerned, rows, strict=True):
            request.answer(server, part)


def add_row_requests(messages: Sequence[list[Part]], row_requests: Sequence[RowRequest]) -> None:
    """Append to each server's message the row requests that concern it."""
    for server, parts in enumerate(messages):
        for request in row_requests:
            if request.concerns(server):
                parts += request.parts(server)


def send_row_requests(
    client: Client, servers: int, row_requests: Sequence[RowRequest], as_of: int
) -> SentRequests:
    """Send the row requests by themselves, in one message to each server concerned."""
    messages: list[list[Part]] = [[] for _ in range(servers)]
    add_row_requests(messages, row_requests)
    requests = [
        Request(server=server, kind=Kind.PULL, number=as_of, parts=tuple(parts))
        for server, parts in enumerate(messages)
        if parts
    ]
    return SentRequests(client, requests, row_requests, as_of)


def push_requests(messages: Sequence[Sequence[Part]], step: int) -> list[Request]:
    """The gradients of `step`, a message for each server."""
    return [
        Request(server=server, kind=Kind.PUSH, number=step, parts=tuple(parts))
        for server, parts in enumerate(messages)
    ]


_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class MergedGradient:
    """The gradient of one table since the last push: each key once. `stats` (keys, 2): shows and clicks."""

    keys: torch.Tensor
    rows: torch.Tensor
    stats: torch.Tensor | None

    def at(self, order: torch.Tensor) -> MergedGradient:
        """The same in another order."""
        stats = None if self.stats is None else self.stats.index_select(0, order)
        return MergedGradient(self.keys.index_select(0, order), self.rows.index_select(0, order), stats)


class RemoteTable:
    """One table of the model: requests about some of its rows or all of them. What it has in common with
    others, batches and gradients, belongs to its `group`.
    """

    group: TableGroup

    def __init__(
        self, sparse: SparseParameter, servers: int, client: Client, *, row_dtype: torch.dtype
    ) -> None:
        self.sparse = sparse
        self.servers = servers
        self.client = client
        self.row_dtype = row_dtype
        self.place = 0

    def join(self, group: TableGroup, place: int) -> None:
        """Become the table of this number in a group."""
        self.group, self.place = group, place

    def look_up(self, ids: torch.Tensor, *, insert: bool) -> tuple[Lookup, torch.Tensor]:
        """The keys of a call and their rows, (u, dim) float32."""
        return self.group.look_up(self.place, ids, insert=insert)

    def lookup(self, ids: torch.Tensor) -> Lookup:
        """The keys of a call, which may have been prepared."""
        return self.group.keys_of(self.place, ids)

    def call(self, ids: torch.Tensor) -> Call:
        """The call of these ids in training."""
        return self.group.call(self.place, ids)

    def prepare(self, batches: Sequence[torch.Tensor]) -> RowRequest:
        """Prepare an upcoming batch of this table alone: the tensors of ids with which its module will be
        called.
        """
        (request,) = self.group.prepare({self.place: batches})
        return request

    def add_gradient(self, keys: torch.Tensor, grad: torch.Tensor) -> None:
        """Keep the gradient of these rows for the next push."""
        self.group.add_gradient(self.place, keys, grad)

    def add_stats(self, keys: torch.Tensor, stats: torch.Tensor) -> None:
        """Keep shows and clicks for the next push, which sends those of keys with a gradient."""
        self.group.add_stats(self.place, keys, stats)

    def pull_rows(self, keys: torch.Tensor, *, insert: bool) -> torch.Tensor:
        """(n, dim) float32 for (n,) int64 distinct keys."""
        order, cuts = order_by_server(keys, self.servers)
        request = self.row_request(keys if order is None else keys[order], cuts, insert=insert)
        send_row_requests(self.client, self.servers, [request], self.group.as_of)
        if order is None:
            return request.rows
        rows = torch.empty(len(keys), self.sparse.spec.size)
        rows[order] = request.rows
        return rows

    def inserting(self, keys: torch.Tensor) -> RowRequest:
        """A request for distinct keys, which it orders by server; keys without a row get one."""
        order, cuts = order_by_server(keys, self.servers)
        return self.row_request(keys if order is None else keys[order], cuts, insert=True)

    def pull_all(self) -> torch.Tensor | None:
        """Every row of the module's table, (num_embeddings, dim) float32; None when it is unbounded."""
        total = row_limit(self.sparse.module)
        if total is None:
            return None
        rows = torch.empty(total, self.sparse.spec.size)
        for keys in self._chunks(total):
            rows[keys] = self.pull_rows(keys, insert=False)
        return rows

    def initial(self) -> Iterator[list[Request]]:
        """The module's own weights; nothing for an unbounded table."""
        if row_limit(self.sparse.module) is not None:
            yield from self.assigned(self.sparse.module.weight.detach().cpu(), INITIAL)

    def assigned(self, weight: torch.Tensor, number: int) -> Iterator[list[Request]]:
        """The rows of a weight for the servers, some at a time; `number`: INITIAL or LOADED."""
        for keys in self._chunks(len(weight)):
            assigned: list[list[Part]] = [[] for _ in range(self.servers)]
            self._add(assigned, MergedGradient(keys, weight[keys], None), 0.0)
            yield [
                Request(server=server, kind=Kind.ASSIGN, number=number, parts=tuple(parts))
                for server, parts in enumerate(assigned)
            ]

    def add_push(self, push: Sequence[list[Part]], merged: MergedGradient, lr: float | None = None) -> None:
        """Append a gradient to each server's push: also to those without a key, whose step count must advance
        too. `lr`: instead of the current learning rate.
        """
        sent = dataclasses.replace(merged, rows=merged.rows.to(self.row_dtype))
        self._add(push, sent, self.sparse.lr if lr is None else lr)

    def by_server(self, merged: MergedGradient) -> tuple[MergedGradient, list[int]]:
        """The gradient ordered by server; the keys of server s are at [cuts[s], cuts[s + 1])."""
        order, cuts = order_by_server(merged.keys, self.servers)
        return (merged if order is None else merged.at(order)), cuts

    def _add(self, messages: Sequence[list[Part]], merged: MergedGradient, lr: float) -> None:
        """Append to each server's message the rows of its keys."""
        table = self.sparse.table
        merged, cuts = self.by_server(merged)
        keys, rows, stats = merged.keys, merged.rows.contiguous(), merged.stats
        for parts, (start, stop) in zip(messages, pairwise(cuts), strict=True):
            parts.append(Part(table, Field.KEYS, keys[start:stop]))
            parts.append(Part(table, Field.ROWS, rows[start:stop], lr))
            if stats is not None:
                parts.append(Part(table, Field.STATS, stats[start:stop]))

    def row_request(self, keys: torch.Tensor, cuts: Sequence[int], *, insert: bool) -> RowRequest:
        """A request for these keys, which are ordered by server."""
        return RowRequest(self.sparse.table, self.sparse.spec.size, keys, cuts, insert=insert)

    def _chunks(self, total: int) -> Iterator[torch.Tensor]:
        rows = max(1, _CHUNK_BYTES // (4 * self.sparse.spec.size))
        for start in range(0, total, rows):
            yield torch.arange(start, min(start + rows, total))
