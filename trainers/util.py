"""`fleet.util`: values that trainers exchange outside the training itself, and what they look like on the
way.

A value travels as a line of JSON and the bytes of its elements; the runtime carries it, through
torch.distributed or through the first parameter server:

    {"call": "all_reduce sum", "kind": "tensor", "type": "float32", "shape": [3]}\\n  then the elements' bytes
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from fleetrun.aliases import Document, Integers
from fleetrun.frozen import frozen
from trainers.data.shard import get_file_shard
from trainers.errors import NotSupportedError, UsageError
from trainers.roles.identity import Identity
from trainers.storage.safetensors import view_of

# ---- Values on the way: as a line of JSON and bytes

MODES: dict[str, tuple[str, Callable[..., Any]]] = {
    "sum": ("add", sum),
    "max": ("maximum", max),
    "min": ("minimum", min),
}
"""What makes one of two, as torch and numpy call it, and of several plain numbers."""


@frozen
class Payload:
    """`call`: with what it was given, in words; `kind` is number, text, list, array or tensor."""

    call: str
    kind: str
    type: str
    shape: Integers
    value: Any = field(compare=False)

    @property
    def words(self) -> str:
        shape = f" of shape {list(self.shape)}" if self.kind in ("array", "tensor", "list") else ""
        return f"a {self.kind}{shape} of {self.type}" if self.type else f"a {self.kind}{shape}"


def packed(value: Any, call: str) -> bytes:
    """Raises UsageError for anything else than numbers, texts, lists of numbers, arrays and tensors."""
    content = b""
    header: Document = {"call": call}
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise UsageError(f"fleet.util.{call} needs dense tensors, not {value.layout}")
        header |= {"kind": "tensor", "type": _name(value.dtype), "shape": list(value.shape)}
        content = bytes(view_of(value.cpu().contiguous()))
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        header |= {"kind": "array", "type": array.dtype.str, "shape": list(value.shape)}
        content = array.tobytes()
    elif isinstance(value, str):
        header |= {"kind": "text", "value": value}
    elif isinstance(value, int | float):
        header |= {"kind": "number", "value": value}
    elif isinstance(value, list | tuple):
        header |= _listed(value, call)
    else:
        raise UsageError(
            f"fleet.util.{call} was given {value!r} of type {type(value).__name__}; give a number, a text, a "
            "list of numbers, a numpy array or a tensor"
        )
    return json.dumps(header).encode() + b"\n" + content


def unpacked(data: bytes) -> Payload:
    head, _, content = data.partition(b"\n")
    header = json.loads(head)
    kind, shape, name = header["kind"], tuple(header.get("shape", ())), header.get("type", "")
    value = header.get("value")
    if kind == "tensor":
        raw = torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))
        value = raw.view(getattr(torch, name)).reshape(shape)
    elif kind == "array":
        value = np.frombuffer(bytearray(content), np.dtype(name)).reshape(shape)
        value = value if shape else value[()]  # a numpy number
    return Payload(header["call"], kind, name, shape, value)


def reduced(each: Sequence[Payload], mode: str) -> Any:
    """The sum, maximum or minimum of what all trainers gave, in rank order, of the kind and type that it has.
    Sums of floats are made in float64. Raises UsageError, on all trainers, when they differ.
    """
    first = each[0]
    for rank, other in enumerate(each):
        if other != first:
            raise UsageError(
                f"fleet.util.{first.call} was given {first.words} by trainer 0, and trainer {rank} called "
                f"{other.call} with {other.words}; all must do the same"
            )
    if first.kind == "text":
        raise UsageError(f"fleet.util.{first.call} was given a text; texts can be gathered, not reduced")
    values = [payload.value for payload in each]
    if first.kind == "number":
        wrong = [value for value in values if value != value]  # NaN
        return wrong[0] if wrong else MODES[mode][1](values)
    if first.kind == "tensor":
        return _tensors(values, mode)
    arrays = [np.asarray(value) for value in values]
    common = np.result_type(*arrays)  # lists: one trainer's may be of whole numbers, another's of fractions
    if first.kind == "list" and common.kind in "iu":
        common = np.dtype(object)  # Python's own, which have no bound
    result = _arrays([array.astype(common, copy=False) for array in arrays], mode)
    return result.tolist() if first.kind == "list" else result


def expect_alike(each: Sequence[Payload]) -> None:
    """Raises UsageError, on all trainers, when they are in different calls."""
    for rank, other in enumerate(each):
        if other.call != each[0].call:
            raise UsageError(
                f"trainer 0 called fleet.util.{each[0].call} and trainer {rank} fleet.util.{other.call}; all "
                "must do the same"
            )


def _listed(value: Sequence[Any], call: str) -> Document:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UsageError(f"fleet.util.{call} was given a list of uneven parts: {error}") from error
    if array.dtype.kind not in "biuf":
        raise UsageError(f"fleet.util.{call} was given {value!r}; a list must be of numbers")
    return {"kind": "list", "shape": list(array.shape), "value": array.tolist()}


def _tensors(values: Sequence[Tensor], mode: str) -> Tensor:
    dtype = values[0].dtype
    floats = mode == "sum" and dtype.is_floating_point
    total = _combined(torch, mode, values[0].double() if floats else values[0], values, dtype is torch.bool)
    return cast(Tensor, total.to(dtype))


def _arrays(values: Sequence[Any], mode: str) -> Any:
    dtype = values[0].dtype
    floats = mode == "sum" and dtype.kind == "f"
    total = _combined(
        np, mode, values[0].astype(np.float64) if floats else values[0], values, dtype.kind == "b"
    )
    return total.astype(dtype)


def _combined(library: Any, mode: str, first: Any, values: Sequence[Any], flags: bool) -> Any:
    if flags:
        raise UsageError("fleet.util.all_reduce was given bool; give integers")
    return functools.reduce(getattr(library, MODES[mode][0]), values[1:], first)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- `fleet.util`

T = TypeVar("T")


class _Worker(Protocol):
    """The runtime of a trainer."""

    def barrier_worker(self) -> None: ...

    def gather(self, mine: bytes, call: str) -> list[bytes]: ...


class Util:
    """For the trainers of a job; with parameter servers between init_worker and stop_worker. All trainers
    must come to a call, after the same steps where training is synchronous, and each gets the same answer.
    """

    def __init__(self, who: Callable[[str], Identity], ready: Callable[[str], _Worker]) -> None:
        self._who = who
        self._ready = ready

    def all_reduce(self, input: T, mode: str = "sum", comm_world: str = "worker") -> T:
        """The sum ("max", "min") over all trainers of a number, or element by element of a list of numbers,
        an array or a tensor, whose shape and type must be the same on all of them. The same kind of thing
        again.

        The result is the same to the last bit on every trainer and in every run: floats are added in float64
        and in the order of ranks. For statistics: each trainer sends all it has to all others. Raises
        UsageError, on all trainers, when they differ in what they give.
        """
        if mode not in MODES:
            raise UsageError(f"fleet.util.all_reduce mode is {mode!r}; it must be one of {', '.join(MODES)}")
        each = self._gather(input, f"all_reduce {mode}", comm_world)
        return cast(T, _beside(reduced(each, mode), input))

    def all_gather(self, input: T, comm_world: str = "worker") -> list[T]:
        """What every trainer gives, in rank order: numbers, texts, lists of numbers, arrays or tensors, which
        may be of other shapes on each.
        """
        each = self._gather(input, "all_gather", comm_world)
        expect_alike(each)
        return [_beside(payload.value, input) for payload in each]

    def barrier(self, comm_world: str = "worker") -> None:
        """Wait until every trainer is here: `fleet.barrier_worker()`."""
        _check_world(comm_world, "barrier")
        self._ready("util.barrier").barrier_worker()

    def get_file_shard(self, files: Sequence[str]) -> list[str]:
        """This trainer's share of the files: a block of neighbours. The shares of all trainers are all files,
        each once; the first ones are longer by one where it does not come out even.
        """
        identity = self._who("util.get_file_shard")
        if identity.is_server:
            raise UsageError("fleet.util.get_file_shard() was called on a server, which reads no files")
        return get_file_shard(files, identity.index, identity.worker_num)

    def print_on_rank(self, message: object, rank_id: int) -> None:
        """Print a line on one trainer, and nothing on all others."""
        identity = self._who("util.print_on_rank")
        if not 0 <= rank_id < identity.worker_num:
            raise UsageError(
                f"fleet.util.print_on_rank rank_id is {rank_id}; this job has trainers 0 to "
                f"{identity.worker_num - 1}"
            )
        if not identity.is_server and identity.index == rank_id:
            sys.stdout.write(f"{message}\n")
            sys.stdout.flush()

    def _gather(self, value: Any, call: str, comm_world: str) -> list[Payload]:
        name = call.partition(" ")[0]
        _check_world(comm_world, name)
        runtime = self._ready(f"util.{name}")
        return [unpacked(given) for given in runtime.gather(packed(value, call), f"util.{name}")]


def _beside(value: Any, input: Any) -> Any:
    """A tensor on the device of the one that was given."""
    if isinstance(value, Tensor) and isinstance(input, Tensor):
        return value.to(input.device)
    return value


def _check_world(comm_world: str, call: str) -> None:
    if comm_world in ("server", "all"):
        raise NotSupportedError(
            f"fleet.util.{call} with comm_world={comm_world!r}: servers answer trainers and run nothing of "
            'the script while they do; use comm_world="worker"'
        )
    if comm_world != "worker":
        raise UsageError(f'fleet.util.{call} comm_world is {comm_world!r}; it must be "worker"')
