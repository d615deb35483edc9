"""Training in the trainer's own process: rows and dense values between two exchanges of geo training, and
dense parameters that no server holds, by all-reduce.

In geo training the changes that a trainer sends are divided by the number of trainers, as in Paddle's
GeoCommunicator: servers add them up, so values move by the average change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from trainers.collective.group import start as join_group
from trainers.ps.client import Client
from trainers.ps.kernels.rows import pull
from trainers.ps.tables.rules import AnyRule, Fixed
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import RowOptions, TableKind, TableSpec
from trainers.ps.trainer.embedding import RowSource
from trainers.ps.trainer.exchange import Batches, DenseParameters, Exchange
from trainers.ps.trainer.group import RemoteTable
from trainers.ps.trainer.remote import (
    Lookup,
    RowRequest,
    SentRequests,
    add_row_requests,
    push_requests,
    send_row_requests,
)
from trainers.ps.wire import Part
from trainers.roles.identity import Identity


class _CacheTable(SparseTable):
    """A table that reports missing keys."""

    def known(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, dim) values, and the positions of the keys that have none, (m,) int64."""
        wanted = self._array(keys)
        out = np.empty((len(wanted), self.spec.size), np.float32)
        missing = np.empty(len(wanted), np.int64)
        count = pull(self._storage.index, self._storage.rows, wanted, out, missing)
        return torch.from_numpy(out), torch.from_numpy(missing[:count])

    def everything(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys (n,) and values (n, dim); copies."""
        with self.cut() as cut:
            rows = cut.read(0, cut.rows)
        return rows.keys, rows.values


class Cache:
    """The rows of one table that a trainer keeps and trains itself, and their values at the last exchange.
    `rule` and `rows` are those of training.
    """

    def __init__(self, name: str, dim: int, rule: AnyRule, rows: RowOptions) -> None:
        bounds = RowOptions(low=rows.low, high=rows.high)
        self._table = _CacheTable(
            TableSpec(kind=TableKind.SPARSE, name=name, size=dim, rule=rule, rows=bounds)
        )
        self._touched_spec = TableSpec(kind=TableKind.SPARSE, name=name, size=dim, rule=Fixed())
        self._touched = _CacheTable(self._touched_spec)

    def known(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, dim) values, and the positions of the keys that are not cached."""
        return self._table.known(keys)

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Rows that came from the servers."""
        self._table.assign(keys, values)

    def train(self, keys: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        """One update; the former values of rows that change for the first time since the last exchange are
        kept.
        """
        _, first = self._touched.known(keys)
        if len(first):
            new = keys[first]
            self._touched.assign(new, self._table.pull(new, insert=False))
        self._table.check(keys, grad)
        self._table.apply(keys, grad, lr)

    def changes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys that were trained since the last call, and by how much their values have changed."""
        keys, before = self._touched.everything()
        self._touched = _CacheTable(self._touched_spec)
        return keys, self._table.pull(keys, insert=False) - before

    def keys(self) -> torch.Tensor:
        """(n,) int64 of all cached rows."""
        return self._table.everything()[0]

    def revise(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The servers' values of cached rows."""
        self._table.revise(keys, values)


_MAX_VALUES = 1 << 24
"""Values of rows in one message: 64 MB."""
_ANY_STEP = 0
"""The step whose rows are requested: here rows wait for no trainer, whatever max_staleness says."""
_ADD = -1.0
"""Servers add what they get: SGD with this learning rate."""


class CachedRows(RowSource):
    """A table as a forward pass sees it in geo training."""

    def __init__(self, remote: RemoteTable) -> None:
        self.remote = remote
        sparse = remote.sparse
        self.cache = Cache(sparse.name, sparse.spec.size, sparse.rule, sparse.spec.rows)
        self._requested: RowRequest | None = None

    def prepare(self, batches: Sequence[torch.Tensor]) -> RowRequest | None:
        """A request for the rows of a training batch that are not cached, if there are any."""
        self._settle()
        request = self.remote.prepare(batches)
        _, missing = self.cache.known(request.keys)
        if not request.insert or not len(missing):
            return None
        self._requested = self.remote.inserting(request.keys[missing])
        return self._requested

    def _settle(self) -> None:
        """Cache the rows that were requested in advance."""
        if self._requested is not None:
            requested, self._requested = self._requested, None
            self.cache.add(requested.keys, requested.rows)

    def renew(self) -> None:
        """The servers' values of all cached rows, which keep their optimizer state."""
        self._settle()
        keys = self.cache.keys()
        most = max(1, _MAX_VALUES // self.remote.sparse.spec.size)
        for start in range(0, len(keys), most):
            some = keys[start : start + most]
            self.cache.revise(some, self.remote.pull_rows(some, insert=True))

    def look_up(self, ids: torch.Tensor, *, insert: bool) -> tuple[Lookup, torch.Tensor]:
        lookup = self.remote.lookup(ids)
        if not insert:  # evaluation: other trainers' updates of cached rows count too
            return lookup, self.remote.pull_rows(lookup.keys, insert=False)
        rows, missing = self.cache.known(lookup.keys)
        if len(missing) and self._requested is not None:
            self._settle()
            rows, missing = self.cache.known(lookup.keys)
        if len(missing):
            keys = lookup.keys[missing]
            rows[missing] = pulled = self.remote.pull_rows(keys, insert=True)
            self.cache.add(keys, pulled)
        return lookup, rows

    def pull_all(self) -> torch.Tensor | None:
        return self.remote.pull_all()

    def add_gradient(self, keys: torch.Tensor, grad: torch.Tensor) -> None:
        self.remote.add_gradient(keys, grad)

    def add_stats(self, keys: torch.Tensor, stats: torch.Tensor) -> None:
        raise AssertionError("statistics in geo training should have been refused")


class GeoExchange:
    """Geo training: trainers train on their own rows and dense values, and exchange the changes every k
    steps. `local_step` trains the dense parameters.
    """

    def __init__(
        self,
        client: Client,
        dense: DenseParameters,
        tables: Sequence[CachedRows],
        servers: int,
        *,
        k_steps: int,
        trainers: int,
        local_step: Callable[[], None],
    ) -> None:
        self._client = client
        self._dense = dense
        self._tables = tables
        self._servers = servers
        self._k_steps = k_steps
        self._trainers = trainers
        self._local_step = local_step
        self._before: dict[str, torch.Tensor] = {}
        self._local_steps = 0
        self.step = 0
        self.ahead = 1

    def start(self, step: int) -> None:
        self.step = step

    def push(self) -> None:
        """Train locally; exchange after every k-th step."""
        if not self._before:
            self._before = self._dense.values()
        for table in self._tables:
            gradient = table.remote.group.take_gradients()
            if gradient is not None:
                table.cache.train(gradient.keys, gradient.rows, table.remote.sparse.lr)
        self._local_step()
        self._local_steps += 1
        self.step += 1
        if self._local_steps >= self._k_steps:
            self.flush()

    def prefetch(self, batches: Batches) -> None:
        cached = {table.remote: table for table in self._tables}
        requests = [cached[remote].prepare(ids) for remote, ids in batches.items()]
        send_row_requests(
            self._client, self._servers, [each for each in requests if each is not None], _ANY_STEP
        )

    def refresh(self) -> None:
        """Changes since the last exchange are exchanged first."""
        self.flush()
        pulls = self._dense.pulls(self.step, trained_only=True)
        self._dense.take(SentRequests(self._client, pulls, [], self.step).wait())
        self._before = {}

    def renew(self) -> None:
        self._before = {}
        for table in self._tables:
            table.renew()

    def flush(self) -> None:
        """Send all changes, and continue from the servers' values. They go in one message to each server,
        which applies all of it and counts the steps, or nothing: a trainer that dies here repeats its steps.
        Rows that do not fit are sent before that, and count as the first of the steps.
        """
        if not self._local_steps:
            return
        first, self._local_steps = self.step - self._local_steps, 0
        last = []
        for table in self._tables:
            keys, changes = table.cache.changes()
            most = max(1, _MAX_VALUES // len(self._tables) // changes.shape[1])
            for start in range(most, len(keys), most):
                stop = start + most
                self._exchange([(table, keys[start:stop], changes[start:stop])], first)
            last.append((table, keys[:most], changes[:most]))
        values = self._dense.values()
        dense = {name: (value - self._before[name]) / self._trainers for name, value in values.items()}
        self._exchange(last, self.step - 1, dense)
        self._before = {}

    def _exchange(
        self,
        rows: Sequence[tuple[CachedRows, torch.Tensor, torch.Tensor]],
        number: int,
        dense: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Push (table, keys, changes) and the changes of dense parameters as step `number`, and take the
        servers' values of the same.
        """
        push: list[list[Part]] = [[] for _ in range(self._servers)]
        if dense is not None:
            self._dense.add_push(push, dense, lr=_ADD)
        requests: list[tuple[CachedRows, RowRequest]] = []
        for table, keys, changes in rows:
            if len(keys):
                group = table.remote.group
                sent = group.placed(table.remote.place, keys, changes / self._trainers)
                group.add_push(push, sent, lr=_ADD)
                requests.append((table, table.remote.row_request(sent.keys, sent.cuts, insert=True)))
        if dense is not None:
            for parts, wants in zip(push, self._dense.trained_wants, strict=True):
                parts += wants
        asked = [request for _, request in requests]
        add_row_requests(push, asked)
        self._dense.take(SentRequests(self._client, push_requests(push, number), asked, self.step).wait())
        for table, request in requests:
            table.cache.revise(request.keys, request.rows)


class AllReduced:
    """Dense parameters that no server holds: their gradients are averaged by all-reduce, and each trainer
    updates its copy. So all trainers step together, whatever the servers do. Sparse tables belong to the
    wrapped exchange.
    """

    def __init__(
        self,
        exchange: Exchange,
        identity: Identity,
        parameters: Sequence[torch.nn.Parameter],
        buffers: Sequence[torch.Tensor],
        local_step: Callable[[], None],
    ) -> None:
        self._exchange = exchange
        self._parameters = parameters
        self._buffers = buffers
        self._local_step = local_step
        join_group(identity)
        self._take_first()

    def _take_first(self) -> None:
        """Trainer 0's values."""
        for tensor in (*self._parameters, *self._buffers):
            dist.broadcast(tensor.data, src=0)

    @property
    def step(self) -> int:
        return self._exchange.step

    @property
    def ahead(self) -> int:
        return self._exchange.ahead

    def start(self, step: int) -> None:
        self._exchange.start(step)

    def push(self) -> None:
        self._average()
        self._exchange.push()
        self._local_step()

    def prefetch(self, batches: Batches) -> None:
        self._exchange.prefetch(batches)

    def refresh(self) -> None:
        self._exchange.refresh()

    def flush(self) -> None:
        self._exchange.flush()

    def renew(self) -> None:
        self._take_first()
        self._exchange.renew()

    def _average(self) -> None:
        """One all-reduce over all gradients; a missing gradient counts as zero."""
        if not self._parameters:
            return
        flat = torch.cat(
            [
                torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1).cpu()
                for parameter in self._parameters
            ]
        )
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        start = 0
        for parameter in self._parameters:
            stop = start + parameter.numel()
            averaged = flat[start:stop].view_as(parameter).to(parameter.device)
            if parameter.grad is None:
                parameter.grad = averaged.clone()
            else:
                parameter.grad.copy_(averaged)
            start = stop
