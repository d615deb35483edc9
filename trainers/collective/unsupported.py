"""Fields of Paddle's DistributedStrategy (2.6, `distributed_strategy.proto`) that have no effect here, and
what to use instead. Knows names and the values that ask for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainers.errors import NotSupportedError


@dataclass(frozen=True, slots=True)
class Unsupported:
    """`off`: the value that asks for nothing, Paddle's default as a rule; None: there is none."""

    instead: str
    off: Any = None


_PIPELINE = "use torch.distributed.pipelining in the model"
_TENSOR = "use torch.distributed.tensor.parallel in the model"
_CUDNN = "use torch.backends.cudnn in the script"
_NCCL = "NCCL decides that; its NCCL_* environment variables may be set for fleetrun"
_BUCKETS = "gradients are reduced in groups of strategy.fuse_grad_size_in_MB"
_ELASTIC = "use fleetrun --nnodes=LEAST:MOST and fleet.save_checkpoint"
_COMPILE = "use strategy.compile"
_SERVERS = "use fleet.init(is_collective=False), strategy.ps_configs and strategy.sparse_table_configs"
_AUTO = "no strategy is chosen automatically; set the fields that you want"

UNSUPPORTED: Mapping[str, Unsupported] = {
    "pipeline": Unsupported(_PIPELINE, False),
    "pipeline_configs": Unsupported(_PIPELINE),
    "tensor_parallel": Unsupported(_TENSOR, False),
    "tensor_parallel_configs": Unsupported(_TENSOR),
    "hybrid_configs": Unsupported(
        f"all processes train data parallel; use strategy.sharding, or {_TENSOR[4:]}"
    ),
    "hybrid_parallel_order": Unsupported("all processes train data parallel; use strategy.sharding"),
    "dgc": Unsupported("use strategy.fp16_allreduce, or torch's PowerSGD hook on the model", False),
    "dgc_configs": Unsupported("use strategy.fp16_allreduce, or torch's PowerSGD hook on the model"),
    "adaptive_localsgd": Unsupported("use strategy.localsgd with localsgd_configs k_steps", False),
    "adaptive_localsgd_configs": Unsupported("use strategy.localsgd with localsgd_configs k_steps"),
    "asp": Unsupported("use torch.sparse.semi_structured", False),
    "qat": Unsupported("use torchao's quantization", False),
    "qat_configs": Unsupported("use torchao's quantization"),
    "adam_d2sum": Unsupported("use the optimizer that you want", False),
    "elastic": Unsupported(_ELASTIC, False),
    "auto": Unsupported(_AUTO, False),
    "semi_auto": Unsupported(_AUTO, False),
    "auto_search": Unsupported(_AUTO, False),
    "build_strategy": Unsupported(_COMPILE),
    "execution_strategy": Unsupported(_COMPILE),
    "without_graph_optimization": Unsupported(_COMPILE, True),
    "cudnn_exhaustive_search": Unsupported(_CUDNN + ": torch.backends.cudnn.benchmark = True", False),
    "cudnn_batchnorm_spatial_persistent": Unsupported(_CUDNN, False),
    "conv_workspace_size_limit": Unsupported(_CUDNN, 512),
    "nccl_comm_num": Unsupported(_NCCL, 1),
    "sync_nccl_allreduce": Unsupported(_NCCL, True),
    "use_hierarchical_allreduce": Unsupported(_NCCL, False),
    "hierarchical_allreduce_inter_nranks": Unsupported(_NCCL, 1),
    "heter_ccl_mode": Unsupported(_NCCL, False),
    "calc_comm_same_stream": Unsupported(_NCCL, False),
    "fuse_all_reduce_ops": Unsupported(f"{_BUCKETS}; make that small", True),
    "fuse_grad_size_in_num": Unsupported(_BUCKETS, 8),
    "fuse_grad_size_in_TFLOPS": Unsupported(_BUCKETS, 50),
    "last_comm_group_size_MB": Unsupported(_BUCKETS, 1),
    "fuse_grad_merge": Unsupported("strategy.gradient_merge adds up where gradients are", False),
    "trainer_desc_configs": Unsupported(_SERVERS),
    "fs_client_param": Unsupported("give URLs that fsspec knows to fleet.save_persistables"),
    "downpour_table_param": Unsupported(_SERVERS),
    "is_fl_ps_mode": Unsupported("there is no federated training", False),
    "with_coordinator": Unsupported("there is no federated training", False),
    "is_with_coordinator": Unsupported("there is no federated training", False),
    "split_data": Unsupported("each process reads its own part; use trainers.data's samplers", True),
    "mode": Unsupported("use fleet.init(is_collective=True or False)"),
}


def check_off(name: str, value: Any) -> None:
    """Raises NotSupportedError unless the value asks for nothing."""
    field = UNSUPPORTED[name]
    if field.off is None or type(value) is not type(field.off) or value != field.off:
        raise NotSupportedError(f"NotSupported: strategy.{name} = {value!r}; {field.instead}")


def off_value(name: str) -> Any:
    """What reading the field gives. Raises NotSupportedError when there is nothing to give."""
    field = UNSUPPORTED[name]
    if field.off is None:
        raise NotSupportedError(f"NotSupported: strategy.{name}; {field.instead}")
    return field.off
