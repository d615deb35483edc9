"""Tensors of a checkpoint: written and read by torch.distributed.checkpoint, copied first for a save in the
background.

Each rank writes a share, and any number of ranks read what they need. Our own manifest says in JSON where
each tensor is. torch's `.metadata` says the same in pickle; torch's tools read it, nothing here does:
loading a checkpoint runs no code that came with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from fleetrun.aliases import Document, Fields, Integers
from fleetrun.frozen import frozen
from trainers.checkpoints.directory import CheckpointDirectory
from trainers.checkpoints.manifest import CheckpointError

Tensors = dict[str, Tensor]


def is_sharded(value: Tensor) -> bool:
    """Whether a rank holds a part of it only: a DTensor, as FSDP2's and tensor parallel parameters are. To
    import that type takes a while.
    """
    return hasattr(value, "placements")


class Sharded(Module):
    """What a fleet script expects of a model, for one that FSDP2 has sharded: mixed into its class, as
    FSDP2 does with its own: parameters keep their names.
    """

    _shards: list[torch.nn.Parameter]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also between forward and backward, when other parameters than the optimizer's are in place."""
        for param in self._shards:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def clear_gradients(self) -> None:
        """Paddle's name of `zero_grad`."""
        self.zero_grad()


def whole_state_dict(model: Module) -> dict[str, Tensor]:
    """The state of a wrapped or sharded model under its own names, whole, in host memory: on rank 0; empty on
    the others. All ranks call it. A model of the same kind that loads it can be evaluated on one rank.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: dict[str, Tensor] = dict(get_model_state_dict(model, options=options))  # type: ignore[arg-type]  # torch's
    return found


@frozen
class Written:
    """`index`: where each tensor is. `files`: what this rank has written, (bytes, xxh3-128) by name."""

    index: Document
    files: dict[str, tuple[int, str]]


def write(
    tensors: Tensors, checkpoints: CheckpointDirectory, name: str, group: dist.ProcessGroup | None = None
) -> Written:
    """All ranks of the group (default: the default one) together write their tensors; what several have is
    written once. Raises CheckpointError, on all ranks.
    """
    # Late, as in `read`: it takes 0.4 s to import, for which only its users should wait.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    from trainers.checkpoints.torch_storage import DirectoryWriter

    writer = DirectoryWriter(checkpoints, name)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    _be_quiet()
    with _failures(f"the checkpoint could not be written to {checkpoints.path(name)}", checkpoints):
        metadata = save(tensors, storage_writer=writer, planner=planner, process_group=group)
    return Written(_index(metadata), writer.files.written)


def read(tensors: Tensors, checkpoints: CheckpointDirectory, name: str, index: Fields) -> None:
    """Fill these tensors, all ranks together. Raises CheckpointError, on all ranks."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainers.checkpoints.torch_storage import IndexReader

    reader = IndexReader(checkpoints, name, index)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    _be_quiet()
    with _failures(f"the checkpoint {checkpoints.path(name)} could not be read"):
        load(tensors, storage_reader=reader, planner=planner)


def _index(metadata: Any) -> Document:
    """`{key: {"dtype", "shape", "pieces": [[offsets, sizes, file, first byte, bytes], ...]}}`"""
    places: dict[tuple[str, Integers], Any] = {
        (at.fqn, tuple(at.offset or ())): place for at, place in metadata.storage_data.items()
    }
    index = {}
    for key, tensor in metadata.state_dict_metadata.items():
        pieces = []
        for chunk in tensor.chunks:
            # A tensor without dimensions has the offset () in both; one that is whole has (0, 0, ...).
            place = places[key, tuple(chunk.offsets)]
            where = [place.relative_path, place.offset, place.length]
            pieces.append([list(chunk.offsets), list(chunk.sizes), *where])
        index[key] = {
            "dtype": str(tensor.properties.dtype).removeprefix("torch."),
            "shape": list(tensor.size),
            "pieces": pieces,
        }
    return index


@contextmanager
def _failures(what: str, checkpoints: CheckpointDirectory | None = None) -> Iterator[None]:
    """torch's CheckpointException is not an Exception, is long, and does not mention a full disk."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items())[:3])
        raise CheckpointError(f"{what}: {causes}{_room(checkpoints)}") from error
    except OSError as error:
        raise CheckpointError(f"{what}: {error}{_room(checkpoints)}") from error


def _room(checkpoints: CheckpointDirectory | None) -> str:
    try:
        free = None if checkpoints is None else checkpoints.free()
    except OSError:
        free = None
    return "" if free is None else f"; {free / 1e6:,.1f} MB are free there now"


def _be_quiet() -> None:
    """What torch warns of while it saves, no script can change. For good, and not around a call: a save in
    the background would put back what the main thread has changed meanwhile.
    """
    for message in (
        r"torch\.distributed is (disabled|unavailable)",
        "TypedStorage is deprecated",  # torch 2.9 itself uses it
    ):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


# ---- A copy of a state, written while training continues


class Staging:
    """Copies in this machine's memory, which the next ones use again: to get fresh memory from the system
    takes longer than to copy. So a copy is valid until the next.
    """

    def __init__(self) -> None:
        self._memory: Tensors = {}

    def copies(self, tensors: Tensors) -> Tensors:
        """The same tensors on the CPU, shards as shards, as they are now."""
        memory, self._memory = self._memory, {}
        copied = {}
        for key, value in tensors.items():
            local = local_part(value.detach())
            self._memory[key] = _copied(local, memory.pop(key, None))
            copied[key] = _as_part_of(value, self._memory[key])
        for device in {value.device for value in tensors.values() if value.is_cuda}:
            torch.cuda.current_stream(
                device
            ).synchronize()  # until then copies into pinned memory are under way
        return copied


def _copied(value: Tensor, memory: Tensor | None) -> Tensor:
    if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
        memory = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return memory.copy_(value, non_blocking=value.is_cuda)


def local_part(value: Any) -> Tensor:
    local: Tensor = value.to_local() if is_sharded(value) else value
    return local


def _as_part_of(value: Any, local: Tensor) -> Tensor:
    """`local` as the same part of the whole as `value` is of it. By the constructor, since `from_local` would
    bring it to the mesh's device.
    """
    if not is_sharded(value):
        return local
    shard: Tensor = type(value)(local, value._spec, requires_grad=False)
    return shard
