"""Make the process group of this job, choose its backend and device, and end it without errors.

The module also has the small exchanges through the group. `gather` uses the CPU, and `Agreement` lets all
ranks stop at the same step. `init_parallel_env`, `get_rank` and `get_world_size` are Paddle's short way to
data parallel training without `fleet`.
"""

from __future__ import annotations

import atexit
import functools
import ipaddress
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from fleetrun.envs.contract import split_endpoint
from trainers import progress
from trainers.errors import UsageError
from trainers.notice import Notice
from trainers.process.hooks import failed, install_exit_hooks
from trainers.process.log import glog
from trainers.roles.environment import current_identity
from trainers.roles.identity import Identity

# ---- Gloo's worker threads at the end of a process
#
# After a collective, a Gloo thread drops the Python objects of the collective and takes the GIL for that. If
# the interpreter is being torn down at this time, the process aborts (`terminate called without an active
# exception`, exit code -6, https://github.com/pytorch/pytorch/issues/190489). After a
# DistributedDataParallel, destroying the process group does not join the threads. The abort occurred once in
# about four hundred runs on a busy node. It could not be provoked.

GLOO_WORKER = "pt_gloo_runloop"
OWN_TASKS = Path("/proc/self/task")


def wait_until_idle(tasks: Path = OWN_TASKS, looks: int = 1000, pause: float = 0.002) -> bool:
    """Wait until every Gloo worker sleeps. Return True if all of them do.

    It looks at most `looks` times, every `pause` seconds, and needs two successful looks in a row. The GIL is
    free between looks, so a thread that sleeps because it waits for the GIL gets it there. It counts looks
    and not seconds, because the workers stop whenever this process is stopped.
    """
    asleep = 0
    for _ in range(looks):
        asleep = asleep + 1 if all(state == "S" for state in _gloo_states(tasks)) else 0
        if asleep == 2:
            return True
        time.sleep(pause)
    return False


def _gloo_states(tasks: Path) -> list[str]:
    """Return the state letter of each Gloo worker, the field after the name in /proc/PID/task/TID/stat
    (proc(5)).
    """
    states = []
    for task in tasks.iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue  # this thread has just ended
        if name == GLOO_WORKER:
            states.append(rest.split()[0])
    return states


# ---- The process group


def choose_device(identity: Identity, cuda: bool, cuda_count: int) -> torch.device:
    """Return the accelerator assigned to this process, else the CPU.

    Other launchers than fleetrun do not assign one. In their collective jobs, the local rank chooses the
    device.
    """
    if not cuda:
        return torch.device("cpu")
    if identity.device is not None:
        return torch.device("cuda", identity.device)
    if not (identity.source == "fleetrun" or identity.alone or identity.launched_as_ps):
        return torch.device("cuda", identity.local_rank % cuda_count)
    return torch.device("cpu")


def choose_backend(identity: Identity, device: torch.device) -> str:
    """Return nccl for a process with a GPU, else gloo. PADDLE_DISTRI_BACKEND overrides this.

    Raises UsageError if PADDLE_DISTRI_BACKEND is invalid, or is nccl without a CUDA device.
    """
    wanted = (identity.backend or "auto").lower()
    if wanted not in ("auto", "gloo", "nccl"):
        raise UsageError(f"PADDLE_DISTRI_BACKEND is {wanted!r}; it must be gloo, nccl or auto")
    if wanted == "nccl" and device.type != "cuda":
        raise UsageError("PADDLE_DISTRI_BACKEND is nccl, but this process has no CUDA device; use gloo")
    return wanted if wanted != "auto" else ("nccl" if device.type == "cuda" else "gloo")


def start(identity: Identity) -> None:
    """Join the job's process group. An existing group stays in place."""
    if dist.is_initialized():
        return
    device = choose_device(identity, torch.cuda.is_available(), torch.cuda.device_count())
    backend = choose_backend(identity, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if identity.alone:
        store = dist.HashStore()  # type: ignore[attr-defined]  # documented; torch forgot to export it
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    else:
        # Let Gloo use loopback if the job does. The host's own name may not resolve, or resolve to a VPN.
        hosts = [split_endpoint(endpoint)[0] for endpoint in identity.trainers]
        if hosts and all(_is_loopback(host) for host in hosts):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with progress.activity(f"waiting for all {identity.worker_num} trainers"):
            dist.init_process_group(
                backend,
                init_method=f"tcp://{identity.meeting()}",
                rank=identity.index,
                world_size=identity.worker_num,
                device_id=device if backend == "nccl" else None,
            )
    atexit.register(_end_group)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _end_group() -> None:
    # After a failure, peers may have ended, and ending an NCCL group waits for them.
    if dist.is_initialized() and not failed():
        dist.destroy_process_group()
        wait_until_idle()


# ---- Exchange of small values through the CPU

T = TypeVar("T")


def cpu_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks with tensors on the CPU. The first call makes it, on all ranks.

    With NCCL alone, an answer would come only after the GPU has done all queued work.
    """
    return _gloo_beside(dist.group.WORLD)


def group_of(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the group whose collectives accept this tensor, None for all ranks. NCCL refuses CPU tensors."""
    return cpu_group() if tensor.is_cpu else None


@functools.lru_cache(maxsize=1)
def _gloo_beside(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return None if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo")


def anyone(mine: bool) -> bool:
    """Return True if it is True on any rank. All ranks must call it."""
    found = torch.tensor([int(mine)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=cpu_group())
    return bool(found.item())


def gather(mine: T) -> list[T]:
    """Return the value of every rank, in rank order. All ranks must call it.

    Raises torch's error if a rank has ended.
    """
    gathered = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=cpu_group())
    return gathered


# ---- Agreement about batches: all ranks make the same number of steps

Batch = TypeVar("Batch")


def in_step(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches until one rank runs out of them, because a rank with another batch would wait forever.

    All ranks compare before each batch. A rank that leaves out batches logs it. Raises UsageError on all
    ranks if some ranks lack even the first batch.
    """
    coming, count = iter(batches), 0
    while True:
        batch = next(coming, None)
        some = int(batch is not None)
        extremes = torch.tensor([some, -some])
        dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=cpu_group())
        if batch is None or not extremes[0]:
            break
        yield batch
        count += 1
    if extremes[1] and not count:
        raise UsageError(
            f"Trainer {dist.get_rank()} has {'a' if some else 'no'} batch, but another trainer has "
            f"{'none' if some else 'one'}, so nothing would be trained. Divide the examples evenly."
        )
    if some:
        glog(f"another trainer has only {count} batches, so this trainer skips its remaining batches")


# ---- Agreement to stop: all ranks leave a loop at the same step


def combined(notices: Sequence[tuple[str, float] | None], now: float) -> Notice:
    """Combine the ranks' notices, (why, seconds left) or None, into one notice.

    It has the reason of the first rank with a notice, and the earliest deadline. The ranks exchange seconds,
    because clocks of two nodes may differ widely.
    """
    received = [each for each in notices if each is not None]
    return Notice(received[0][0], now + min(left for _, left in received))


class Agreement:
    """Gives all ranks the same answer. All ranks must call it equally often.

    Signals reach ranks at different steps. If one rank left alone, the others would wait for it in their next
    all_reduce forever.
    """

    def __init__(self) -> None:
        self._agreed: Notice | None = None

    def on(self, mine: Notice | None) -> Notice | None:
        """Return a notice as soon as any rank has one, else None.

        The notice has the reason of the lowest such rank, and the earliest deadline by this node's own clock.
        Later calls return the same notice without the other ranks. Raises torch's error if a rank has ended.
        """
        here = mine is not None
        if self._agreed is None and (here if dist.get_world_size() == 1 else anyone(here)):
            self._agreed = self._together(mine)
        return self._agreed

    def _together(self, mine: Notice | None) -> Notice:
        notices = gather(None if mine is None else (mine.why, mine.deadline - time.time()))
        return combined(notices, time.time())


# ---- Paddle's short way to data parallel training: `init_parallel_env`, `get_rank`, `get_world_size`.


def init_parallel_env() -> None:
    """Join the process group that the environment describes. A process on its own is a group of one.

    Raises UsageError in a job with parameter servers.
    """
    install_exit_hooks()
    identity = current_identity()
    if identity.launched_as_ps:
        raise UsageError(
            "init_parallel_env() is for collective training, but this job was started with parameter "
            "servers. Start it without --server_num and --trainer_num, or use "
            "fleet.init(is_collective=False)."
        )
    start(identity)


def get_rank() -> int:
    """Return this process's rank, even before init_parallel_env."""
    return dist.get_rank() if dist.is_initialized() else current_identity().index


def get_world_size() -> int:
    """Return the number of processes, even before init_parallel_env.

    In a parameter-server job, it is the number of trainers.
    """
    return dist.get_world_size() if dist.is_initialized() else current_identity().worker_num


# ---- The device


def current_device() -> torch.device:
    """Return this trainer's GPU if its launcher assigned one, else the CPU.

    Paddle's scripts write `CUDAPlace(int(os.environ["FLAGS_selected_gpus"]))`. fleetrun sets this variable,
    and torchrun does not.
    """
    return choose_device(current_identity(), torch.cuda.is_available(), torch.cuda.device_count())
