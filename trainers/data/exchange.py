"""Exchange examples between trainers, so that every example goes to a random trainer.

The exchange moves a block of examples at a time. Each trainer sorts its block by destination. All trainers
exchange the sizes, and one all-to-all moves the bytes. The memory of sent examples is freed immediately, so a
trainer holds only little more than its examples. The process group is the job's, or a Gloo group made here.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Callable
from typing import Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fleetrun.envs.contract import split_endpoint
from trainers.data import kernels
from trainers.data.kernels import Array, Bytes, Int64s
from trainers.data.slots import Kind, Layout
from trainers.data.store import Columns, Store
from trainers.errors import DataError, TrainerLostError, UsageError
from trainers.roles.environment import current_identity
from trainers.roles.identity import Identity

# ---- The exchange of blocks

_BLOCK_BYTES = 16 << 20


class Work(Protocol):
    def wait(self) -> object: ...


class Peers(Protocol):
    """The used part of a torch.distributed.ProcessGroup. Its backend must accept CPU tensors (Gloo)."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def alltoall_base(
        self, taken: torch.Tensor, given: torch.Tensor, take: list[int], give: list[int], /
    ) -> Work: ...


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
        raise DataError(f"global_shuffle began with {total} examples and ended with {after}")
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
                    f"{self._peers.rank()}; every trainer must set up its data set in the same way"
                )
        return int(table[:, 3].sum()), int(table[:, 4].max())

    def swap(self, block: Columns, destinations: Int64s) -> list[Columns]:
        """Send each example to its destination, and return the received examples by rank."""
        order = np.argsort(destinations, kind="stable")
        ends = np.cumsum(np.bincount(destinations, minlength=self._peers.size()))
        pieces = [take(block, rows) for rows in np.split(order, ends[:-1])]
        sizes = np.array([[len(piece), *piece.values] for piece in pieces], dtype=np.int64)
        even = [sizes[0].nbytes] * len(pieces)
        coming = (
            _alltoall(sizes.reshape(-1).view(np.uint8), even, even, self._peers).view(np.int64).reshape(-1, 3)
        )
        packed = [pack(piece) for piece in pieces]
        wanted = [_offsets(self._layout, *size)[-1] for size in coming.tolist()]
        got = _alltoall(np.concatenate(packed), [len(data) for data in packed], wanted, self._peers)
        came = np.split(got, np.cumsum(wanted)[:-1])
        return [unpack(self._layout, data, *size) for data, size in zip(came, coming.tolist(), strict=True)]


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
        peers.alltoall_base(torch.from_numpy(taken), torch.from_numpy(given), take, give).wait()
    except RuntimeError as problem:
        raise TrainerLostError(
            f"the data set's trainers cannot reach each other: {problem}. After a global_shuffle that failed "
            "the examples must be loaded again"
        ) from problem
    return taken


def take(columns: Columns, rows: Int64s) -> Columns:
    """Return these examples (n,) in this order, as new columns."""
    lengths = columns.starts[rows + 1] - columns.starts[rows]
    bags, weights = (int(total) for total in lengths.sum(axis=0))
    out = Columns.empty(columns.layout, len(rows), bags, weights)
    kernels.take_rows(columns.dense, rows, out.dense)
    kernels.take_rows(columns.ids, rows, out.ids)
    kernels.take_rows(columns.counts, rows, out.counts)
    np.cumsum(lengths, axis=0, out=out.starts[1:])
    kernels.take_values(columns.bags, columns.starts, 0, rows, out.bags)
    kernels.take_values(columns.weights, columns.starts, 1, rows, out.weights)
    return out


def pack(columns: Columns) -> Bytes:
    """Return the bytes of columns that start at value 0."""
    bags, weights = columns.values
    arrays: tuple[Array, ...] = (
        columns.starts,
        columns.ids,
        columns.bags[:bags],
        columns.counts,
        columns.dense,
        columns.weights[:weights],
    )
    offsets = _offsets(columns.layout, len(columns), bags, weights)
    out = np.zeros(offsets[-1], dtype=np.uint8)
    for offset, array in zip(offsets, arrays, strict=False):
        out[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    return out


def unpack(layout: Layout, data: Bytes, rows: int, bags: int, weights: int) -> Columns:
    """Return the columns that `pack` packed, without a copy."""
    starts, ids, bag, count, dense, weight, _ = _offsets(layout, rows, bags, weights)
    widths = layout.widths
    return Columns(
        layout,
        data[dense:weight].view(np.float32)[: rows * widths[Kind.DENSE]].reshape(rows, widths[Kind.DENSE]),
        data[ids:bag].view(np.int64).reshape(rows, widths[Kind.IDS]),
        data[count:dense].view(np.int32).reshape(rows, layout.varying),
        data[starts:ids].view(np.int64).reshape(rows + 1, 2),
        data[bag:count].view(np.int64),
        data[weight : weight + 4 * weights].view(np.float32),
    )


def _offsets(layout: Layout, rows: int, bags: int, weights: int) -> list[int]:
    """Return the starts of starts, ids, bags, counts, dense and weights, and the end, a multiple of 8."""
    widths = layout.widths
    eights = [2 * (rows + 1), rows * widths[Kind.IDS], bags]
    fours = [rows * layout.varying, rows * widths[Kind.DENSE], weights]
    ends = np.cumsum([0, *(8 * n for n in eights), *(4 * n for n in fours)]).tolist()
    return [*ends[:-1], -(-ends[-1] // 8) * 8]


# ---- The process group for data sets that are shuffled across trainers

_GROUP_TIMEOUT = datetime.timedelta(minutes=30)


def peers_of(group: object) -> Peers | None:
    """Return a process group, the result of a callable, or for anything else the job's own group.

    Anything else is None, or Paddle's `fleet`. Return None for a trainer without peers.
    """
    if callable(group) and not hasattr(group, "alltoall_base"):
        group = cast(Callable[[], object], group)()
    found = cast(Peers, group) if hasattr(group, "alltoall_base") else default_peers()
    return None if found is None or found.size() == 1 else found


def default_peers() -> Peers | None:
    """Return the default process group, else a Gloo group at MASTER_ADDR and MASTER_PORT from the launcher.

    Return None for a process on its own. Raises UsageError on a server.
    """
    if dist.is_initialized():
        return cast(Peers, dist.group.WORLD)
    identity = current_identity()
    if identity.is_server:
        raise UsageError("data sets are shuffled by trainers, and this process is a server")
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
    return cast(Peers, dist.ProcessGroupGloo(PrefixStore("data", meeting), rank, size, options))
