"""The other trainers, for data sets that are shuffled across them. Knows how a process group is found or
made; leaves what is sent to `exchange`.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainers.data.exchange import Peers
from trainers.errors import UsageError
from trainers.roles.current import current_identity
from trainers.roles.identity import Identity

_TIMEOUT = datetime.timedelta(minutes=30)


def peers_of(group: object) -> Peers | None:
    """A process group, what a callable returns, or for anything else (None, Paddle's `fleet`) the job's own.
    None for a trainer without others.
    """
    if callable(group) and not hasattr(group, "alltoall_base"):
        group = cast(Callable[[], object], group)()
    found = cast(Peers, group) if hasattr(group, "alltoall_base") else default_peers()
    return None if found is None or found.size() == 1 else found


def default_peers() -> Peers | None:
    """The default process group when there is one; else one of its own over Gloo, made at MASTER_ADDR and
    MASTER_PORT as the launcher gave them; None for a process on its own.
    """
    if dist.is_initialized():
        return cast(Peers, dist.group.WORLD)
    identity = current_identity()
    if identity.is_server:
        raise UsageError("data sets are shuffled by trainers, and this process is a server")
    return None if identity.alone or identity.worker_num == 1 else _own(identity)


@functools.cache
def _own(identity: Identity) -> Peers:
    """One for the life of the process: a second one could not have the same port."""
    host, _, port = identity.meeting().rpartition(":")
    rank, size = identity.index, identity.worker_num
    meeting = TCPStore(host.strip("[]"), int(port), size, rank == 0, timeout=_TIMEOUT)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the only way to give a device
    options._timeout = _TIMEOUT
    if identity.trainers:  # the address that the others know; the host's own name may resolve to nothing
        mine = identity.trainers[rank].rpartition(":")[0].strip("[]")
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=mine)]
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return cast(Peers, dist.ProcessGroupGloo(PrefixStore("data", meeting), rank, size, options))
