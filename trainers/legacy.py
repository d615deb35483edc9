"""What scripts for Paddle before 2.0 give to `fleet.distributed_optimizer`. Knows their words; it becomes an
ordinary DistributedStrategy.
"""

from __future__ import annotations

from typing import Any

from trainers.errors import NotSupportedError, UsageError
from trainers.ps.configs import SPLIT_METHODS, flag, nearest
from trainers.strategy import DistributedStrategy

_WHOSE = "DistributeTranspilerConfig"
_FIELDS = ("slice_var_up", "split_method", "sync_mode")
_INSTEAD = {
    "min_block_size": "parameters over 8192 elements are sliced, whole rows at a time",
    "geo_sgd_mode": 'use strategy.a_sync_configs = {"k_steps": n} of a fleet.DistributedStrategy',
    "geo_sgd_need_push_nums": 'use strategy.a_sync_configs = {"k_steps": n} of a fleet.DistributedStrategy',
    "half_async": "sync_mode False is asynchronous",
    "completely_not_async": "sync_mode True is synchronous",
    "runtime_split_send_recv": "servers know nothing of programs that could be split",
    "enable_dc_asgd": 'use strategy.a_sync_configs = {"max_staleness": n} to bound what a step may miss',
    "wait_port": "trainers always wait for their servers",
    "print_log": "fleetrun --log_level debug shows more",
    "mode": "use fleet.init(is_collective=True) for training without servers",
    "collective_mode": "use fleet.init(is_collective=True) for training without servers",
    "nccl_comm_num": "torch.distributed decides that",
    "use_hierarchical_allreduce": "torch.distributed decides that",
    "hierarchical_allreduce_inter_nranks": "torch.distributed decides that",
}


class DistributeTranspilerConfig:
    """How a job with parameter servers trains, in the words of Paddle 1.x.

    `sync_mode`: a step of all workers together equals one large batch (True), or servers apply what comes
    (False). `split_method`: which server gets a dense parameter or a slice of one: in turn ("RoundRobin"), or
    by a hash of its name ("HashName"). `slice_var_up`: dense parameters over 8192 elements are sliced over
    the servers. Another field is an error that says what to use.
    """

    sync_mode: bool
    split_method: str
    slice_var_up: bool

    def __init__(self) -> None:
        self.sync_mode = True
        self.split_method = "RoundRobin"
        self.slice_var_up = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _INSTEAD:
            raise NotSupportedError(f"NotSupported: {_WHOSE}.{name}; {_INSTEAD[name]}")
        if name not in _FIELDS:
            raise UsageError(f"{_WHOSE} has no field {name!r}{nearest(name, _FIELDS)}")
        if name != "split_method":
            flag(f"{_WHOSE}.{name}", value)
        elif value not in SPLIT_METHODS:
            raise UsageError(f"{_WHOSE}.{name} is {value!r}; it must be one of {', '.join(SPLIT_METHODS)}")
        object.__setattr__(self, name, value)


def strategy_of(wishes: DistributedStrategy | DistributeTranspilerConfig) -> DistributedStrategy:
    """The strategy that says the same; a DistributedStrategy as it is. Raises UsageError for others."""
    if isinstance(wishes, DistributedStrategy):
        return wishes
    if not isinstance(wishes, DistributeTranspilerConfig):
        raise UsageError(
            f"the strategy is {wishes!r}; give a fleet.DistributedStrategy or a {_WHOSE} (an object, made by "
            "calling it)"
        )
    strategy = DistributedStrategy()
    strategy.a_sync = not wishes.sync_mode
    strategy.ps_configs = {"split_method": wishes.split_method, "slice_var_up": wishes.slice_var_up}
    return strategy
