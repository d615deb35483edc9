"""Train in the trainer's own process: rows and dense values between two exchanges of geo training, and dense
parameters that no server holds, by all-reduce.

In geo training, the changes that a trainer sends are divided by the number of trainers, as in Paddle's
GeoCommunicator. Servers add them up, so values move by the average change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fleetrun.aliases import Callback
from fleetrun.frozen import frozen
from trainers.collective.averaging import PendingAverage
from trainers.collective.group import anyone, cpu_group, group_of
from trainers.collective.group import start as join_group
from trainers.kernels.compiled import Floats, Keys
from trainers.ps.client import Client
from trainers.ps.kernels.batch import array_of
from trainers.ps.kernels.runs import COLUMNS, pull_run, revise_run
from trainers.ps.tables.rules import AnyRule, Fixed
from trainers.ps.tables.run import NOT_IN, Spans, SparseRun, positions_of, starts_of
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import RowOptions, TableKind, TableSpec
from trainers.ps.trainer.exchange import Batches, DenseParameters, Exchange, by_group
from trainers.ps.trainer.gradient import GroupGradient
from trainers.ps.trainer.group import TableGroup
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.trainer.remote import (
    RowRequest,
    SentRequests,
    add_row_requests,
    push_requests,
    send_row_requests,
)
from trainers.ps.wire import Part
from trainers.roles.identity import Identity


@frozen
class LocalTraining:
    """The parts of training in this process. `step` is the optimizer's own step. `dense` holds the parameters
    that no server holds. `buffers` are other tensors that must start equal on all trainers.
    """

    step: Callback
    dense: Sequence[Parameter] = ()
    buffers: Sequence[Tensor] = ()


class _Rows(SparseRun):
    """Tables of this process."""

    def known(self, spans: Spans, keys: Tensor) -> tuple[Tensor, Spans, Tensor]:
        """Return (n, dim) values. Also return how many keys of each table have no row, and the positions of
        these keys, (m,) int64.
        """
        out, missing, counts = self._find(spans, keys)
        return (
            torch.from_numpy(out),
            counts,
            torch.from_numpy(positions_of(starts_of(spans), missing, counts)),
        )

    def _find(self, spans: Spans, keys: Tensor) -> tuple[Floats, Keys, Keys]:
        starts, wanted = starts_of(spans), array_of(keys)
        out = np.empty((len(wanted), self.size), np.float32)
        missing, counts = np.empty(len(wanted), np.int64), np.zeros(len(spans), np.int64)
        pull_run(self._run.lines, starts, wanted, out, missing, counts)
        return out, missing, counts

    def assign(self, spans: Spans, keys: Tensor, values: Tensor) -> None:
        """Insert rows, or overwrite their values. The optimizer state stays."""
        starts, wanted = starts_of(spans), array_of(keys)
        self._insert(starts, wanted, *self._find(spans, keys)[1:])
        revise_run(self._run.lines, starts, wanted, array_of(values))

    def everything(self) -> tuple[Spans, Tensor, Tensor]:
        """Return copies of all keys (n,), in the order of the tables, and of their values (n, dim)."""
        found = []
        for table in self._tables:
            with table.cut() as cut:
                found.append(cut.read(0, cut.rows))
        spans = np.array([len(each.keys) for each in found], np.int64)
        return spans, torch.cat([each.keys for each in found]), torch.cat([each.values for each in found])


def _rows(specs: Sequence[TableSpec]) -> _Rows:
    lines = np.zeros((len(specs), COLUMNS), np.int64)
    tables = [SparseTable(spec) for spec in specs]
    for table, line in zip(tables, lines, strict=True):
        table.publish(line)
    return _Rows(tables, lines)


class Cache:
    """The rows of a group of tables that a trainer keeps and trains itself, and their values at the last
    exchange. `spans` (tables,) holds the number of keys of each table. Keys are in the order of the tables.
    """

    def __init__(self, tables: Sequence[SparseParameter]) -> None:
        def spec(of: SparseParameter, rule: AnyRule, rows: RowOptions) -> TableSpec:
            return TableSpec(kind=TableKind.SPARSE, name=of.name, size=of.spec.size, rule=rule, rows=rows)

        bounds = [RowOptions(low=each.spec.rows.low, high=each.spec.rows.high) for each in tables]
        self._trained = _rows(
            [spec(each, each.rule, rows) for each, rows in zip(tables, bounds, strict=True)]
        )
        self._touched_specs = [spec(each, Fixed(), RowOptions()) for each in tables]
        self._touched = _rows(self._touched_specs)

    def known(self, spans: Spans, keys: Tensor) -> tuple[Tensor, Spans, Tensor]:
        """Return (n, dim) values. Also return how many keys of each table are not cached, and their
        positions.
        """
        return self._trained.known(spans, keys)

    def assign(self, spans: Spans, keys: Tensor, values: Tensor) -> None:
        """Store the servers' values. Cached rows keep their optimizer state."""
        self._trained.assign(spans, keys, values)

    def train(self, spans: Spans, keys: Tensor, grad: Tensor, lr: float) -> None:
        """Make one update. Keep the former values of rows that change for the first time since the last
        exchange. A span may be NOT_IN.
        """
        _, counts, first = self._touched.known(spans, keys)
        if len(first):
            new = keys[first]
            self._touched.assign(counts, new, self._trained.pull(counts, new, insert=False))
        self._trained.check(spans, keys, grad)
        self._trained.apply(spans, keys, grad, lr)

    def changes(self) -> tuple[Spans, Tensor, Tensor]:
        """Return the keys that were trained since the last call, and by how much their values have
        changed.
        """
        spans, keys, before = self._touched.everything()
        self._touched = _rows(self._touched_specs)
        return spans, keys, self._trained.pull(spans, keys, insert=False) - before

    def keys(self) -> tuple[Spans, Tensor]:
        """Return the spans and keys, (n,) int64, of all cached rows."""
        return self._trained.everything()[:2]


_MAX_VALUES = 1 << 24
"""The most values of rows in one message: 64 MB."""
_ANY_STEP = 0
"""The step whose rows are requested. Rows wait for no trainer here, despite max_staleness."""
_ADD = -1.0
"""The learning rate of SGD with which servers add the changes that they receive."""


class _CachedRequest(RowRequest):
    """A request for the rows of a batch that the cache lacks. In evaluation, all rows are requested, because
    other trainers' updates of cached rows count too.
    """

    def __init__(self, group: CachedGroup, keys: Keys, spans: Spans, *, insert: bool) -> None:
        counts, wanted = spans, keys
        if insert:
            counts, missing = group.not_cached(spans, torch.from_numpy(keys))
            wanted = keys[missing.numpy()]
        remote = group.remote
        self._moved, placed, sent = remote.arranged(wanted, starts_of(counts))
        super().__init__(remote.first, remote.dim, sent, placed, insert=insert, requested=remote.requested)
        self._group = group
        self._batch = spans, torch.from_numpy(keys)
        self._wanted = counts, torch.from_numpy(wanted)
        if not len(sent):
            self.as_of = _ANY_STEP

    @property
    def rows(self) -> Tensor:
        """The rows of the batch."""
        if not self.insert:
            return super().rows[self._moved]
        self.settle()
        return self._group.cache.known(*self._batch)[0]

    def settle(self) -> None:
        """Cache the rows that were requested."""
        counts, keys = self._wanted
        if len(keys):
            rows = super().rows[self._moved]
            self._wanted = np.zeros_like(counts), keys[:0]
            self._group.cache.assign(counts, keys, rows)


class CachedGroup(TableGroup):
    """The tables of a group in geo training. Rows are in this process, as if one server existed."""

    together = False

    def __init__(self, remote: TableGroup) -> None:
        sparse = [table.sparse for table in remote.tables]
        super().__init__(sparse, 1, remote.client, staging_for=lambda device: remote.staging)
        self.remote, self.cache = remote, Cache(sparse)
        self._requested: list[_CachedRequest] = []

    def request(self, keys: Keys, spans: Spans, *, insert: bool) -> RowRequest:
        return _CachedRequest(self, keys, spans[0], insert=insert)

    def send(self, requests: Sequence[RowRequest]) -> None:
        some = [each for each in requests if each.as_of is None]
        send_row_requests(self.client, self.remote.servers, some, _ANY_STEP)
        self._requested += [each for each in some if isinstance(each, _CachedRequest) and each.insert]

    def not_cached(self, spans: Spans, keys: Tensor) -> tuple[Spans, Tensor]:
        """Return the number of uncached keys of each table, and their positions."""
        _, counts, missing = self.cache.known(spans, keys)
        if len(missing) and self._requested:
            requested, self._requested = self._requested, []
            for each in requested:
                each.settle()
            _, counts, missing = self.cache.known(spans, keys)
        return counts, missing

    def train(self) -> None:
        """Train with the gradient of a step."""
        gradient = self.take_gradients()
        if gradient is not None:
            self.cache.train(gradient.spans[0], gradient.keys, gradient.rows, self.tables[0].sparse.lr)

    def renew(self) -> None:
        """Take the servers' values of all cached rows, which keep their optimizer state."""
        self.drop_prepared()
        self._requested = []
        spans, keys = self.cache.keys()
        most = max(1, _MAX_VALUES // self.dim)
        for start in range(0, len(keys), most):
            counts, some = _part(spans, start, start + most), keys[start : start + most]
            request = _CachedRequest(self, array_of(some), counts, insert=False)
            self.send([request])
            self.cache.assign(counts, some, request.rows)


def _part(spans: Spans, start: int, stop: int) -> Spans:
    """Return how many of the keys [start, stop) each table has."""
    starts: Spans = np.clip(starts_of(spans), start, stop)
    return starts[1:] - starts[:-1]


class GeoExchange(Exchange):
    """Geo training: trainers train their own rows and dense values, and exchange the changes every k steps.
    `local_step` trains the dense parameters.
    """

    def __init__(
        self,
        client: Client,
        dense: DenseParameters,
        groups: Sequence[CachedGroup],
        servers: int,
        *,
        k_steps: int,
        trainers: int,
        local_step: Callback,
    ) -> None:
        super().__init__(client, dense, [], servers)
        self._cached = groups
        self._k_steps = k_steps
        self._trainers = trainers
        self._local_step = local_step
        self._local_steps = 0

    def push(self, *, overflow: bool = False) -> None:
        """Train locally, and exchange after every k-th step."""
        if not overflow:
            for group in self._cached:
                group.train()
            self._local_step()
        self._local_steps += 1
        self.step += 1
        if self._local_steps >= self._k_steps:
            self.flush()

    def prefetch(self, batches: Batches, *, now: bool = False) -> None:
        """Prefetch rows, except in evaluation. There, calls request rows after the changes have been sent."""
        for group, calls in by_group(batches).items():
            group.send([each for each in group.prepare(*calls) if each.insert])

    def renew(self) -> None:
        for group in self._cached:
            group.renew()

    def flush(self) -> None:
        """Send all changes, and continue from the servers' values. The changes go in one message to each
        server, which applies all of it and counts the steps, or nothing. A trainer that dies here therefore
        repeats its steps.

        Rows that do not fit are sent before, and count as the first of the steps. Values that the script has
        written into dense parameters are part of the changes, also without a step.
        """
        self._dense.notice()
        changes = {name: change / self._trainers for name, change in self._dense.changes().items()}
        if not self._local_steps and not any(change.any() for change in changes.values()):
            self._dense.send_written(self._client)
            return
        number = self.step - bool(self._local_steps)
        first, self._local_steps = self.step - self._local_steps, 0
        last = []
        for group in self._cached:
            spans, keys, moved = group.cache.changes()
            most = max(1, _MAX_VALUES // len(self._cached) // group.dim)
            parts = [
                (group, _part(spans, start, start + most), keys[some], moved[some])
                for start in range(0, max(1, len(keys)), most)
                for some in [slice(start, start + most)]
            ]
            for part in parts[1:]:
                self._exchange([part], first)
            last.append(parts[0])
        self._exchange(last, number, changes)

    def _exchange(
        self,
        rows: Sequence[tuple[CachedGroup, Spans, Tensor, Tensor]],
        number: int,
        dense: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Push (group, spans, keys, changes) and the changes of dense parameters as step `number`. Take the
        servers' values of the same rows and parameters.
        """
        push: list[list[Part]] = [[] for _ in range(self._servers)]
        if dense is not None:
            self._dense.add_written(push)
            self._dense.add_push(push, dense, lr=_ADD)
        requests: list[tuple[CachedGroup, GroupGradient, RowRequest]] = []
        for group, spans, keys, changes in rows:
            if len(keys):
                those = np.where(spans > 0, spans, NOT_IN)[None]
                sent = group.remote.merged([GroupGradient(those, keys, changes / self._trainers)])
                group.remote.add_push(push, sent, lr=_ADD)
                wanted = group.remote.request(array_of(sent.keys), np.maximum(sent.spans, 0), insert=True)
                requests.append((group, sent, wanted))
        if dense is not None:
            self._dense.add_wants(push)
        asked = [request for *_, request in requests]
        add_row_requests(push, asked)
        self._dense.take(SentRequests(self._client, push_requests(push, number), asked, self.step).wait())
        for group, sent, request in requests:
            for spans, some in sent.on_servers():
                group.cache.assign(np.maximum(spans, 0), sent.keys[some], request.rows[some])


class AllReduced:
    """Dense parameters that no server holds. All-reduce averages their gradients, and each trainer updates
    its copy. All trainers therefore step together, independently of the servers.
    """

    def __init__(self, identity: Identity, local: LocalTraining) -> None:
        self._local = local
        join_group(identity)
        cpu_group()  # creates the group, at the same moment in all trainers
        self.take_first()

    def take_first(self) -> None:
        """Take trainer 0's values."""
        for tensor in (*self._local.dense, *self._local.buffers):
            dist.broadcast(tensor.data, src=0, group=group_of(tensor))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Average the gradients during a push to the servers, and update the parameters after it."""
        average = PendingAverage(_gradients(self._local.dense))
        yield
        average.finish()
        self._local.step()

    @staticmethod
    def agree(overflow: bool) -> bool:
        """Return True if any trainer's gradients are not finite. All trainers must call it."""
        return anyone(overflow)


def _gradients(parameters: Sequence[Parameter]) -> list[Tensor]:
    """Return the gradients of all parameters, the last parameter first. Missing gradients become zeros for
    good.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in reversed(parameters) if parameter.grad is not None]
