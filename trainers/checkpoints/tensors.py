"""Write and read a checkpoint's tensors by torch.distributed.checkpoint, with a copy first for background
saves.

Each rank writes a share, and any number of ranks read the tensors that they need. Our own manifest locates
each tensor in JSON. torch's `.metadata` has the same content in pickle, for torch's tools only. This module
never reads it, so loading a checkpoint runs no code from the checkpoint.
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
    """Return True if a rank holds only a part: a DTensor, as in FSDP2 and tensor parallelism.

    Importing that type takes a while, so this checks an attribute.
    """
    return hasattr(value, "placements")


class Sharded(Module):
    """The methods that fleet scripts expect of a model, for a model sharded by FSDP2.

    It is mixed into the model's class, as FSDP2 does with its own class, so parameters keep their names.
    """

    _shards: list[torch.nn.Parameter]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, even between forward and backward, when other parameters are in place of the
        optimizer's.
        """
        for param in self._shards:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def clear_gradients(self) -> None:
        """Clear the gradients, under Paddle's name for `zero_grad`."""
        self.zero_grad()


def whole_state_dict(model: Module) -> Tensors:
    """Return the whole state of a wrapped or sharded model under its own names, in host memory, on rank 0.

    The other ranks get an empty dict. All ranks must call it. Load the state into a model of the same kind to
    evaluate on one rank.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: Tensors = dict(get_model_state_dict(model, options=options))  # type: ignore[arg-type]  # torch's
    return found


@frozen
class Written:
    """A written checkpoint. `index` locates each tensor.

    `files` maps this rank's files to (bytes, xxh3-128).
    """

    index: Document
    files: dict[str, tuple[int, str]]


def write(
    tensors: Tensors, checkpoints: CheckpointDirectory, name: str, group: dist.ProcessGroup | None = None
) -> Written:
    """Write the tensors of all ranks of the group (by default the default group) together.

    Tensors that several ranks have are written once. Raises CheckpointError on all ranks.
    """
    # Late, as in `read`, because the import takes 0.4 s and only its users should wait.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    from trainers.checkpoints.torch_storage import DirectoryWriter

    writer = DirectoryWriter(checkpoints, name)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    _be_quiet()
    with _failures(f"The checkpoint could not be written to {checkpoints.path(name)}", checkpoints):
        metadata = save(tensors, storage_writer=writer, planner=planner, process_group=group)
    return Written(_index(metadata), writer.files.written)


def read(tensors: Tensors, checkpoints: CheckpointDirectory, name: str, index: Fields) -> None:
    """Fill these tensors, on all ranks together. Raises CheckpointError on all ranks."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainers.checkpoints.torch_storage import IndexReader

    reader = IndexReader(checkpoints, name, index)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    _be_quiet()
    with _failures(f"The checkpoint {checkpoints.path(name)} could not be read"):
        load(tensors, storage_reader=reader, planner=planner)


def _index(metadata: Any) -> Document:
    """Return `{key: {"dtype", "shape", "pieces": [[offsets, sizes, file, first byte, bytes], ...]}}`."""
    places: dict[tuple[str, Integers], Any] = {
        (at.fqn, tuple(at.offset or ())): place for at, place in metadata.storage_data.items()
    }
    index = {}
    for key, tensor in metadata.state_dict_metadata.items():
        pieces = []
        for chunk in tensor.chunks:
            # A tensor without dimensions has the offset () in both. A whole tensor has (0, 0, ...).
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
    """Convert torch's CheckpointException, which is not an Exception, is long, and omits a full disk."""
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
    return "" if free is None else f"; {free / 1e6:,.1f} MB are free there"


def _be_quiet() -> None:
    """Ignore torch's warnings during a save, which scripts cannot avoid.

    The filters stay for good. Around a call, a background save would undo changes of the main thread.
    """
    for message in (
        r"torch\.distributed is (disabled|unavailable)",
        "TypedStorage is deprecated",  # torch 2.9 itself uses it
    ):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


# ---- A copy of a state, written while training continues


class Staging:
    """Copies tensors into this node's memory, which the next copies reuse.

    Getting new memory from the system takes longer than copying. A copy is therefore valid until the next.
    """

    def __init__(self) -> None:
        self._memory: Tensors = {}

    def copies(self, tensors: Tensors) -> Tensors:
        """Return the current tensors on the CPU, shards as shards."""
        memory, self._memory = self._memory, {}
        copied = {}
        for key, value in tensors.items():
            local = local_part(value.detach())
            self._memory[key] = _copied(local, memory.pop(key, None))
            copied[key] = _as_part_of(value, self._memory[key])
        for device in {value.device for value in tensors.values() if value.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # waits for copies into pinned memory
        return copied


def _copied(value: Tensor, memory: Tensor | None) -> Tensor:
    if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
        memory = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return memory.copy_(value, non_blocking=value.is_cuda)


def local_part(value: Any) -> Tensor:
    local: Tensor = value.to_local() if is_sharded(value) else value
    return local


def _as_part_of(value: Any, local: Tensor) -> Tensor:
    """Return `local` as the part of the whole that `value` is.

    It uses the constructor, because `from_local` would move it to the mesh's device.
    """
    if not is_sharded(value):
        return local
    shard: Tensor = type(value)(local, value._spec, requires_grad=False)
    return shard
