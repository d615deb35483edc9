"""The process group of this job: which backend, which device, made once and ended quietly. Leaves
collectives to torch.
"""

from __future__ import annotations

import atexit
import ipaddress
import os

import torch
import torch.distributed as dist

from trainers import progress
from trainers.collective.threads import wait_until_idle
from trainers.errors import UsageError
from trainers.lastwords import failed
from trainers.roles.identity import Identity


def choose_device(identity: Identity, cuda: bool, cuda_count: int) -> torch.device:
    """The accelerator that this process was given, else the CPU. Launchers other than fleetrun give none: in
    their collective jobs it is the local rank's.
    """
    if not cuda:
        return torch.device("cpu")
    if identity.device is not None:
        return torch.device("cuda", identity.device)
    if not (identity.source == "fleetrun" or identity.alone or identity.launched_as_ps):
        return torch.device("cuda", identity.local_rank % cuda_count)
    return torch.device("cpu")


def choose_backend(identity: Identity, device: torch.device) -> str:
    """nccl for a process with a GPU, gloo otherwise; PADDLE_DISTRI_BACKEND overrides."""
    wanted = (identity.backend or "auto").lower()
    if wanted not in ("auto", "gloo", "nccl"):
        raise UsageError(f"PADDLE_DISTRI_BACKEND is {wanted!r}; it must be gloo, nccl or auto")
    if wanted == "nccl" and device.type != "cuda":
        raise UsageError("PADDLE_DISTRI_BACKEND is nccl, but this process has no CUDA device; use gloo")
    return wanted if wanted != "auto" else ("nccl" if device.type == "cuda" else "gloo")


def start(identity: Identity) -> None:
    """Join the job's process group. A second call, or a group that the script made itself, changes
    nothing.
    """
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
        _prefer_loopback(identity)
        with progress.activity(f"waiting for all {identity.worker_num} trainers"):
            dist.init_process_group(
                backend,
                init_method=f"tcp://{identity.meeting()}",
                rank=identity.index,
                world_size=identity.worker_num,
                device_id=device if backend == "nccl" else None,
            )
    atexit.register(_end)


def _prefer_loopback(identity: Identity) -> None:
    """Gloo looks up the host's own name, which may resolve to nothing or to a VPN; a job on loopback needs
    neither.
    """
    hosts = [endpoint.rpartition(":")[0].strip("[]") for endpoint in identity.trainers]
    if hosts and all(_is_loopback(host) for host in hosts):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _end() -> None:
    # After a failure the peers may be gone, and ending an NCCL group waits for them.
    if dist.is_initialized() and not failed():
        dist.destroy_process_group()
        wait_until_idle()
