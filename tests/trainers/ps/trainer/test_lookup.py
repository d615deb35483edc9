"""Which keys a batch of several calls has, of one table or of several, and where their rows stand."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from trainers.ps.client import Client
from trainers.ps.kernels.batch import owners
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.trainer.group import Batch, TableGroup
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.trainer.modules import SparseEmbedding
from trainers.ps.trainer.remote import Lookup, same_ids


def group_of(tables: int = 1, servers: int = 1) -> TableGroup:
    made = []
    for number in range(tables):
        spec = TableSpec(kind=TableKind.SPARSE, name=f"t{number}", size=1, rule=SGD())
        sparse: Any = SparseParameter(
            name=spec.name,
            module=SparseEmbedding(1),
            group={"lr": 1.0},
            own_lr=None,
            table=number,
            spec=spec,
            rule=SGD(),
        )
        made.append(sparse)
    return TableGroup(made, servers, cast(Client, None))


def lookups(batch: Batch) -> list[Lookup]:
    return [batch.lookup(call) for calls in batch.calls.values() for call in calls]


def test_every_id_finds_its_key() -> None:
    ids = torch.tensor([[7, -(2**63)], [7, 2**63 - 1]])
    (lookup,) = lookups(Batch(group_of(), [(0, ids)], insert=True))
    assert torch.equal(lookup.keys[lookup.place], ids)
    assert len(lookup.keys) == 3
    assert lookup.counts.tolist() == [2, 1, 1]


def test_several_tensors_of_a_table_have_their_own_keys() -> None:
    left, right = torch.tensor([[1, 2]]), torch.tensor([2, 9, 1], dtype=torch.int32)
    first, second = lookups(Batch(group_of(), [(0, left), (0, right)], insert=True))
    assert torch.equal(first.keys[first.place], left)
    assert torch.equal(second.keys[second.place], right.to(torch.int64))
    assert dict(zip(first.keys.tolist(), first.counts.tolist(), strict=True)) == {1: 1, 2: 1}


def test_the_same_id_in_two_tables_is_two_keys_and_keys_stand_server_by_server() -> None:
    group = group_of(tables=3, servers=4)
    ids = torch.arange(40).reshape(4, 10) % 17
    batch = Batch(group, [(0, ids), (2, ids[0]), (2, ids[1] * 5)], insert=True)
    for lookup, wanted in zip(lookups(batch), (ids, ids[0], ids[1] * 5), strict=True):
        assert torch.equal(lookup.keys[lookup.place], wanted)
    seen: list[set[int]] = [set(), set(), set()]
    for server in range(4):
        spans, keys = (part.data for part in batch.request.parts(server))
        assert set(owners(keys, np.arange(4)).tolist()) == {server}
        for table, some in enumerate(keys.split(spans.tolist())):
            assert seen[table].isdisjoint(some.tolist())
            seen[table] |= set(some.tolist())
    assert seen == [set(range(17)), set(), {*ids[0].tolist(), *(ids[1] * 5).tolist()}]


def test_the_same_numbers_in_the_same_memory() -> None:
    ids = torch.arange(12).reshape(3, 4)
    assert same_ids(ids[:, :2], ids[:, :2])
    assert not same_ids(ids[:, :2], ids[:, 1:3])
    assert not same_ids(ids, ids.clone())
    assert not same_ids(ids[0], ids[:, 0][:3])
