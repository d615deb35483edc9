"""When a trainer asks for rows: what its messages carry, and how old the rows are that a step gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch

from tests.support import owners as reference
from trainers.data.loop import prefetched
from trainers.ps.client import Client, Request
from trainers.ps.configs import AsyncConfigs
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import (
    Entry,
    EntryKind,
    Initializer,
    InitKind,
    RowOptions,
    TableKind,
    TableSpec,
)
from trainers.ps.trainer.exchange import AsyncExchange, DenseParameters, SyncExchange
from trainers.ps.trainer.group import TableGroup
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.trainer.local import CachedGroup, GeoExchange
from trainers.ps.trainer.modules import SparseEmbedding
from trainers.ps.wire import Field, Kind, Message, Part

SERVERS = 3
ZERO = RowOptions(init=Initializer(InitKind.UNIFORM, 0.0, 0.0))
SPEC = TableSpec(kind=TableKind.SPARSE, name="t", size=1, rule=SGD(), rows=ZERO)
SHARED = torch.arange(8)
"""In every batch, on all servers: pushes add 1 to these rows."""


@dataclass
class Asked:
    """Requests that have been answered; nobody knows it before they are waited for."""

    replies: list[Message]
    open: bool = True


class Servers:
    """Take a request when it is sent, as servers do that are never late."""

    def __init__(self) -> None:
        self.tables = [SparseTable(SPEC) for _ in range(SERVERS)]
        self.log: list[tuple[Kind, set[int]]] = []
        self.pushed: list[tuple[int, set[int]]] = []
        """The step and the keys of each push, of all servers together."""
        self.sizes: list[int] = []
        """How many keys each message asks for, those of all servers together."""

    def send(self, requests: Sequence[Request]) -> Asked:
        if requests:
            asked = {int(key) for request in requests for part in asks(request) for key in part.data}
            self.log.append((requests[0].kind, asked - set(SHARED.tolist())))
            self.sizes.append(sum(len(part.data) for request in requests for part in asks(request)))
        if requests and requests[0].kind is Kind.PUSH:
            assert [request.server for request in requests] == list(range(SERVERS))
            keys = {int(key) for request in requests for part in pushes(request) for key in part.data}
            self.pushed.append((requests[0].number, keys))
        return Asked([self._answer(request) for request in requests])

    def wait(self, asked: Asked) -> list[Message]:
        asked.open = False
        return asked.replies

    def poll(self) -> None:
        return

    def _answer(self, request: Request) -> Message:
        table, parts = self.tables[request.server], request.parts
        for part in parts:
            if part.field in (Field.KEYS, Field.PEEK):
                assert set(reference.owners(part.data, SERVERS).tolist()) <= {request.server}
        for keys, rows in pairwise(parts):
            if rows.field is Field.ROWS:
                table.apply(keys.data, rows.data, rows.lr)
        found = [
            Part(0, Field.ROWS, table.pull(part.data, insert=part.field is Field.KEYS))
            for part in asks(request)
        ]
        return Message(kind=request.kind, parts=tuple(found))


def asks(request: Request) -> list[Part]:
    """The parts that ask for rows."""
    return [
        part
        for number, part in enumerate(request.parts)
        if part.field in (Field.KEYS, Field.PEEK)
        and not any(follower.field is Field.ROWS for follower in request.parts[number + 1 : number + 2])
    ]


def pushes(request: Request) -> list[Part]:
    """The keys of the rows that it pushes."""
    return [keys for keys, rows in pairwise(request.parts) if rows.field is Field.ROWS]


class Trainer:
    """One embedding. `ages`: for each step how many of the pushes before it its rows lacked."""

    def __init__(
        self, configs: AsyncConfigs | None, *, training: bool = True, spec: TableSpec = SPEC
    ) -> None:
        self.servers = Servers()
        client = cast(Client, self.servers)
        module = SparseEmbedding(1).train(training)
        sparse: Any = SparseParameter(
            name="t", module=module, group={"lr": -1.0}, own_lr=None, table=0, spec=spec, rule=SGD()
        )
        late = 0 if configs is None else configs.late
        groups = [TableGroup([sparse], SERVERS, client, late=late)]
        self.table = groups[0].tables[0]
        dense = DenseParameters([], SERVERS)
        self.exchange: SyncExchange | AsyncExchange
        if configs is None:
            self.exchange = SyncExchange(client, dense, groups, SERVERS)
        else:
            self.exchange = AsyncExchange(client, dense, groups, SERVERS, configs)
        self.ages: list[int] = []

    def train(self, batches: Sequence[torch.Tensor], *, steps: int | None = None, every: int = 1) -> None:
        """A push after every batch whose number is a multiple of `every`."""
        ahead = self.exchange.ahead
        prepared = prefetched(batches, lambda ids: self.exchange.prefetch({self.table: [ids]}), ahead)
        for number, ids in enumerate(prepared):
            if number == steps:
                break
            rows = self.read(ids)
            self.ages.append(self.exchange.step - int(rows[0]))
            if number % every == 0:
                self.push()

    def push(self) -> None:
        self.table.group.collected.add(self.table.place, SHARED, torch.ones(len(SHARED), 1))
        self.exchange.push()
        self.table.group.drop_gradients()

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """The values of the shared rows."""
        lookup, rows = self.table.look_up(ids, insert=self.table.sparse.module.training)
        assert torch.equal(lookup.keys[lookup.place], ids)
        values = rows[lookup.place][:, 0]
        assert torch.equal(values[: len(SHARED)], values[:1].expand(len(SHARED))), "servers of one moment"
        return values

    def said(self) -> list[tuple[Kind, set[int]]]:
        return self.servers.log


def batch(number: int) -> torch.Tensor:
    """The shared ids and one that tells the number."""
    return torch.cat([SHARED, torch.tensor([100 + number])])


def batches(count: int) -> list[torch.Tensor]:
    return [batch(number) for number in range(count)]


def test_a_push_asks_for_the_batch_after_the_next() -> None:
    trainer = Trainer(AsyncConfigs())
    trainer.train(batches(5))
    assert trainer.said() == [
        (Kind.PULL, {101}),  # before the first step: while it computes
        (Kind.PULL, {100}),
        (Kind.PUSH, {102}),
        (Kind.PUSH, {103}),
        (Kind.PUSH, {104}),
        (Kind.PUSH, set()),
        (Kind.PUSH, set()),
    ]
    assert trainer.ages == [0, 1, 1, 1, 1]


def test_rows_are_as_old_as_if_they_were_asked_for_by_themselves() -> None:
    merged, apart = Trainer(AsyncConfigs()), Trainer(AsyncConfigs(max_staleness=5))
    merged.train(batches(6))
    apart.train(batches(6))
    assert apart.said()[:5] == [
        (Kind.PULL, {101}),
        (Kind.PULL, {100}),
        (Kind.PUSH, set()),
        (Kind.PULL, {102}),
        (Kind.PUSH, set()),
    ]
    assert merged.ages == apart.ages == [0, 1, 1, 1, 1, 1]


def test_a_push_of_several_steps_carries_the_questions_of_as_many_batches() -> None:
    trainer = Trainer(AsyncConfigs(max_merge_var_num=3))
    trainer.train(batches(11))
    assert trainer.said() == [
        (Kind.PULL, {101, 102, 103}),
        (Kind.PULL, {100}),
        (Kind.PUSH, {104, 105, 106}),
        (Kind.PUSH, {107, 108, 109}),
        (Kind.PUSH, {110}),
    ]
    assert trainer.ages == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    assert trainer.servers.sizes == [8 + 3, 8 + 1, 8 + 3, 8 + 3, 8 + 1], "each key once in a message"


def test_where_servers_count_requests_every_batch_asks_for_itself() -> None:
    spec = replace(SPEC, rows=replace(ZERO, entry=Entry(EntryKind.COUNT, 5.0)))
    trainer = Trainer(AsyncConfigs(max_merge_var_num=3), spec=spec)
    trainer.train(batches(11))
    assert trainer.servers.sizes == [3 * (8 + 1), 8 + 1, 3 * (8 + 1), 3 * (8 + 1), 8 + 1]


def test_batches_whose_gradients_are_kept_for_a_later_step() -> None:
    trainer = Trainer(AsyncConfigs())
    trainer.train(batches(6), every=2)
    assert [asked for _, asked in trainer.said()[2:]] == [{102}, {103}, {104}, {105}]
    assert max(trainer.ages) == 1


@pytest.mark.parametrize("configs", [AsyncConfigs(overlap=False), None])
def test_in_step_rows_have_every_push(configs: AsyncConfigs | None) -> None:
    trainer = Trainer(configs)
    trainer.train(batches(4))
    assert trainer.ages == [0, 0, 0, 0]
    if configs is not None:
        assert [kind for kind, _ in trainer.said()] == 4 * [Kind.PULL, Kind.PUSH]


def test_rows_for_evaluation_never_travel_with_a_push() -> None:
    trainer = Trainer(AsyncConfigs(), training=False)
    trainer.train(batches(3))
    assert [asked for kind, asked in trainer.said() if kind is Kind.PULL] == [{101}, {100}, {102}]
    assert max(trainer.ages) == 1


def test_a_loop_that_breaks_and_one_after_it() -> None:
    trainer = Trainer(AsyncConfigs())
    trainer.train(batches(9), steps=3)
    trainer.train([batch(number) for number in range(50, 54)])
    assert trainer.ages == [0, 1, 1, 0, 1, 1, 1]
    asked = [key for _, keys in trainer.said() for key in keys]
    assert len(asked) == len(set(asked)), "nothing is asked for twice"


def test_ids_that_changed_and_batches_that_were_left_out_are_asked_for_anew() -> None:
    trainer = Trainer(AsyncConfigs())
    coming = batches(6)
    for ids in coming[1:3]:
        trainer.exchange.prefetch({trainer.table: [ids]})
    for _ in range(2):  # the first takes along batch 2
        trainer.push()
    assert trainer.read(coming[1])[0] == 2
    coming[2][-1] += 50
    trainer.read(coming[2])
    assert trainer.said()[-1] == (Kind.PULL, {152})


def test_gradients_in_any_order_reach_the_servers_of_their_keys() -> None:
    trainer = Trainer(AsyncConfigs())
    keys = torch.randperm(50)
    trainer.table.group.collected.add(trainer.table.place, keys, keys[:, None].float())
    trainer.table.group.collected.add(
        trainer.table.place, SHARED.flip(0), torch.full((len(SHARED), 1), 100.0)
    )
    trainer.exchange.push()
    wanted = keys.float() + 100 * (keys < len(SHARED))
    assert torch.equal(trainer.table.pull_rows(keys)[:, 0], wanted)


def geo(batches: Sequence[torch.Tensor], k_steps: int = 100) -> tuple[Servers, list[torch.Tensor]]:
    """What was asked, and the rows of each batch: every step adds 1 to the rows that its batch has."""
    servers = Servers()
    client = cast(Client, servers)
    module = SparseEmbedding(1).train()
    sparse: Any = SparseParameter(
        name="t", module=module, group={"lr": -1.0}, own_lr=None, table=0, spec=SPEC, rule=SGD()
    )
    group = CachedGroup(TableGroup([sparse], SERVERS, client))
    (table,) = group.tables
    exchange = GeoExchange(
        client,
        DenseParameters([], SERVERS),
        [group],
        SERVERS,
        k_steps=k_steps,
        trainers=1,
        local_step=lambda: None,
    )
    rows = []
    for ids in prefetched(batches, lambda ids: exchange.prefetch({table: [ids]}), exchange.ahead):
        lookup, found = table.look_up(ids, insert=True)
        rows.append(found.clone())
        table.group.collected.add(table.place, lookup.keys, torch.ones(len(lookup.keys), 1))
        exchange.push()
        group.drop_gradients()
    return servers, rows


def test_geo_asks_ahead_for_rows_that_are_not_here_and_for_each_once() -> None:
    ids = [torch.arange(0, 20), torch.arange(10, 30), torch.arange(0, 40), torch.arange(35, 50)]
    servers, rows = geo(ids)
    new = [set(range(10, 30)), {8, 9}, set(range(30, 40)), set(range(40, 50))]  # the log leaves SHARED out
    assert servers.log == [(Kind.PULL, asked) for asked in new]
    assert [sorted(each.flatten().tolist()) for each in rows] == [
        [0.0] * 20,
        [0.0] * 10 + [1.0] * 10,
        [0.0] * 10 + [1.0] * 20 + [2.0] * 10,
        [0.0] * 10 + [1.0] * 5,
    ]


def test_a_geo_exchange_is_one_message_to_each_server_which_counts_its_steps_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer that dies in an exchange repeats the steps whose changes have not arrived."""
    ids = [torch.arange(0, 20), torch.arange(10, 30), torch.arange(0, 40), torch.arange(35, 50)]
    servers, _ = geo(ids, k_steps=2)
    assert servers.pushed == [(1, set(range(30))), (3, set(range(50)))]
    assert servers.tables[1].pull(torch.tensor([1]), insert=False).tolist() == [[2.0]]

    monkeypatch.setattr("trainers.ps.trainer.local._MAX_VALUES", 20)
    servers, _ = geo(ids, k_steps=2)
    steps = [step for step, _ in servers.pushed]
    assert steps == [0, 1, 2, 2, 3], "what does not fit into one message is sent before, and is not the end"
    assert sorted(key for _, keys in servers.pushed[:2] for key in keys) == list(range(30))
