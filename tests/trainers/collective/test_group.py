"""One answer for all ranks, made of what each has heard. Real ranks are in test_stopping."""

import math
from pathlib import Path

import pytest
import torch

from trainers.collective.group import GLOO_WORKER, choose_backend, choose_device, combined, wait_until_idle
from trainers.errors import UsageError
from trainers.notice import Notice
from trainers.roles.identity import Identity

CPU, GPU_1 = torch.device("cpu"), torch.device("cuda", 1)
GIVEN = Identity(device=1, source="fleetrun", master="h:1")
NOT_GIVEN = Identity(source="fleetrun", master="h:1")
TORCHRUN = Identity(local_rank=3, source="torchrun", master="h:1")
MPIRUN = Identity(local_rank=1, source="mpirun", master="h:1")
TRAINER = Identity(local_rank=1, source="mpirun", master="h:1", launched_as_ps=True)


@pytest.mark.parametrize(
    ("identity", "cuda", "device"),
    [
        (GIVEN, True, GPU_1),
        (GIVEN, False, CPU),  # --gpus on a machine without CUDA
        (NOT_GIVEN, True, CPU),
        (TORCHRUN, True, GPU_1),
        (MPIRUN, True, GPU_1),
        (TRAINER, True, CPU),  # its dense parameters may be averaged, on CPUs
        (Identity(), True, CPU),
    ],
)
def test_the_device_is_the_one_that_the_launcher_gave(
    identity: Identity, cuda: bool, device: torch.device
) -> None:
    assert choose_device(identity, cuda, 2) == device


@pytest.mark.parametrize(
    ("wanted", "device", "backend"),
    [
        (None, GPU_1, "nccl"),
        (None, CPU, "gloo"),
        ("gloo", GPU_1, "gloo"),
        ("auto", GPU_1, "nccl"),
        ("NCCL", GPU_1, "nccl"),
    ],
)
def test_the_backend_fits_the_device_unless_it_is_chosen(
    wanted: str | None, device: torch.device, backend: str
) -> None:
    assert choose_backend(Identity(backend=wanted), device) == backend


def test_a_backend_that_cannot_be_is_named() -> None:
    with pytest.raises(UsageError, match="nccl, but this process has no CUDA device"):
        choose_backend(Identity(backend="nccl"), CPU)
    with pytest.raises(UsageError, match="'mpi'"):
        choose_backend(Identity(backend="mpi"), CPU)


# ---- One answer for all ranks, made of what each has heard. Real ranks are in test_stopping.


def test_the_first_reason_and_the_earliest_deadline_count() -> None:
    told = [None, ("membership", 9.0), ("stop", 7.5), None]
    assert combined(told, now=100.0) == Notice("membership", 107.5)


def test_without_a_deadline_there_is_none() -> None:
    assert combined([("signal SIGUSR1", math.inf)], now=100.0) == Notice("signal SIGUSR1", math.inf)


def task(folder: Path, number: int, name: str, state: str) -> None:
    (folder / str(number)).mkdir()
    (folder / str(number) / "stat").write_text(f"{number} ({name}) {state} 1 2 3\n")


def test_a_worker_that_runs_is_waited_for_within_bounds(tmp_path: Path) -> None:
    task(tmp_path, 1, GLOO_WORKER, "S")
    task(tmp_path, 2, GLOO_WORKER, "R")
    assert not wait_until_idle(tmp_path, looks=20, pause=0.001)


def test_workers_that_sleep_are_not_waited_for_whatever_others_do(tmp_path: Path) -> None:
    task(tmp_path, 1, GLOO_WORKER, "S")
    task(tmp_path, 2, "py) R (thon", "R")
    (tmp_path / "3").mkdir()  # a thread that ends while it is looked at
    assert wait_until_idle(tmp_path, looks=2)
    assert wait_until_idle()  # this very process
