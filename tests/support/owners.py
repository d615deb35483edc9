"""Which server holds which key, in numpy: what the compiled function is compared with."""

import numpy as np
import torch


def owners(keys: torch.Tensor, servers: int) -> torch.Tensor:
    """The server of each sparse key, (n,) int64: the finalizer of splitmix64, modulo servers.

    A plain modulo would put keys that are multiples of the number of servers on one of them.
    """
    mixed = keys.numpy().astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed % np.uint64(servers)).astype(np.int64))
