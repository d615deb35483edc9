import pytest
import torch

from trainers.collective.group import choose_backend, choose_device
from trainers.errors import UsageError
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
