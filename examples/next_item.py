"""Recommend the next item of a session: self-attention over item ids of any length (as SASRec), on servers.

    fleetrun --server_num=1 --trainer_num=2 examples/next_item.py

Items of the history, targets and negatives share one table on the servers. Sessions are generated, so the
best possible score is known: after an item, its successor follows with a probability of 0.6, and any other
item otherwise. Each trainer gets as many sessions as the others and about as many items.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from trainers import fleet
from trainers.data.sampler import ElasticBatchSampler
from trainers.ps import SparseEmbedding, Uniform

FOLLOWS = 0.6
"""The probability that the next item is the successor of an item."""
TOP = 10


class Sessions:
    """Sessions of item ids as one array, and the place where each begins. Item 0 does not exist."""

    def __init__(self, sessions: int, items: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.successor = np.random.default_rng(7).permutation(items) + 1  # the same in all parts of the data
        lengths = np.clip(random.lognormal(2.3, 0.8, sessions), 3, 200).astype(np.int64)
        self.starts = np.concatenate([[0], lengths.cumsum()])
        follows = random.random(self.starts[-1]) < FOLLOWS
        ids = random.integers(1, items + 1, self.starts[-1])
        first = np.zeros(len(ids), bool)
        first[self.starts[:-1]] = True
        for place in np.flatnonzero(follows & ~first):
            ids[place] = self.successor[ids[place - 1] - 1]
        self.ids = torch.from_numpy(ids)

    @property
    def lengths(self) -> list[int]:
        return np.diff(self.starts).tolist()

    def batch(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Return the ids of these sessions, one after another, and their lengths."""
        some = [self.ids[self.starts[number] : self.starts[number + 1]] for number in numbers]
        return torch.cat(some), torch.tensor([len(each) for each in some])


class NextItem(nn.Module):
    """One layer of causal attention over the items of a session. `items` is on the servers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.items = SparseEmbedding(dim, init=Uniform(-0.1, 0.1))
        self.age = nn.Parameter(torch.zeros(256, dim))
        self.queries_keys_values = nn.Linear(dim, 3 * dim)
        self.out = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Return the state after each item, (sum of lengths, dim), for the `rows` of the items."""
        sessions = nn.utils.rnn.pad_sequence(rows.split(lengths.tolist()), batch_first=True)
        inputs = sessions + self.age[: sessions.shape[1]]
        attended = scaled_dot_product_attention(
            *self.queries_keys_values(inputs).chunk(3, -1), is_causal=True
        )
        states = self.out(torch.cat([sessions, attended], -1))
        return states[torch.arange(states.shape[1]) < lengths[:, None]]


def targets_of(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of all items with a next item, and the places of these next items."""
    last = lengths.cumsum(0) - 1
    known = torch.ones(int(lengths.sum()), dtype=torch.bool)
    known[last] = False
    before = known.nonzero().view(-1)
    return before, before + 1


def loss_of(model: NextItem, ids: Tensor, lengths: Tensor, items: int, negatives: int) -> Tensor:
    """Return the sum over items of the loss of the next item against sampled items."""
    before, after = targets_of(lengths)
    drawn = torch.randint(1, items + 1, (negatives,))
    rows = model.items(torch.cat([ids, drawn]))  # one request for all of them
    states = model(rows[: len(ids)], lengths)[before]
    right = (states * rows[after]).sum(-1)
    wrong = states @ rows[len(ids) :].T
    return -(logsigmoid(right) + logsigmoid(-wrong).mean(-1)).sum()


@torch.no_grad()
def ndcg(model: NextItem, sessions: Sessions, items: int) -> tuple[float, float]:
    """Return the NDCG@10 of the last item of each session among all items, and the best possible one."""
    found, best = [], []
    every = model.items(torch.arange(1, items + 1))
    for numbers in torch.arange(len(sessions.lengths)).split(256):
        ids, lengths = sessions.batch(numbers.tolist())
        last = lengths.cumsum(0) - 1
        states = model(model.items(ids), lengths)[last - 1]
        scores = states @ every.T
        rank = (scores > scores.gather(1, ids[last, None] - 1)).sum(1)
        found.append(torch.where(rank < TOP, 1 / torch.log2(rank + 2.0), 0.0))
        right = torch.from_numpy(sessions.successor)[ids[last - 1] - 1] == ids[last]
        chance = sum(1 / math.log2(rank + 2) for rank in range(1, TOP)) / (items - 1)
        best.append(torch.where(right, 1.0, chance))  # all other items are equally likely
    return float(torch.cat(found).mean()), float(torch.cat(best).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Next items of generated sessions")
    parser.add_argument("--sessions", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=1_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=128, help="sessions in a batch of all trainers")
    parser.add_argument("--negatives", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    fleet.init()
    torch.manual_seed(1)
    model = NextItem(args.dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    trained, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    sessions, test = Sessions(args.sessions, args.items, 1), Sessions(2_000, args.items, 2)
    rank, trainers = fleet.worker_index(), fleet.worker_num()
    sampler = ElasticBatchSampler(
        args.sessions, args.batch_size, rank=rank, trainers=trainers, lengths=sessions.lengths
    )
    for epoch in range(args.epochs):
        used, total = 0, 0.0
        for numbers in sampler.batches(list(sampler)):
            ids, lengths = sessions.batch(numbers)
            loss = loss_of(trained, ids, lengths, args.items, args.negatives)
            # The servers take the mean over trainers. This makes it a mean over the job's sessions.
            (loss * trainers / args.batch_size).backward()
            optimizer.step()
            optimizer.zero_grad()
            used, total = used + len(ids) - len(lengths), total + float(loss.detach())
        print(f"epoch {epoch}: loss {total / used:.4f} over {used} items", flush=True)
    fleet.barrier_worker()
    if rank == 0:
        found, best = ndcg(trained, test, args.items)
        print(f"NDCG@{TOP} {found:.3f}; the best possible is {best:.3f}", flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
