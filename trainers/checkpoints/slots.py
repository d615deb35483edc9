"""Store versions of a state in shared memory that the launcher keeps, as tensors and JSON.

     head      number (of the save, or 0 while it is written), step, run, world, steps made, sizes
     tensors   one after the other, aligned
     values    everything else as JSON

The number is written last. A process that is killed at any moment therefore leaves a whole version, or none.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from fleetrun.aliases import Document, Fields, Integers
from fleetrun.envs.channels import LARGEST_MEMORY_MESSAGE, MEMORY_AT_ONCE
from fleetrun.frozen import frozen
from trainers.checkpoints.manifest import CheckpointError, values_of
from trainers.checkpoints.tensors import is_sharded, local_part
from trainers.errors import UsageError

_HEAD = struct.Struct("<8s7q")  # magic, and the fields of `Head`
_MAGIC = b"FLEETMEM"
_FIRST = mmap.PAGESIZE  # where tensors start
_ALIGNED = 64
_MORE = 1 << 16  # bytes by which a slot grows, because values become longer

StepAndRun = tuple[int, int]
"""Step and run, equal on all ranks of one version."""


# ---- The launcher's store


class Store:
    """Descriptors of shared memory by name, kept by the launcher (`fleetrun.pod.memory`)."""

    def __init__(self, path: str) -> None:
        self._path = path

    def keep(self, name: str, descriptor: int) -> None:
        """Hand a descriptor to the launcher. Raises CheckpointError."""
        self._ask({"keep": name}, [descriptor])

    def give(self, prefix: str) -> dict[str, int]:
        """Return new descriptors by name. Raises CheckpointError."""
        found: dict[str, int] = {}
        more, after = True, ""
        while more:
            answer, descriptors = self._ask({"give": prefix, "after": after})
            found |= zip(answer["names"], descriptors, strict=True)
            more, after = answer["more"], next(reversed(answer["names"]), "")
        return found

    def drop(self, name: str) -> None:
        """Free the memory after the last process has closed its descriptor. Raises CheckpointError."""
        self._ask({"drop": name})

    def _ask(self, request: dict[str, str], descriptors: Sequence[int] = ()) -> tuple[Document, list[int]]:
        folder, name = os.path.split(self._path)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
                # There is no timeout, because a stopped or busy launcher keeps the memory, and without it
                # training would start over. If the launcher ends, the connection closes.
                place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    asking.connect(f"/proc/self/fd/{place}/{name}")  # an address has at most 107 bytes
                finally:
                    os.close(place)
                socket.send_fds(asking, [json.dumps(request).encode()], descriptors)
                data, given, _, _ = socket.recv_fds(
                    asking, LARGEST_MEMORY_MESSAGE, MEMORY_AT_ONCE, socket.MSG_CMSG_CLOEXEC
                )
        except OSError as error:
            raise CheckpointError(f"The launcher's memory cannot be reached: {error}") from None
        answer = json.loads(data) if data else {"error": "The launcher closed the connection"}
        if "error" in answer:
            raise CheckpointError(f"The launcher keeps no checkpoints in memory: {answer['error']}")
        return answer, given


# ---- One slot: a version of one rank's state


@frozen
class Head:
    """The content of a slot.

    `number` counts the saves of its rank, or is 0 for a slot that is empty or being written. `run` is equal
    on all ranks from one load to the next. Versions with equal step and run belong together. `made` is the
    number of steps that progress counts. `tensors` and `values` are sizes in bytes.
    """

    number: int = 0
    step: int = 0
    run: int = 0
    world: int = 0
    made: int = 0
    tensors: int = 0
    values: int = 0

    @property
    def size(self) -> int:
        return self.tensors + self.values

    @property
    def version(self) -> StepAndRun:
        return self.step, self.run


class Slot:
    """Shared memory of one version, which one process writes."""

    def __init__(self, descriptor: int, name: str) -> None:
        """Make a slot, which owns the descriptor from now on."""
        self.descriptor = descriptor
        self.name = name
        self._memory: mmap.mmap | None = None
        self._views: list[Tensor] = []
        self._layout: object = None
        self.look()

    def look(self) -> None:
        """Read the head again, because another process may have written it."""
        self.head = self._read_head()

    @classmethod
    def new(cls, name: str) -> Slot:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _FIRST)
        return cls(descriptor, name)

    def close(self) -> None:
        """Release the memory. The slot cannot be used afterwards."""
        self._views, self._layout, self._memory = [], None, None
        os.close(self.descriptor)

    def write(self, head: Head, tensors: Sequence[Tensor], values: bytes) -> None:
        """Write a version. Raises OSError for lack of memory, and then the slot is empty."""
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        memory = self._emptied(head)
        if layout != self._layout:
            self._views = list(_views(memory, layout))
            self._layout = layout
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor)
        memory[_FIRST + head.tensors : _FIRST + head.size] = values
        self._completed(head, memory)

    def fill(self, head: Head, receive: Callable[[memoryview], None]) -> None:
        """Fill the slot with the `content` of another slot with this head.

        Raises OSError, and errors of `receive`. The slot is then empty.
        """
        memory = self._emptied(head)
        self._layout = None
        with memoryview(memory)[_FIRST : _FIRST + head.size] as room:
            receive(room)
        self._completed(head, memory)

    def content(self) -> memoryview:
        """Return all bytes of the version except its head. Release the view before the slot is written
        again.
        """
        return memoryview(self._mapped(_FIRST + self.head.size))[_FIRST : _FIRST + self.head.size]

    def _emptied(self, head: Head) -> mmap.mmap:
        self.empty()
        return self._mapped(_FIRST + head.size)

    def _completed(self, head: Head, memory: mmap.mmap) -> None:
        memory[: _HEAD.size] = _HEAD.pack(_MAGIC, 0, *astuple(head)[1:])
        memory[8:16] = struct.pack("<q", head.number)  # from here on the version counts
        self.head = head

    def empty(self) -> None:
        """Mark the slot as empty."""
        os.pwrite(self.descriptor, bytes(_HEAD.size), 0)
        self.head = Head()

    def read(self, meshes: Callable[[], Meshes]) -> Document:
        """Return the state in new memory. `meshes` returns the meshes for sharded tensors."""
        memory = self._mapped(_FIRST + self.head.size)
        start = _FIRST + self.head.tensors
        return _unpacked(memory[start : start + self.head.values], memory, meshes)

    def _read_head(self) -> Head:
        data = os.pread(self.descriptor, _HEAD.size, 0)
        if len(data) < _HEAD.size:
            return Head()
        magic, number, *fields = _HEAD.unpack(data)
        return Head(number, *fields) if magic == _MAGIC else Head()

    def _mapped(self, size: int) -> mmap.mmap:
        """Map the slot, with at least this size. The memory is allocated, so writing cannot fail."""
        if self._memory is None or len(self._memory) < size:
            self._views, self._layout, self._memory = [], None, None
            there = os.fstat(self.descriptor).st_size
            if there < size:
                there = -(-size // _MORE) * _MORE
                os.posix_fallocate(self.descriptor, 0, there)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = mmap.mmap(self.descriptor, there, flags=flags)
        return self._memory


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _views(memory: mmap.mmap, layout: Sequence[tuple[torch.Size, torch.dtype]]) -> Iterator[Tensor]:
    """Yield tensors in the memory of a slot, in their order."""
    at = _FIRST
    for shape, dtype in layout:
        yield _view(memory, at, shape, dtype)
        at += _aligned(shape.numel() * dtype.itemsize)


def _view(memory: mmap.mmap, at: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    size = shape.numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=at).view(dtype).view(shape)


# ---- States: tensors in the slot, everything else as JSON. Types that JSON lacks become an object of one
# key: `{"dict": [[key, value], ...]}`, `{"module": [pairs, versions]}` of a module's state, `{"tuple":
# [...]}`, `{"bytes": hex}`, and `{"tensor": number}` or `{"array": number}` with the number of its place.


@frozen
class Place:
    """A tensor in a slot, with its first byte, shape and type.

    For a sharded tensor, `shape` is the shape of this rank's part. `placements` are `["shard", dimension]` or
    `["replicate"]`, `mesh` is the shape of its mesh, and `whole` the shape and strides of the tensor.
    """

    at: int
    shape: list[int]
    dtype: str
    placements: list[list[Any]] | None = None
    mesh: list[int] | None = None
    whole: list[list[int]] | None = None


class Packed:
    """A state as tensors and JSON. Raises UsageError for values that cannot be kept."""

    def __init__(self, state: Fields) -> None:
        self.tensors: list[Tensor] = []
        self.size = 0
        self._places: list[Place] = []
        self._numbers: dict[object, int] = {}
        values = {name: self._value(values_of(value)) for name, value in state.items()}
        document = {"places": [astuple(place) for place in self._places], "values": values}
        self.values = json.dumps(document).encode()

    def _value(self, found: object) -> object:
        if found is None or isinstance(found, bool | int | float | str):
            return found
        if isinstance(found, Tensor):
            return {"tensor": self._number(found)}
        if isinstance(found, Mapping):
            pairs = [[self._value(key), self._value(value)] for key, value in found.items()]
            versions = getattr(found, "_metadata", None)
            return {"dict": pairs} if versions is None else {"module": [pairs, self._value(versions)]}
        if isinstance(found, tuple):
            return {"tuple": [self._value(each) for each in found]}
        if isinstance(found, list):
            return [self._value(each) for each in found]
        if isinstance(found, bytes):
            return {"bytes": found.hex()}
        if isinstance(found, numpy.ndarray | numpy.generic) and found.dtype.kind in "biufc":
            if isinstance(found, numpy.generic):
                return self._value(found.item())
            native = numpy.asarray(found, found.dtype.newbyteorder("="), order="C")
            return {"array": self._number(torch.from_numpy(native))}
        raise UsageError(
            f"A value of type {type(found).__name__} cannot be kept in memory. A state can contain tensors, "
            "arrays, numbers, strings, lists, tuples and dicts."
        )

    def _number(self, found: Tensor) -> int:
        local, parted = (local_part(found), True) if is_sharded(found) else (found, False)
        local = local.detach()
        if local.layout is not torch.strided or local.is_quantized:
            raise UsageError(
                f"A tensor of layout {local.layout} cannot be kept in memory. Convert it to a dense tensor."
            )
        lazy = (local.is_conj(), local.is_neg())  # such tensors share memory but have other values
        same = (local.data_ptr(), local.shape, local.stride(), local.dtype, local.device, parted, lazy)
        number = self._numbers.get(same) if local.numel() else None
        if number is None:
            number = len(self.tensors)
            place = Place(_FIRST + self.size, list(local.shape), str(local.dtype).removeprefix("torch."))
            self._places.append(replace(place, **_sharding(found)) if parted else place)
            self.tensors.append(local)
            self.size += _aligned(local.nbytes)
            self._numbers[same] = number
        return number


def _sharding(found: Any) -> Document:
    spec = found._spec
    placements = []
    for each in spec.placements:
        if each.is_shard() and type(each).__name__ == "Shard":
            placements.append(["shard", each.dim])
        elif each.is_replicate():
            placements.append(["replicate"])
        else:
            raise UsageError(
                f"A tensor with the placement {each} cannot be kept in memory. Use Shard or Replicate."
            )
    whole = [list(found.shape), list(found.stride())]
    return {"placements": placements, "mesh": list(spec.mesh.shape), "whole": whole}


def _unpacked(values: bytes, memory: mmap.mmap, meshes: Callable[[], Meshes]) -> Document:
    """Return the state in new memory."""
    document = json.loads(values)
    tensors = [_read(memory, Place(*fields), meshes) for fields in document["places"]]

    def value(found: object) -> object:
        if isinstance(found, list):
            return [value(each) for each in found]
        if not isinstance(found, dict):
            return found
        ((kind, content),) = found.items()
        if kind == "dict":
            return {value(key): value(each) for key, each in content}
        if kind == "module":
            state = OrderedDict((value(key), value(each)) for key, each in content[0])
            state._metadata = value(content[1])  # type: ignore[attr-defined]
            return state
        if kind == "tuple":
            return tuple(value(each) for each in content)
        if kind == "bytes":
            return bytes.fromhex(content)
        return tensors[content].numpy() if kind == "array" else tensors[content]

    return {name: value(each) for name, each in document["values"].items()}


Meshes = dict[Integers, Any]
"""Device meshes by their shapes."""


def _read(memory: mmap.mmap, place: Place, meshes: Callable[[], Meshes]) -> Tensor:
    own = _view(memory, place.at, torch.Size(place.shape), getattr(torch, place.dtype)).clone()
    if place.placements is None or place.mesh is None or place.whole is None:
        return own
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = meshes().get(tuple(place.mesh))
    if mesh is None:
        raise CheckpointError(
            f"The state in memory is sharded over {place.mesh} ranks, but the loaded state is not"
        )
    placements = [Shard(each[1]) if each[0] == "shard" else Replicate() for each in place.placements]
    shape, stride = place.whole
    own = own.to(mesh.device_type)
    return DTensor.from_local(
        own, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def meshes_of(state: Fields) -> Meshes:
    """Return the meshes of the state's sharded tensors."""
    meshes: Meshes = {}

    def collect(found: object) -> None:
        if isinstance(found, Mapping):
            for each in found.values():
                collect(each)
        elif isinstance(found, Tensor) and is_sharded(found):
            mesh = found._spec.mesh  # type: ignore[attr-defined]  # a DTensor's
            meshes[tuple(mesh.shape)] = mesh

    collect({name: values_of(value) for name, value in state.items()})
    return meshes
