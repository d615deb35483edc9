"""Data parallel training: torch's DistributedDataParallel with what a fleet script expects of it besides."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class DataParallel(DistributedDataParallel):
    """`DistributedDataParallel` on the device where the module is.

    In eval mode without gradients the module is called directly: no collective, so that one rank may
    evaluate alone.
    """

    def __init__(
        self, module: torch.nn.Module, *, find_unused_parameters: bool = False, bucket_cap_mb: float = 25.0
    ) -> None:
        super().__init__(module, find_unused_parameters=find_unused_parameters, bucket_cap_mb=bucket_cap_mb)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.training or torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch has no types here
        return self.module(*inputs, **kwargs)

    def clear_gradients(self) -> None:
        """Paddle's name of `zero_grad`."""
        self.zero_grad()
