from itertools import pairwise

import torch

from trainers.ps.kernels.batch import owners
from trainers.ps.trainer.remote import lookup_of, lookups_of, same_ids


def test_every_id_finds_its_key() -> None:
    ids = torch.tensor([[7, -(2**63)], [7, 2**63 - 1]])
    lookup = lookup_of(ids)
    assert torch.equal(lookup.keys[lookup.place], ids)
    assert len(lookup.keys) == 3
    assert lookup.counts.sum() == 4


def test_several_tensors_share_their_keys() -> None:
    left, right = torch.tensor([[1, 2]]), torch.tensor([2, 9, 1], dtype=torch.int32)
    first, second = lookups_of([left, right])
    assert first.keys is second.keys
    assert torch.equal(first.keys[first.place], left)
    assert torch.equal(second.keys[second.place], right.to(torch.int64))
    assert dict(zip(first.keys.tolist(), first.counts.tolist(), strict=True)) == {1: 1, 2: 1, 9: 0}


def test_keys_stand_server_by_server() -> None:
    ids = torch.arange(40).reshape(4, 10) % 17
    first, second = lookups_of([ids, ids[0]], servers=3)
    assert torch.equal(first.keys[first.place], ids)
    assert torch.equal(second.keys[second.place], ids[0])
    assert torch.equal(first.counts, (ids.reshape(-1, 1) == first.keys).sum(0))
    for server, (start, stop) in enumerate(pairwise(first.cuts)):
        assert set(owners(first.keys[start:stop], 3).tolist()) == {server}
    assert torch.equal(lookup_of(first.keys, servers=3).keys, first.keys), "they are in order already"


def test_the_same_numbers_in_the_same_memory() -> None:
    ids = torch.arange(12).reshape(3, 4)
    assert same_ids(ids[:, :2], ids[:, :2])
    assert not same_ids(ids[:, :2], ids[:, 1:3])
    assert not same_ids(ids, ids.clone())
    assert not same_ids(ids[0], ids[:, 0][:3])
