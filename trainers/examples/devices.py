"""The device that an example trains on."""

from __future__ import annotations

import torch

from trainers.collective.group import choose_device
from trainers.roles.current import current_identity


def place() -> torch.device:
    """This trainer's GPU, where its launcher gave it one, or the CPU. Paddle's scripts write
    `CUDAPlace(int(os.environ["FLAGS_selected_gpus"]))`, which fleetrun sets and torchrun does not.
    """
    return choose_device(current_identity(), torch.cuda.is_available(), torch.cuda.device_count())
