"""The runtime of fleetrun inside a training script. It imports torch at the first name that needs torch."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from trainers.process import hooks
from trainers.process.hooks import install_exit_hooks

if TYPE_CHECKING:
    from trainers import fleet, progress, static
    from trainers.collective.data_parallel import DataParallel
    from trainers.collective.group import get_rank, get_world_size, init_parallel_env
    from trainers.data.dataset import InMemoryDataset, QueueDataset
    from trainers.data.generator import MultiSlotDataGenerator
    from trainers.data.kafka import KafkaTopic
    from trainers.data.parquet import ParquetFiles
    from trainers.data.slots import Slot
    from trainers.data.stream_files import MultiSlotFiles

__all__ = [
    "DataParallel",
    "InMemoryDataset",
    "KafkaTopic",
    "MultiSlotDataGenerator",
    "MultiSlotFiles",
    "ParquetFiles",
    "QueueDataset",
    "Slot",
    "fleet",
    "get_rank",
    "get_world_size",
    "init_parallel_env",
    "progress",
    "static",
]

_HOMES = {
    "DataParallel": "trainers.collective.data_parallel",
    "InMemoryDataset": "trainers.data.dataset",
    "KafkaTopic": "trainers.data.kafka",
    "MultiSlotDataGenerator": "trainers.data.generator",
    "MultiSlotFiles": "trainers.data.stream_files",
    "ParquetFiles": "trainers.data.parquet",
    "QueueDataset": "trainers.data.dataset",
    "Slot": "trainers.data.slots",
    "get_rank": "trainers.collective.group",
    "get_world_size": "trainers.collective.group",
    "init_parallel_env": "trainers.collective.group",
}


def __getattr__(name: str) -> Any:
    if name in ("fleet", "progress", "static"):
        return importlib.import_module(f"trainers.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trainers' has no attribute {name!r}")


install_exit_hooks()
hooks.install_stack_dump(os.environ)
