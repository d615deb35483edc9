"""Request rows by key, with or without a push, and assemble them from the servers' answers.

`group` handles tables, batches and gradients, `embedding` handles forward passes, and `exchange` decides when
to push.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from fleetrun.frozen import frozen
from trainers.errors import ServerError
from trainers.kernels.compiled import Keys
from trainers.ps.client import Client, Request
from trainers.ps.kernels.batch import union_runs
from trainers.ps.tables.run import Spans
from trainers.ps.wire import MAX_FRAME_BYTES, Code, Field, Kind, Message, Part


@frozen(eq=False)
class Lookup:
    """The distinct ids of a call."""

    keys: Tensor
    """(u,) int64."""
    place: Tensor
    """The position of each id's key, int64 in the shape of the ids."""
    counts: Tensor
    """The number of occurrences of each key, (u,) int64."""


def same_ids(left: Tensor, right: Tensor) -> bool:
    """Return True if both tensors are the same memory."""
    return left is right or (
        left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.dtype == right.dtype
        and left.device == right.device
    )


def version_of(ids: Tensor) -> bytes | int:
    """Return the ids as bytes, because torch does not count changes through numpy or `.data`.

    For ids on a device, return torch's counter of changes, or 0 for inference tensors, which have none.
    """
    if ids.is_cpu:
        return ids.numpy().tobytes()
    return 0 if ids.is_inference() else ids._version


class RowRequest:
    """A request for the rows of distinct keys, (n,) int64, of a run of tables. `table` is the first table.

    `spans` (servers, tables) gives the number of keys of each table on each server, server by server. With
    `insert`, keys without a row get one. With `counted`, the servers count the requests of each key. Sent
    keys are counted in `requested` (servers, tables). `as_of` is the step whose rows were requested, or None
    before the request is sent.
    """

    def __init__(
        self,
        table: int,
        dim: int,
        keys: Keys,
        spans: Spans,
        *,
        insert: bool,
        counted: bool = False,
        requested: Spans | None = None,
    ) -> None:
        self.keys, self._dim = keys, dim
        self.table = table
        self.insert = insert
        self.as_of: int | None = None
        self._cuts: list[int] = [0, *np.cumsum(spans.sum(axis=1)).tolist()]
        self.spans = spans
        self._counted, self._requested = counted, requested
        self._field = Field.KEYS if insert else Field.PEEK
        self._sent: SentRequests | None = None
        self._rows: Tensor | None = None
        self._members: Sequence[RowRequest] = ()
        self._union: tuple[RowRequest, Keys] | None = None
        """The request that contains the keys of this one, and their positions there."""

    @classmethod
    def union(cls, members: Sequence[RowRequest]) -> RowRequest:
        """Return one request for all keys of requests that are otherwise equal."""
        first = members[0]
        spans, keys, place = union_runs([(each.spans.reshape(-1), each.keys) for each in members])
        made = cls(
            first.table,
            first._dim,
            keys,
            spans.reshape(first.spans.shape),
            insert=first.insert,
            requested=first._requested,
        )
        made._members = members
        ends = np.cumsum([len(each.keys) for each in members])
        for each, some in zip(members, np.split(place, ends[:-1]), strict=True):
            each._union = made, some
        return made

    @property
    def alike(self) -> Hashable:
        """A value that is equal for requests that differ only in their keys. None if this request cannot join
        a union.
        """
        return None if self._counted else (self.table, self._dim, self.spans.shape, self.insert)

    @property
    def bytes(self) -> int:
        """The size of its rows in float32."""
        return 4 * len(self.keys) * self._dim

    def concerns(self, server: int) -> bool:
        """Return True if this server has any of the keys."""
        return bool(self._cuts[server] < self._cuts[server + 1])

    def parts(self, server: int) -> list[Part]:
        """Return the parts of a message to this server."""
        some = torch.from_numpy(self.keys[self._cuts[server] : self._cuts[server + 1]])
        first, stop = self._tables(server)
        keys = Part(self.table + first, self._field, some)
        if self.spans.shape[1] == 1:
            return [keys]
        return [Part(keys.table, Field.SPANS, torch.from_numpy(self.spans[server, first:stop])), keys]

    def _tables(self, server: int) -> tuple[int, int]:
        """Return the range from the first table with a key for this server to the last one."""
        found = np.flatnonzero(self.spans[server])
        return int(found[0]), int(found[-1]) + 1

    def mark_sent(self, sent: SentRequests, as_of: int) -> None:
        """Record that the parts have been sent with the messages of `sent`."""
        self._sent, self.as_of = sent, as_of
        if self._requested is not None:
            self._requested += self.spans
        for each in self._members:
            each.as_of = as_of
        self._members = ()

    def answer(self, server: int, part: Part) -> None:
        """Store this server's rows."""
        start, stop = self._cuts[server], self._cuts[server + 1]
        wanted, table = [stop - start, self._dim], self.table + self._tables(server)[0]
        if part.field is not Field.ROWS or part.table != table or list(part.data.shape) != wanted:
            raise ServerError(
                f"server {server} answered a request for {wanted} values of table {table} with "
                f"{part.field.name} {list(part.data.shape)} of table {part.table}"
            )
        if stop - start == len(self.keys):
            self._rows = part.data.float()
            return
        if self._rows is None:
            self._rows = torch.empty(len(self.keys), self._dim)
        self._rows[start:stop] = part.data

    @property
    def rows(self) -> Tensor:
        """The rows, (n, dim) float32, in the order of the keys. Reading them waits for the answers of all
        servers concerned.
        """
        if self._union is not None:
            union, place = self._union
            self._rows, self._union = union.rows[torch.from_numpy(place)], None
        if self._sent is not None:
            self._sent.wait()
            self._sent = None
        return torch.empty(0, self._dim) if self._rows is None else self._rows


def united(row_requests: Sequence[RowRequest]) -> list[RowRequest]:
    """Return the requests, with a union of those that differ only in their keys. A union requests each key
    once.
    """
    alike: dict[Hashable, list[RowRequest]] = {}
    for each in row_requests:
        alike.setdefault(each.alike or id(each), []).append(each)
    found: list[RowRequest] = []
    for some in alike.values():
        together = len(some) > 1 and sum(each.bytes for each in some) <= MAX_FRAME_BYTES
        found += [RowRequest.union(some)] if together else some
    return found


class SentRequests:
    """One message for each server, sent at construction, with the row requests in it.

    `as_of` is the step whose rows are requested.
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
        """True if an answer was missing when the sockets were last read."""
        return self._pending.open

    def wait(self) -> list[tuple[int, Message]]:
        """Return each server with its answer. Afterwards, the row requests have their rows."""
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
    """Append the row requests to the messages of the servers that they concern."""
    for server, parts in enumerate(messages):
        for request in row_requests:
            if request.concerns(server):
                parts += request.parts(server)


def send_row_requests(
    client: Client, servers: int, row_requests: Sequence[RowRequest], as_of: int
) -> SentRequests:
    """Send the row requests without a push, in one message to each server concerned."""
    messages: list[list[Part]] = [[] for _ in range(servers)]
    add_row_requests(messages, row_requests)
    requests = [
        Request(server=server, kind=Kind.PULL, number=as_of, parts=tuple(parts))
        for server, parts in enumerate(messages)
        if parts
    ]
    return SentRequests(client, requests, row_requests, as_of)


def push_requests(messages: Sequence[Sequence[Part]], step: int, *, overflow: bool = False) -> list[Request]:
    """Return the push of `step`, with a message for each server. With `overflow`, it has no gradients,
    because they were not finite.
    """
    code = Code.NOT_FINITE if overflow else Code.NONE
    return [
        Request(server=server, kind=Kind.PUSH, number=step, code=code, parts=tuple(parts))
        for server, parts in enumerate(messages)
    ]
