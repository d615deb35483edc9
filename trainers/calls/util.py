"""`fleet.util`: small things that trainers tell each other beside the training. Knows the calls; leaves what
is sent to `payload` and the way to the runtimes: torch.distributed, or the first parameter server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from trainers.calls.payload import MODES, Payload, expect_alike, packed, reduced, unpacked
from trainers.data.shard import get_file_shard
from trainers.errors import NotSupportedError, UsageError
from trainers.roles.identity import Identity
from trainers.runtime import Runtime

T = TypeVar("T")


class Util:
    """For the trainers of a job; with parameter servers between init_worker and stop_worker. All trainers
    must come to a call, after the same steps where training is synchronous, and each gets the same answer.
    """

    def __init__(self, who: Callable[[str], Identity], ready: Callable[[str], Runtime]) -> None:
        self._who = who
        self._ready = ready

    def all_reduce(self, input: T, mode: str = "sum", comm_world: str = "worker") -> T:
        """The sum ("max", "min") over all trainers of a number, or element by element of a list of numbers,
        an array or a tensor, whose shape and type must be the same on all of them. The same kind of thing
        again.

        The result is the same to the last bit on every trainer and in every run: floats are added in float64
        and in the order of ranks. For statistics: each trainer sends all it has to all others. Raises
        UsageError, on all trainers, when they differ in what they give.
        """
        if mode not in MODES:
            raise UsageError(f"fleet.util.all_reduce mode is {mode!r}; it must be one of {', '.join(MODES)}")
        each = self._gather(input, f"all_reduce {mode}", comm_world)
        return cast(T, _beside(reduced(each, mode), input))

    def all_gather(self, input: T, comm_world: str = "worker") -> list[T]:
        """What every trainer gives, in rank order: numbers, texts, lists of numbers, arrays or tensors, which
        may be of other shapes on each.
        """
        each = self._gather(input, "all_gather", comm_world)
        expect_alike(each)
        return [_beside(payload.value, input) for payload in each]

    def barrier(self, comm_world: str = "worker") -> None:
        """Wait until every trainer is here: `fleet.barrier_worker()`."""
        _check_world(comm_world, "barrier")
        self._ready("util.barrier").barrier_worker()

    def get_file_shard(self, files: Sequence[str]) -> list[str]:
        """This trainer's share of the files: a block of neighbours. The shares of all trainers are all files,
        each once; the first ones are longer by one where it does not come out even.
        """
        identity = self._who("util.get_file_shard")
        if identity.is_server:
            raise UsageError("fleet.util.get_file_shard() was called on a server, which reads no files")
        return get_file_shard(files, identity.index, identity.worker_num)

    def print_on_rank(self, message: object, rank_id: int) -> None:
        """Print a line on one trainer, and nothing on all others."""
        identity = self._who("util.print_on_rank")
        if not 0 <= rank_id < identity.worker_num:
            raise UsageError(
                f"fleet.util.print_on_rank rank_id is {rank_id}; this job has trainers 0 to "
                f"{identity.worker_num - 1}"
            )
        if not identity.is_server and identity.index == rank_id:
            sys.stdout.write(f"{message}\n")
            sys.stdout.flush()

    def _gather(self, value: Any, call: str, comm_world: str) -> list[Payload]:
        name = call.partition(" ")[0]
        _check_world(comm_world, name)
        runtime = self._ready(f"util.{name}")
        return [unpacked(given) for given in runtime.gather(packed(value, call), f"util.{name}")]


def _beside(value: Any, input: Any) -> Any:
    """A tensor on the device of the one that was given."""
    if isinstance(value, torch.Tensor) and isinstance(input, torch.Tensor):
        return value.to(input.device)
    return value


def _check_world(comm_world: str, call: str) -> None:
    if comm_world in ("server", "all"):
        raise NotSupportedError(
            f"fleet.util.{call} with comm_world={comm_world!r}: servers answer trainers and run nothing of "
            'the script while they do; use comm_world="worker"'
        )
    if comm_world != "worker":
        raise UsageError(f'fleet.util.{call} comm_world is {comm_world!r}; it must be "worker"')
