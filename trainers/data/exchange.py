"""Exchange examples between trainers, so that every example goes to a random trainer.

The exchange moves a block of examples at a time. Each trainer sorts its block by destination. All trainers
exchange the sizes, and one all-to-all moves the bytes. The memory of sent examples is freed immediately, so a
trainer holds only little more than its examples. The process group is the job's, or a Gloo group made here.
"""

from __future__ import annotations

import datetime
import functools
import hashlib

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fleetrun.envs.contract import split_endpoint
from trainers.data import kernels
from trainers.data.kernels import Bytes, Int64s
from trainers.data.slots import Layout
from trainers.data.store import Columns, Store
from trainers.errors import DataError, TrainerLostError, UsageError
from trainers.roles.environment import current_identity
from trainers.roles.identity import Identity
from trainers.storage import safetensors

# ---- The exchange of blocks

_BLOCK_BYTES = 16 << 20


Peers = dist.ProcessGroup | dist.ProcessGroupGloo
"""A process group of torch. Its backend must accept CPU tensors (Gloo)."""


def exchange(store: Store, layout: Layout, peers: Peers, seed: int, shuffle: int) -> Store:
    """Return a new store with the examples received by this trainer. The old store is invalid afterwards.

    Destinations depend on `seed`, the number of the shuffle, the trainer's rank and the example's position.
    All trainers must call this. Raises UsageError if they differ in slots or seed, DataError if the numbers
    of examples do not add up, and TrainerLostError if a trainer has ended.
    """
    sorter = _Exchange(layout, peers)
    block = max(1, _BLOCK_BYTES * len(store) // max(store.columns().nbytes, 1))
    rounds = -(-len(store) // block)
    total, rounds = sorter.agree(seed, shuffle, len(store), rounds)
    random = np.random.default_rng([seed, shuffle, peers.rank()])
    result = Store(layout)
    for number in range(rounds):
        first, last = min(number * block, len(store)), min((number + 1) * block, len(store))
        destinations = random.integers(0, peers.size(), last - first)
        for piece in sorter.swap(store.columns().rows(first, last), destinations):
            result.extend(piece)
        store.forget(last)
    after, _ = sorter.agree(seed, shuffle, len(result), rounds)
    if after != total:
        raise DataError(f"global_shuffle started with {total} examples but ended with {after}")
    return result


class _Exchange:
    def __init__(self, layout: Layout, peers: Peers) -> None:
        self._layout = layout
        self._peers = peers

    def agree(self, seed: int, shuffle: int, rows: int, rounds: int) -> tuple[int, int]:
        """Return (examples of all trainers, most rounds of a trainer), after checking that all
        trainers agree.
        """
        digest = hashlib.sha256(str(self._layout).encode()).digest()[:8]
        mine = np.array([int.from_bytes(digest, "little", signed=True), seed, shuffle, rows, rounds])
        table = _everyones(mine, self._peers)
        for column, what in enumerate(("list of slots", "seed", "number of shuffles")):
            other = np.flatnonzero(table[:, column] != mine[column])
            if len(other):
                raise UsageError(
                    f"global_shuffle: trainer {other[0]} has another {what} than trainer "
                    f"{self._peers.rank()}. Set up the data set in the same way on all trainers."
                )
        return int(table[:, 3].sum()), int(table[:, 4].max())

    def swap(self, block: Columns, destinations: Int64s) -> list[Columns]:
        """Send each example to its destination, and return the received examples by rank."""
        order = np.argsort(destinations, kind="stable")
        ends = np.cumsum(np.bincount(destinations, minlength=self._peers.size()))
        pieces = [take(block, rows) for rows in np.split(order, ends[:-1])]
        packed = [pack(piece) for piece in pieces]
        sizes = np.array([len(data) for data in packed])
        even = [sizes.itemsize] * len(packed)
        wanted = _alltoall(sizes.view(np.uint8), even, even, self._peers).view(np.int64).tolist()
        got = _alltoall(np.concatenate(packed), sizes.tolist(), wanted, self._peers)
        return [unpack(self._layout, data) for data in np.split(got, np.cumsum(wanted)[:-1])]


def total_of(count: int, peers: Peers) -> int:
    """Return the sum of every trainer's count. All trainers must call it."""
    return int(_everyones(np.array([count], dtype=np.int64), peers).sum())


def _everyones(mine: Int64s, peers: Peers) -> Int64s:
    """Gather the values of each trainer, (trainers, values)."""
    even = [mine.nbytes] * peers.size()
    every = _alltoall(np.tile(mine, len(even)).view(np.uint8), even, even, peers)
    return every.view(np.int64).reshape(len(even), -1)


def _alltoall(given: Bytes, give: list[int], take: list[int], peers: Peers) -> Bytes:
    """Send the next give[r] bytes to trainer r, and receive take[r] bytes from it, by rank."""
    taken = np.empty(sum(take), dtype=np.uint8)
    try:
        work = peers.alltoall_base(torch.from_numpy(taken), torch.from_numpy(given), take, give)  # type: ignore[union-attr]  # torch's stubs lack it for Gloo
        work.wait()
    except RuntimeError as problem:
        raise TrainerLostError(
            f"The trainers of the data set cannot reach each other: {problem}. After a failed "
            "global_shuffle, load the examples again."
        ) from problem
    return taken


def take(columns: Columns, rows: Int64s) -> Columns:
    """Return these examples (n,) in this order, as new columns."""
    lengths = columns.starts[rows + 1] - columns.starts[rows]
    bags, weights = (int(total) for total in lengths.sum(axis=0))
    out = Columns.empty(columns.layout, len(rows), bags, weights)
    columns.dense.take(rows, axis=0, out=out.dense)
    columns.ids.take(rows, axis=0, out=out.ids)
    columns.counts.take(rows, axis=0, out=out.counts)
    np.cumsum(lengths, axis=0, out=out.starts[1:])
    kernels.take_values(columns.bags, columns.starts, 0, rows, out.bags)
    kernels.take_values(columns.weights, columns.starts, 1, rows, out.weights)
    return out


def pack(columns: Columns) -> Bytes:
    """Return columns that start at value 0 as safetensors, and zeros up to a multiple of 8 bytes."""
    bags, weights = columns.values
    arrays = {
        "starts": columns.starts,
        "ids": columns.ids,
        "bags": columns.bags[:bags],
        "counts": columns.counts,
        "dense": columns.dense,
        "weights": columns.weights[:weights],
    }
    content = safetensors.pack({name: torch.from_numpy(array) for name, array in arrays.items()}, {})
    end = bytes(-sum(map(len, content)) % 8)
    return np.concatenate([np.frombuffer(each, np.uint8) for each in (*content, end)])


def unpack(layout: Layout, data: Bytes) -> Columns:
    """Return the columns that `pack` packed, without a copy."""
    found = safetensors.unpack(torch.from_numpy(data))
    return Columns(layout, **{name: tensor.numpy() for name, tensor in found.items()})


# ---- The process group for data sets that are shuffled across trainers

_GROUP_TIMEOUT = datetime.timedelta(minutes=30)


def peers_of(group: object) -> Peers | None:
    """Return a process group, the result of a callable, or for anything else the job's own group.

    Anything else is None, or Paddle's `fleet`. Return None for a trainer without peers.
    """
    if callable(group):
        group = group()
    found = group if isinstance(group, Peers) else default_peers()
    return None if found is None or found.size() == 1 else found


def default_peers() -> Peers | None:
    """Return the default process group, else a Gloo group at MASTER_ADDR and MASTER_PORT from the launcher.

    Return None for a process on its own. Raises UsageError on a server.
    """
    if dist.is_initialized():
        return dist.group.WORLD
    identity = current_identity()
    if identity.is_server:
        raise UsageError("Only trainers can shuffle data sets, but this process is a server.")
    return None if identity.alone or identity.worker_num == 1 else _own_group(identity)


@functools.cache
def _own_group(identity: Identity) -> Peers:
    """Make a group for the life of the process, because a second one could not have the same port."""
    host, port = split_endpoint(identity.meeting())
    rank, size = identity.index, identity.worker_num
    meeting = TCPStore(host, port, size, rank == 0, timeout=_GROUP_TIMEOUT)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the only way to give a device
    options._timeout = _GROUP_TIMEOUT
    if identity.trainers:  # the address that peers use, because the host's own name may not resolve
        mine = split_endpoint(identity.trainers[rank])[0]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=mine)]
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(PrefixStore("data", meeting), rank, size, options)
