"""Tables that a trainer handles together, with one request for the rows of a batch, one pass over its ids,
and one gradient.

Tables of a group have consecutive numbers, and equal width, rule and learning rate. Their parts of a message
are therefore a run (see `tables.run`). Work that is done once per group costs the same for hundreds of tables
as for one table. A batch is prepared when its ids are known, by `prefetch` for all tables, or by a forward
pass for its own table.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from trainers.kernels.compiled import Floats, Keys, Mask
from trainers.ps.client import Client, Request
from trainers.ps.kernels.batch import (
    arrange_run,
    array_of,
    distinct_run,
    find_run,
    gather_calls,
    scatter_calls,
)
from trainers.ps.kernels.index import SECRET
from trainers.ps.tables.run import NOT_IN, Spans, starts_of
from trainers.ps.tables.spec import EntryKind, holders
from trainers.ps.trainer.gradient import (
    Collected,
    Gradients,
    GroupGradient,
    Piece,
    begin_copy,
    leaf_of,
    merged_rows,
)
from trainers.ps.trainer.layout import SparseParameter, maximizes
from trainers.ps.trainer.modules import device_of, embeds, pools, row_limit, weight_of
from trainers.ps.trainer.remote import (
    Lookup,
    RowRequest,
    same_ids,
    send_row_requests,
    version_of,
)
from trainers.ps.trainer.staging import DeviceRows, Staging, flat_ids, staging_of, strided
from trainers.ps.wire import INITIAL, MAX_FRAME_BYTES, Field, Kind, Part

_CHUNK_BYTES = 4 << 20
_MAX_AHEAD = 2
"""The batches that may be prepared besides the current one."""


@dataclass(slots=True, eq=False)
class Call:
    """The ids with which the module of a table will be called, at [start, stop) of its batch."""

    table: int
    ids: Tensor
    version: bytes | int
    """A value that differs if the ids have changed, see `version_of`."""
    start: int
    stop: int
    batch: Batch
    output: Tensor | None = None
    """See `embedding.embed`."""


class Batch:
    """The ids of some calls, and the rows that they need. `keys` are the distinct ids, table by table. The
    keys of table t are at [ends[t], ends[t + 1]). `place` gives the position of each id among the keys of its
    table, and `counts` gives the occurrences of each key. Rows and gradients are ordered by server first.
    """

    def __init__(self, group: TableGroup, calls: Sequence[tuple[int, Tensor]], *, insert: bool) -> None:
        flats = flat_ids([ids for _, ids in calls], group.staging)
        tables = np.array([table for table, _ in calls], np.int64)
        addresses = np.array([each.data_ptr() for each in flats], np.int64)
        self._find(group, tables, addresses, [each.numel() for each in flats], insert=insert)
        self._given = [ids for _, ids in calls]
        for call in self.every:
            call.version = version_of(call.ids)
            self.calls.setdefault(call.table, []).append(call)

    @cached_property
    def every(self) -> Sequence[Call]:
        """All calls."""
        spans = zip(self.tables.tolist(), self._ids(), pairwise(self.starts.tolist()), strict=True)
        return [Call(table, ids, 0, *span, self) for table, ids, span in spans]

    def _ids(self) -> Sequence[Tensor]:
        return self._given

    def _find(
        self, group: TableGroup, tables: Keys, addresses: Keys, sizes: Sequence[int] | Keys, *, insert: bool
    ) -> None:
        """Find the keys of calls, and prepare the request for their rows. The ids of each call are an int64
        array at one of `addresses`, and `tables` (calls,) must ascend.
        """
        self._group = group
        self.age = 0
        """The number of batches prepared since."""
        self.calls: dict[int, list[Call]] = {}
        """Calls that have not been made, by table."""
        self.tables, self.starts = tables, np.zeros(len(tables) + 1, np.int64)
        np.cumsum(sizes, out=self.starts[1:])
        total = int(self.starts[-1])
        ids, keys = np.empty(total, np.int64), np.empty(total, np.int64)
        self.place, counts = np.empty(total, np.int64), np.empty(total, np.int64)
        self.ends = np.zeros(group.size + 1, np.int64)
        firsts = np.searchsorted(tables, np.arange(group.size + 1))
        found = distinct_run(addresses, self.starts, firsts, SECRET, ids, keys, self.place, counts, self.ends)
        self.keys, self.counts = keys[:found].copy(), counts[:found].copy()
        self.padding, self.outside = group.find(self.keys, self.ends)
        self.made = np.bincount(tables, minlength=group.size)
        """The number of calls of each table in this batch."""
        self.moved, spans, sent = group.arranged(self.keys, self.ends, group.unrequested(self.padding))
        self.moved[self.moved < 0] = len(sent)  # zeros follow the requested rows, see `rows`
        self.request = group.request(sent, spans, insert=insert)
        self.pushed = (self.moved, spans, sent)
        """The position of each key's gradient (-1 for padding), the number of keys by server and table, and
        the keys.
        """
        if (self.padding >= 0).any():
            self.pushed = group.arranged(self.keys, self.ends, self.padding)

    @cached_property
    def rows(self) -> Floats:
        """Rows (keys, dim) float32 in the order of the request, then zeros for keys outside the request.
        Reading them waits for the servers' answers.
        """
        rows: Floats = array_of(self.request.rows)
        if missing := len(self.keys) - len(rows):
            rows = np.concatenate([rows, np.zeros((missing, self.dim), np.float32)])
        for table in np.flatnonzero((self.padding >= 0) & self._group.without_padding):
            # No other code sets these rows to zeros.
            rows[self.moved[self.ends[table] + self.padding[table]]] = 0.0
        return rows

    def lookup(self, call: Call) -> Lookup:
        """Return the keys of the call."""
        some = slice(self.ends[call.table], self.ends[call.table + 1])
        place, keys, counts = self.place[call.start : call.stop], self.keys[some], self.counts[some]
        if (times := self._times(call)) is not None:
            used = times > 0
            place, keys, counts = (np.cumsum(used) - 1)[place], keys[used], times[used]
        places = torch.from_numpy(place).view(call.ids.shape)
        return Lookup(torch.from_numpy(keys), places, torch.from_numpy(counts))

    def rows_of(self, call: Call) -> Tensor:
        """Return a copy of the rows of these keys, (u, dim)."""
        moved = self.moved[self.ends[call.table] : self.ends[call.table + 1]]
        if (times := self._times(call)) is not None:
            moved = moved[times > 0]
        return torch.from_numpy(self.rows[moved])

    def _times(self, call: Call) -> Keys | None:
        """Return how often each key of its table is in the call, or None if no other call has keys of that
        table.
        """
        if self.made[call.table] == 1:
            return None
        size = int(self.ends[call.table + 1] - self.ends[call.table])
        return np.bincount(self.place[call.start : call.stop], minlength=size)

    @property
    def anchor(self) -> Tensor:
        """A tensor on which outputs depend, for autograd."""
        return self._group.anchor

    def with_others(self, call: Call) -> list[Call]:
        """Return the call, and unmade calls that need only their rows. A call whose weight has hooks is
        alone, because torch calls the hooks of all inputs of a node, even without a gradient.
        """
        embeds, weights = self._group.embeds, self._group.weights
        returning = self._group.collected.returning
        others = [
            each
            for number, calls in self.calls.items()
            if embeds[number] and weights[number].requires_grad and number not in returning
            for each in calls
            if each.output is None
        ]
        return [call] if call.table in returning else [call, *others]

    def check(self, call: Call) -> None:
        """Raise IndexError for an id that its table cannot have."""
        place = self.outside[call.table]
        if place >= 0:
            self._group.refuse(call.table, int(self.keys[self.ends[call.table] + place]))

    @cached_property
    def _there(self) -> DeviceRows | None:
        """The rows on the device of the group, or None on the CPU."""
        if self._group.staging is None:
            return None
        index = self.moved[np.repeat(self.ends[self.tables], np.diff(self.starts)) + self.place]
        return DeviceRows(self._group.staging, torch.from_numpy(self.rows), index)

    def gather(self, calls: Sequence[Call]) -> list[Tensor]:
        """Return for each call its rows, in the shape (*ids.shape, dim)."""
        if self._there is not None:
            return [self._there.gather(each.start, each.stop, each.ids.shape) for each in calls]
        outs = [torch.empty((*call.ids.shape, self._group.dim)) for call in calls]
        addresses = np.array([each.data_ptr() for each in outs], np.int64)
        begins, sizes, firsts = self._of(calls)
        gather_calls(self.rows, self.place, begins, sizes, self.moved, firsts, addresses)
        return outs

    def weights_of(self, calls: Sequence[Call]) -> list[torch.nn.Parameter]:
        """Return the weight of each call, for autograd."""
        return [self._group.weights[each.table] for each in calls]

    def backward(self, calls: Sequence[Call], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Collect the gradients of the outputs of `gather`. None means that the backward pass did not reach
        the call. Return for each call the gradient of its weight if autograd must get it.
        """
        reached = [(call, grad) for call, grad in zip(calls, grads, strict=True) if grad is not None]
        returned = dict[Call, Tensor]()
        some, own = self._group.collected.accumulating(reached)
        if some:
            self._add(self._group.collected.of(self, [call for call, _ in some]), some)
        for each in own:
            returned[each[0]] = self.returned([each[0]], partial(self._add, some=[each]))
        return [returned.get(call) for call in calls]

    def _add(self, to: Collected, some: Sequence[tuple[Call, Tensor]]) -> None:
        if self._there is not None:
            if to.there is None:
                to.there = self._there.zeros()
            spans = [(call.start, call.stop) for call, _ in some]
            self._there.scatter(spans, [grad for _, grad in some], to.there)
            return
        both = [strided(grad, self._group.dim) for _, grad in some]
        addresses = np.array([grad.data_ptr() for grad, _ in both], np.int64)
        strides = np.array([stride for _, stride in both], np.int64)
        begins, sizes, firsts = self._of([call for call, _ in some])
        scatter_calls(addresses, strides, self.place, begins, sizes, self.pushed[0], firsts, to.added())

    def add(self, call: Call, add: Callable[[Floats], None]) -> Tensor | None:
        """Collect the gradient of one call. `add` adds it to rows in the order of a push. See `backward`."""
        some, own = self._group.collected.accumulating([(call, None)])
        if some:
            add(self._group.collected.of(self, [call]).added())
        return self.returned([call], lambda to: add(to.added())) if own else None

    def returned(self, calls: Sequence[Call], add: Callable[[Collected], None]) -> Tensor:
        """Return the gradient of calls of one table for autograd."""
        alone, table = Collected(self, {*calls}), calls[0].table
        add(alone)
        if alone.there is not None:
            begin_copy([alone], self._group.staging)
        return self._group.collected.own_gradient(table, *alone.take(table))

    @property
    def dim(self) -> int:
        return self._group.dim

    def keys_of(self, calls: Iterable[Call]) -> Mask:
        """Return a mask of the pushed keys that occur in these calls."""
        moved, _, sent = self.pushed
        kept = np.zeros(len(sent) + 1, np.bool_)  # the last place is for padding, which is at -1
        for each in calls:
            first = self.ends[each.table]
            kept[moved[first + self.place[each.start : each.stop]]] = True
        return kept[:-1]

    def as_pushed(self, rows: Tensor) -> Floats:
        """Reorder gradients from the order of the request to the order of a push, which has no padding."""
        found: Floats = array_of(rows)
        moved, _, sent = self.pushed
        if moved is self.moved:
            return found
        order = np.empty(len(sent), np.int64)
        order[moved[moved >= 0]] = self.moved[moved >= 0]
        return found[order]

    def _of(self, calls: Sequence[Call]) -> tuple[Keys, Keys, Keys]:
        begins = np.array([call.start for call in calls], np.int64)
        sizes = np.array([call.stop for call in calls], np.int64) - begins
        return begins, sizes, self.ends[[call.table for call in calls]]


class RemoteTable:
    """One table of the model, for requests about some or all of its rows. `group` handles what the table
    shares with others, such as batches and gradients.
    """

    def __init__(self, group: TableGroup, place: int, sparse: SparseParameter) -> None:
        self.group = group
        self.place = place
        self.sparse = sparse
        self.stepped = sparse.in_backward
        self.trains = sparse.module.training
        """True if its last call was in training, with gradients."""

    @property
    def anchor(self) -> Tensor:
        """A tensor on which all outputs depend, for autograd."""
        return self.group.anchor

    def look_up(self, ids: Tensor, *, insert: bool) -> tuple[Lookup, Tensor]:
        """Return the distinct keys of a call and their rows, (u, dim) float32. Raises IndexError for an id
        out of range.
        """
        return self.group.look_up(self.place, ids, insert=insert)

    def call(self, ids: Tensor) -> Call | None:
        """Return the call of these ids in training, or None if neither `embed` nor `pool` can make it."""
        direct = self.group.embeds[self.place] or self.group.pools[self.place]
        return self.group.call(self.place, ids) if direct else None

    def collect(self, keys: Tensor, grad: Tensor) -> Tensor | None:
        """Collect the gradient of these rows in a backward pass, or return it if autograd must get it."""
        return self.group.collected.collect(self.place, keys, grad)

    def has_gradient(self) -> bool:
        """See `WeightGradient`."""
        return self.place in self.group.collected.tables

    def take_gradient(self) -> tuple[Tensor, Tensor] | None:
        """See `WeightGradient`."""
        return self.group.collected.take(self.place)

    def drop_gradient(self) -> None:
        """See `WeightGradient`."""
        self.group.collected.drop(self.place)

    def keep_gradient(self) -> None:
        """See `WeightGradient`."""
        self.group.collected.keep(self.place)

    def return_gradients(self) -> None:
        """See `WeightGradient`."""
        self.group.collected.returning.add(self.place)

    def add_stats(self, keys: Tensor, stats: Tensor) -> None:
        """Keep shows and clicks for the next push, which sends them for keys with a gradient."""
        self.group.add_stats(self.place, keys, stats)

    def pull_rows(self, keys: Tensor) -> Tensor:
        """Return rows (n, dim) float32 for distinct keys, (n,) int64, without new rows."""
        remote = self.group.remote
        moved, spans, sent = remote.arranged_alone(self.place, keys)
        some = spans[:, self.place, None]
        request = RowRequest(self.sparse.table, self.sparse.spec.size, sent, some, insert=False)
        remote.send([request])
        return request.rows[torch.from_numpy(moved)]

    def pull_all(self) -> Tensor | None:
        """Return every row of the module's table, (num_embeddings, dim) float32, or None if it is
        unbounded.
        """
        total = row_limit(self.sparse.module)
        if total is None:
            return None
        rows = torch.empty(total, self.sparse.spec.size)
        for keys in self._chunks(total):
            rows[keys] = self.pull_rows(keys)
        if self.sparse.zeros is not None:
            rows[self.sparse.zeros] = 0.0
        return rows

    def initial(self) -> Iterator[list[Request]]:
        """Yield requests with the module's own weights, or nothing for an unbounded table."""
        if row_limit(self.sparse.module) is not None:
            yield from self.assigned(self.sparse.module.weight.detach().float().cpu(), INITIAL)

    def assigned(self, weight: Tensor, number: int) -> Iterator[list[Request]]:
        """Yield requests with the rows of a weight, some at a time. `number` is INITIAL or LOADED."""
        for keys in self._chunks(len(weight)):
            assigned: list[list[Part]] = [[] for _ in range(self.group.servers)]
            rows = self.group.placed(self.place, keys, weight[keys])
            self.group.add_push(assigned, rows, 0.0, row_dtype=torch.float32)
            yield [
                Request(server=server, kind=Kind.ASSIGN, number=number, parts=tuple(parts))
                for server, parts in enumerate(assigned)
                if parts
            ]

    def _chunks(self, total: int) -> Iterator[Tensor]:
        rows = max(1, _CHUNK_BYTES // (4 * self.sparse.spec.size))
        for start in range(0, total, rows):
            yield torch.arange(start, min(start + rows, total))


class TableGroup:
    """A group of tables. `as_of` is the current step of this trainer, and `late` is the age in steps that
    prepared rows may have. `row_dtype` is the type in which gradients are sent.
    """

    together: ClassVar[bool] = True  # `send` accepts requests of other groups too

    def __init__(
        self,
        sparse: Sequence[SparseParameter],
        servers: int,
        client: Client,
        *,
        row_dtype: torch.dtype = torch.float32,
        late: int = 0,
        staging_for: Callable[[torch.device], Staging | None] = staging_of,
    ) -> None:
        self.tables = [RemoteTable(self, place, each) for place, each in enumerate(sparse)]
        self.remote = self
        """The same tables on the servers."""
        self.servers, self.client, self.row_dtype = servers, client, row_dtype
        self.as_of = 0
        self.late = late
        self.first, self.size, self.dim = sparse[0].table, len(sparse), sparse[0].spec.size
        places = [holders(each.spec, servers) for each in sparse]
        self._holders = np.array([server for place in places for server in place], np.int64)
        self._shares = np.cumsum([0, *map(len, places)])
        self._held = np.array([[server in place for place in places] for server in range(servers)])
        """True if a server has rows of a table, (servers, tables) bool."""
        modules = [each.module for each in sparse]
        paddings = [module.padding_idx for module in modules]
        limits = [each.limit for each in sparse]
        self._padding = np.array([-1 if each is None else each for each in paddings], np.int64)
        self._padded = np.array([each is not None for each in paddings])
        self._limits = np.array([-1 if each is None else each for each in limits], np.int64)
        self._checks = bool(self._padded.any() or (self._limits >= 0).any())
        self.without_padding = np.array([each.zeros is not None for each in sparse])
        self._counted = sparse[0].spec.rows.entry.kind is EntryKind.COUNT
        devices = [device_of(each) for each in modules]
        self.staging = staging_for(devices[0])
        """The staging of the device of the group's modules, or None on the CPU."""
        self.embeds = [
            embeds(each.module) and not each.spec.rows.statistics and device == devices[0]
            for each, device in zip(sparse, devices, strict=True)
        ]
        """For each table, True if `embed` may call its module."""
        self.pools = [
            pools(each.module) and self.staging is None and not each.spec.rows.statistics for each in sparse
        ]
        """For each table, True if `pool` may call its module."""
        self.weights = [weight_of(module) for module in modules]
        self.prepared: list[Batch] = []
        self.anchor = torch.empty(0, requires_grad=True)
        """A tensor on which all outputs depend, for autograd."""
        self.collected = Gradients(
            self.weights,
            [each.name for each in sparse],
            np.array([row_limit(module) is not None for module in modules]),
            self.staging,
            trained=self.trained,
            everything=leaf_of(self.anchor),
        )
        self.requested = np.zeros((servers, len(sparse)), np.int64)
        """The number of requested rows, (servers, tables) int64."""

    # ---- Rows.

    def prepare(
        self, calls: Mapping[int, Sequence[Tensor]], jagged: Iterable[Batch] = ()
    ) -> list[RowRequest]:
        """Prepare an upcoming batch: for each table the ids of its calls, and batches of collections."""
        for each in self.prepared:
            each.age += 1
        most = max(_MAX_AHEAD, self.late + 1)
        self.prepared = [each for each in self.prepared if each.age <= most]  # the others were never used
        made = [
            Batch(self, [(table, ids) for table in tables for ids in calls[table]], insert=insert)
            for insert, tables in self._fitting(calls)
        ]
        made += jagged
        made = [each for each in made if (each.outside < 0).all()]  # its calls will raise the error
        self.prepared += made
        return [each.request for each in made]

    def _fitting(self, calls: Mapping[int, Sequence[Tensor]]) -> Iterator[tuple[bool, list[int]]]:
        """Yield the tables in training, according to their last calls, and then the others. A group has at
        most the rows of one message.
        """
        training = {table: self.tables[table].trains for table in sorted(calls)}
        for insert in (True, False):
            some: list[int] = []
            size = 0
            for table in (table for table, mode in training.items() if mode is insert):
                more = 4 * self.dim * sum(ids.numel() for ids in calls[table])
                if some and size + more > MAX_FRAME_BYTES:
                    yield insert, some
                    some, size = [], 0
                some.append(table)
                size += more
            if some:
                yield insert, some

    def request(self, keys: Keys, spans: Spans, *, insert: bool) -> RowRequest:
        """Return a request for these keys, which are ordered by server and table."""
        counted, requested = self._counted, self.requested
        return RowRequest(
            self.first, self.dim, keys, spans, insert=insert, counted=counted, requested=requested
        )

    def send(self, requests: Sequence[RowRequest]) -> None:
        """Send the requests now, without a push."""
        send_row_requests(self.client, self.servers, requests, self.as_of)

    def drop_prepared(self) -> None:
        """Drop the prepared batches, so their rows are fetched again."""
        self.prepared.clear()

    def unsent(self) -> list[RowRequest]:
        """Return the row requests of prepared batches that have not been sent."""
        return [each.request for each in self.prepared if each.request.as_of is None]

    def look_up(self, table: int, ids: Tensor, *, insert: bool) -> tuple[Lookup, Tensor]:
        """Return the keys of a call and their rows, (u, dim) float32."""
        call = self._call(table, ids, insert=insert)
        return call.batch.lookup(call), call.batch.rows_of(call)

    def call(self, table: int, ids: Tensor) -> Call:
        """Return the call of these ids in training, with its rows requested."""
        return self._call(table, ids, insert=True)

    def _call(self, table: int, ids: Tensor, *, insert: bool) -> Call:
        """Return the call, prepared or new. Raises IndexError for an id out of range."""
        self.tables[table].trains = insert
        call = self._take_prepared(table, ids)
        if call is not None:
            request = call.batch.request
            late = request.as_of is None or self.as_of - request.as_of > self.late
            if not late and request.insert is insert:
                return call
        # The row request was never sent, is too old, or was for another mode of the module.
        (call,) = Batch(self, [(table, ids)], insert=insert).calls.pop(table)
        call.batch.check(call)
        self.send([call.batch.request])
        return call

    def _take_prepared(self, table: int, ids: Tensor) -> Call | None:
        """Return the call that was prepared with this tensor, unless the tensor has changed since."""
        for batch in self.prepared:
            calls = batch.calls.get(table, [])
            for number, call in enumerate(calls):
                if same_ids(call.ids, ids) and call.version == version_of(ids):
                    del calls[number]
                    return call
        return None

    def unrequested(self, padding: Keys) -> Keys:
        """Return the places of padding keys to leave out of a request, because an entry that counts would
        give them rows.
        """
        return np.where(self._counted & self.without_padding, padding, -1)

    def arranged(self, keys: Keys, ends: Keys, skipped: Keys | None = None) -> tuple[Keys, Spans, Keys]:
        """Return the position of each key, the spans of each server, and the ordered keys. See
        `arrange_run`.
        """
        moved, sent = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
        spans = np.zeros((self.servers, self.size), np.int64)
        if skipped is None:
            skipped = np.full(self.size, -1)
        arrange_run(keys, ends, skipped, self._holders, self._shares, moved, spans, sent)
        return moved, spans, sent[: spans.sum()]

    def arranged_alone(self, table: int, keys: Tensor) -> tuple[Keys, Spans, Keys]:
        """Arrange keys of one table."""
        ends = np.zeros(self.size + 1, np.int64)
        ends[table + 1 :] = len(keys)
        return self.arranged(array_of(keys), ends)

    def find(self, keys: Keys, ends: Keys) -> tuple[Keys, Keys]:
        """Return for each table the place of its padding key and of a key out of range, or -1."""
        padding, outside = np.full(self.size, -1), np.full(self.size, -1)
        if self._checks:
            find_run(keys, ends, self._padding, self._padded, self._limits, padding, outside)
        return padding, outside

    def refuse(self, table: int, key: int, where: str = "") -> None:
        sparse = self.tables[table].sparse
        raise IndexError(
            f"Embedding {sparse.name!r} has rows 0 to {self._limits[table] - 1}, but was given the id "
            f"{key}{where}"
        )

    # ---- Gradients.

    @property
    def trained(self) -> bool:
        return self.tables[0].sparse.trained

    def concerns(self, weights: Container[int] | None) -> bool:
        """Return True if any of these weights belongs to a table here. None means the weights of all
        optimizers.
        """
        return self.trained if weights is None else any(id(weight) in weights for weight in self.weights)

    def add_stats(self, table: int, keys: Tensor, stats: Tensor) -> None:
        """Keep shows and clicks for the next push, which sends them for keys with a gradient."""
        if self.trained:
            self.collected.stats.append((table, keys, stats))

    def drop_gradients(self, *, set_to_none: bool = True) -> None:
        """Forget all gradients. See `Gradients.clear`."""
        self.collected.clear(self.dim, set_to_none=set_to_none)

    def away(self) -> list[Collected]:
        """Return the gradients that were collected on a device."""
        return [each for each in self.collected.batches if each.there is not None]

    def take_gradients(self) -> GroupGradient | None:
        """Return the merged gradient since the last `drop_gradients`, or None if no backward pass has reached
        the group. As in torch, the gradient stays until then, and a later backward pass adds to it.
        """
        if not self.trained or not self.collected.tables:
            return None
        begin_fetch([self])
        collected = self.collected
        batches = [each.gradient(self._held) for each in collected.batches if each.whole or each.reached]
        pieces = [*collected.pieces, *collected.own_pieces()]
        found = [*batches, *(self._of_table(piece) for piece in pieces)]
        in_order = len(found) == 1 and (batches or self.servers == 1)
        gradient = found[0] if in_order else self.merged(found)
        if maximizes(self.tables[0].sparse.group):
            gradient.rows = gradient.rows.neg()
        if collected.stats:
            gradient.stats = self._stats(gradient, [self._of_table(piece) for piece in collected.stats])
            collected.stats = []
        return gradient

    def placed(self, table: int, keys: Tensor, rows: Tensor) -> GroupGradient:
        """Return rows of one table, with distinct keys, ordered by server."""
        moved, placed, sent = self.arranged_alone(table, keys)
        spans = np.full_like(placed, NOT_IN)
        spans[:, table] = placed[:, table]
        spans[~self._held] = NOT_IN
        if self.servers > 1:
            rows = rows.index_select(0, torch.from_numpy(np.argsort(moved)))
        return GroupGradient(spans, torch.from_numpy(sent), rows)

    def _of_table(self, piece: Piece) -> GroupGradient:
        """Return a gradient of one table whose keys are not ordered, as if all were on the first server."""
        table, keys, rows = piece
        spans = np.full((1, self.size), NOT_IN)
        spans[0, table] = len(keys)
        return GroupGradient(spans, keys, rows)

    def merged(self, gradients: Sequence[GroupGradient], steps: int = 1) -> GroupGradient:
        """Return the sum of the gradients, in this order, divided by `steps`."""
        spans, keys, rows = merged_rows(gradients, [each.rows for each in gradients])
        counted = [each for each in gradients if each.stats is not None]
        stats = None
        if counted:
            stats = merged_rows(counted, [each.stats for each in counted if each.stats is not None])[2]
        if steps > 1:
            rows.div_(steps)
        moved, placed, sent = self.arranged(array_of(keys), starts_of(spans))
        order = torch.from_numpy(np.argsort(moved))
        if self.servers > 1:
            rows = rows.index_select(0, order)
            stats = None if stats is None else stats.index_select(0, order)
        placed[:, spans == NOT_IN] = NOT_IN
        placed[~self._held] = NOT_IN
        return GroupGradient(placed, torch.from_numpy(sent), rows, stats)

    def _stats(self, gradient: GroupGradient, pieces: Sequence[GroupGradient]) -> Tensor:
        """Return shows and clicks of the keys of the gradient, (n, 2) float32."""
        found = []
        for spans, some in gradient.on_servers():
            keys = gradient.keys[some]
            first = GroupGradient(spans[None], keys, torch.zeros(len(keys), 2))
            every = [first, *pieces]
            known, _, stats = merged_rows(every, [each.rows for each in every])
            # The keys of the gradient come first in each table.
            before = np.repeat(starts_of(known)[:-1] - starts_of(spans)[:-1], np.maximum(spans, 0))
            found.append(stats[torch.from_numpy(before + np.arange(len(keys)))])
        return torch.cat(found)

    def add_push(
        self,
        push: Sequence[list[Part]],
        gradient: GroupGradient,
        lr: float | None = None,
        *,
        row_dtype: torch.dtype | None = None,
    ) -> None:
        """Append a gradient to each server's push, even to servers without a key, because their step count
        must advance too. `lr` and `row_dtype` replace the current learning rate and the group's type.
        """
        rate = self.tables[0].sparse.lr if lr is None else lr
        rows = gradient.rows.to(row_dtype or self.row_dtype).contiguous()
        for parts, (spans, some) in zip(push, gradient.on_servers(), strict=True):
            stats = None if gradient.stats is None else gradient.stats[some]
            self._add(parts, spans, gradient.keys[some], rows[some], rate, stats)

    def _add(
        self,
        parts: list[Part],
        spans: Spans,
        keys: Tensor,
        rows: Tensor,
        lr: float,
        stats: Tensor | None,
    ) -> None:
        starts = starts_of(spans)
        for first, last in self._messages(spans):
            table, some = self.first + first, slice(starts[first], starts[last])
            if last - first > 1:
                parts.append(Part(table, Field.SPANS, torch.from_numpy(spans[first:last])))
            parts.append(Part(table, Field.KEYS, keys[some]))
            parts.append(Part(table, Field.ROWS, rows[some], lr))
            if stats is not None:
                parts.append(Part(table, Field.STATS, stats[some]))

    def _messages(self, spans: Spans) -> Iterator[tuple[int, int]]:
        """Yield ranges of tables [first, last) whose rows fit into one part."""
        most = MAX_FRAME_BYTES // (4 * self.dim)
        known = np.flatnonzero(spans != NOT_IN)
        if not len(known):
            return
        first, end, total = int(known[0]), int(known[-1]) + 1, 0
        if np.maximum(spans, 0).sum() > most:
            for table, span in enumerate(spans[first:end].tolist(), first):
                if total and total + span > most:
                    yield first, table
                    first, total = table, 0
                total += max(0, span)
        yield first, end


def begin_fetch(groups: Sequence[TableGroup]) -> None:
    """Start to copy the gradients of these groups from devices to this process, all of a device together."""
    away: dict[Staging, list[Collected]] = {}
    for group in groups:
        if group.staging is not None:
            away.setdefault(group.staging, []).extend(group.away())
    for staging, some in away.items():
        if some:
            begin_copy(some, staging)


def grouped(sparse: Sequence[SparseParameter]) -> list[list[SparseParameter]]:
    """Return the tables of a model in groups, in the order of their numbers."""
    return [list(some) for _, some in groupby(sparse, key=lambda each: each.alike)]
