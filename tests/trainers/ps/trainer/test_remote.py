"""A table seen from a trainer: which rows a batch gets that was prepared before its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from trainers.ps.client import Client, Request
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.trainer.group import RemoteTable, TableGroup
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.trainer.modules import EmbeddingModule, SparseEmbedding
from trainers.ps.trainer.remote import RowRequest, send_row_requests, united
from trainers.ps.wire import Field, Message, Part

SPEC = TableSpec(kind=TableKind.SPARSE, name="t", size=1, rule=SGD())


class OneServer:
    """Answers pulls from a table in this process, when they are waited for."""

    def __init__(self) -> None:
        self.table = SparseTable(SPEC)
        self.asked: list[list[int]] = []

    def send(self, requests: Sequence[Request]) -> Sequence[Request]:
        self.asked += [request.parts[0].data.tolist() for request in requests]
        return requests

    def wait(self, requests: Sequence[Request]) -> list[Message]:
        rows = [self.table.pull(request.parts[0].data) for request in requests]
        return [
            Message(kind=request.kind, parts=(Part(0, Field.ROWS, each),))
            for request, each in zip(requests, rows, strict=True)
        ]


def remote(module: EmbeddingModule | None = None) -> tuple[OneServer, RemoteTable]:
    server = OneServer()
    module = module or SparseEmbedding(1)
    sparse: Any = SparseParameter(
        name="t", module=module, group={"lr": 1.0}, own_lr=None, table=0, spec=SPEC, rule=SGD()
    )
    return server, TableGroup([sparse], 1, cast(Client, server), late=1).tables[0]


def prepare(table: RemoteTable, ids: torch.Tensor) -> None:
    table.group.send(table.group.prepare({table.place: [ids]}))


def test_a_prepared_batch_is_asked_for_once() -> None:
    server, table = remote()
    ids = torch.tensor([3, 5, 3])
    prepare(table, ids)
    table.group.as_of += 1
    lookup, _ = table.look_up(ids, insert=True)
    assert lookup.keys.tolist() == [3, 5]
    assert server.asked == [[3, 5]]


def by_torch(ids: torch.Tensor) -> None:
    ids += 50


def by_data(ids: torch.Tensor) -> None:
    ids.data += 50


def by_numpy(ids: torch.Tensor) -> None:
    array = ids.numpy()
    array += 50


@pytest.mark.parametrize("change", [by_torch, by_data, by_numpy])
def test_ids_that_were_changed_in_place_are_looked_up_again(change: Callable[[torch.Tensor], None]) -> None:
    """Torch does not count the changes of the last two."""
    server, table = remote()
    ids = torch.tensor([3, 5, 3])
    prepare(table, ids)
    change(ids)
    lookup, _ = table.look_up(ids, insert=True)
    assert lookup.keys.tolist() == [53, 55]
    assert server.asked[-1] == [53, 55]


def test_a_prediction_that_was_not_used_does_not_count_for_other_ids_in_the_same_memory() -> None:
    _, table = remote()
    ids = torch.tensor([3, 5, 3])
    prepare(table, ids)
    by_numpy(ids)
    prepare(table, ids)
    lookup, _ = table.look_up(ids, insert=True)
    assert lookup.keys.tolist() == [53, 55]


def test_a_batch_whose_turn_has_passed_gets_the_rows_of_now() -> None:
    server, table = remote()
    ids = torch.tensor([3])
    prepare(table, ids)
    table.group.as_of += 5
    server.table.apply(torch.tensor([3]), torch.ones(1, 1), 1.0)
    _, rows = table.look_up(ids, insert=True)
    assert torch.equal(rows, server.table.pull(torch.tensor([3])))
    assert len(server.asked) == 2


def test_a_view_of_a_prepared_batch_is_that_batch_and_a_copy_is_not() -> None:
    server, table = remote()
    batch = torch.arange(6).reshape(2, 3)
    prepare(table, batch[:, 1])
    table.look_up(batch[:, 1], insert=True)
    assert server.asked == [[1, 4]]
    prepare(table, batch[:, 1])
    table.look_up(batch[:, 1].clone(), insert=True)
    assert len(server.asked) == 3


@pytest.mark.parametrize("wrong", [-1, 10])
def test_an_id_out_of_range_is_named_and_gets_no_row(wrong: int) -> None:
    server, table = remote(torch.nn.Embedding(10, 1, sparse=True))
    ids = torch.tensor([1, wrong])
    prepare(table, ids)
    for insert in (True, False):
        with pytest.raises(IndexError, match=rf"'t' has rows 0 to 9, but was given the id {wrong}"):
            table.look_up(ids, insert=insert)
    assert server.asked == []


def test_shows_follow_the_order_of_the_gradients_keys() -> None:
    _, table = remote()
    table.add_stats(torch.tensor([9, 4, 7]), torch.tensor([[1.0, 0.0], [2.0, 1.0], [5.0, 5.0]]))
    table.group.collected.add(table.place, torch.tensor([4, 9]), torch.ones(2, 1))
    table.add_stats(torch.tensor([4]), torch.tensor([[1.0, 1.0]]))
    merged = table.group.take_gradients()
    assert merged is not None
    assert merged.stats is not None
    assert merged.keys.tolist() == [4, 9]
    assert merged.stats.tolist() == [[3, 2], [1, 0]]
    again = table.group.take_gradients()
    assert again is not None, "as in torch, a gradient stays until zero_grad()"
    assert again.rows.tolist() == merged.rows.tolist()
    assert again.stats is None
    table.group.drop_gradients()
    assert table.group.take_gradients() is None


def test_the_union_of_requests_asks_for_each_key_once_and_every_request_gets_its_rows() -> None:
    """Of four tables on three servers; a row is (table, key)."""
    first, servers, tables, size, calls = 10, 3, 4, 60, list[Request]()
    drawn = np.random.default_rng(0)

    def some() -> RowRequest:
        spans, keys = np.zeros((servers, tables), np.int64), list[int]()
        for server, table in np.ndindex(servers, tables):
            if drawn.random() < 0.7:
                held = np.arange(server, size, servers)  # the keys of this server
                of_table = drawn.choice(held, drawn.integers(1, len(held)), replace=False)
                spans[server, table] = len(of_table)
                keys += of_table.tolist()
        return RowRequest(first, 2, np.array(keys, np.int64), spans, insert=True)

    class Answering:
        def send(self, requests: Sequence[Request]) -> Sequence[Request]:
            calls.extend(requests)
            return requests

        def wait(self, requests: Sequence[Request]) -> list[Message]:
            return [self._answer(request) for request in requests]

        def _answer(self, request: Request) -> Message:
            spans, keys = request.parts
            assert (spans.field, keys.field) == (Field.SPANS, Field.KEYS)
            table = torch.arange(keys.table, keys.table + len(spans.data)).repeat_interleave(spans.data)
            assert len(set(zip(table.tolist(), keys.data.tolist(), strict=True))) == len(table)
            rows = torch.stack([table, keys.data], dim=1).float()
            return Message(kind=request.kind, parts=(Part(keys.table, Field.ROWS, rows),))

    requests = [some() for _ in range(5)]
    (union,) = united(requests)
    send_row_requests(cast(Client, Answering()), servers, [union], as_of=7)
    assert len(calls) == servers
    for each in requests:
        table = np.tile(np.arange(first, first + tables), servers).repeat(each.spans.reshape(-1))
        assert np.array_equal(each.rows.numpy(), np.stack([table, each.keys], axis=1))
        assert each.as_of == 7


def test_requests_that_differ_in_more_than_their_keys_stay_apart() -> None:
    keys, spans = np.array([1, 2]), np.array([[2]])
    one = RowRequest(3, 8, keys, spans, insert=True)
    others = [
        RowRequest(4, 8, keys, spans, insert=True),
        RowRequest(3, 8, keys, spans, insert=False),
        RowRequest(3, 8, keys, spans, insert=True, counted=True),
    ]
    assert united([one, *others]) == [one, *others]
    big = [RowRequest(3, 512, np.arange(100_000), np.array([[100_000]]), insert=True) for _ in range(2)]
    assert united(big) == big, "the answer would not fit into one message"
