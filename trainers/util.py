"""Exchange values between trainers outside the training (`fleet.util`), and define their wire format.

A value travels as a line of JSON and the bytes of its elements. The runtime sends it through
torch.distributed, or through the first parameter server.

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

# ---- The wire format of values, a line of JSON and bytes

MODES: dict[str, tuple[str, Callable[..., object]]] = {
    "sum": ("add", sum),
    "max": ("maximum", max),
    "min": ("minimum", min),
}
"""The function for two values, as named by torch and numpy, and the function for several plain numbers."""


@frozen
class Payload:
    """A value of one trainer.

    `call` is the call with its arguments in words. `kind` is number, text, list, array or tensor.
    """

    call: str
    kind: str
    type: str
    shape: Integers
    value: Any = field(compare=False)

    @property
    def words(self) -> str:
        shape = f" of shape {list(self.shape)}" if self.kind in ("array", "tensor", "list") else ""
        return f"a {self.kind}{shape} of {self.type}" if self.type else f"a {self.kind}{shape}"


def packed(value: object, call: str) -> bytes:
    """Encode a value. Raises UsageError unless it is a number, a text, a list of numbers, an array or
    a tensor.
    """
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
    """Return the sum, maximum or minimum of all trainers' values in rank order, with their kind and type.

    Sums of floats are computed in float64. Raises UsageError on all trainers if the values differ in kind.
    """
    first = each[0]
    for rank, other in enumerate(each):
        if other != first:
            raise UsageError(
                f"fleet.util.{first.call} was called with {first.words} on trainer 0, but trainer {rank} "
                f"called {other.call} with {other.words}. Make the same call on all trainers."
            )
    if first.kind == "text":
        raise UsageError(
            f"fleet.util.{first.call} was given a text, which cannot be reduced. Use all_gather."
        )
    values = [payload.value for payload in each]
    if first.kind == "number":
        wrong = [value for value in values if value != value]  # NaN
        return wrong[0] if wrong else MODES[mode][1](values)
    if first.kind == "tensor":
        return _tensors(values, mode)
    arrays = [np.asarray(value) for value in values]
    common = np.result_type(*arrays)  # one trainer's list may have whole numbers, another's fractions
    if first.kind == "list" and common.kind in "iu":
        common = np.dtype(object)  # Python's own integers, which are unbounded
    result = _arrays([array.astype(common, copy=False) for array in arrays], mode)
    return result.tolist() if first.kind == "list" else result


def _listed(value: Sequence[object], call: str) -> Document:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UsageError(f"fleet.util.{call} was given a list of uneven parts: {error}") from error
    if array.dtype.kind not in "biuf":
        raise UsageError(f"fleet.util.{call} was given {value!r}; a list must contain only numbers")
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
    """Exchanges between the trainers of a job, with parameter servers between init_worker and stop_worker.

    All trainers must make the same calls, in synchronous training after the same steps, and get the same
    results.
    """

    def __init__(self, who: Callable[[str], Identity], ready: Callable[[str], _Worker]) -> None:
        self._who = who
        self._ready = ready

    def all_reduce(self, input: T, mode: str = "sum", comm_world: str = "worker") -> T:
        """Return the sum ("max", "min") over all trainers.

        The value is a number, or a list of numbers, an array or a tensor, which are reduced element by
        element. Shape and type must be equal on all trainers, and the result has the same type.

        The result is equal to the last bit on every trainer and in every run, because floats are added in
        float64 and in rank order. Use it for statistics, because each trainer sends its value to all others.
        Raises UsageError on all trainers if their values differ in kind.
        """
        if mode not in MODES:
            raise UsageError(f"fleet.util.all_reduce mode is {mode!r}; it must be one of {', '.join(MODES)}")
        each = self._gather(input, f"all_reduce {mode}", comm_world)
        return cast(T, _beside(reduced(each, mode), input))

    def all_gather(self, input: T, comm_world: str = "worker") -> list[T]:
        """Return every trainer's value, in rank order.

        The values are numbers, texts, lists of numbers, arrays or tensors, whose shapes may differ.
        """
        each = self._gather(input, "all_gather", comm_world)
        # All trainers raise the error if they are in different calls.
        for rank, other in enumerate(each):
            if other.call != each[0].call:
                raise UsageError(
                    f"Trainer 0 called fleet.util.{each[0].call}, but trainer {rank} called "
                    f"fleet.util.{other.call}. Make the same call on all trainers."
                )
        return [_beside(payload.value, input) for payload in each]

    def barrier(self, comm_world: str = "worker") -> None:
        """Wait until every trainer is here, as `fleet.barrier_worker()` does."""
        _check_world(comm_world, "barrier")
        self._ready("util.barrier").barrier_worker()

    def get_file_shard(self, files: Sequence[str]) -> list[str]:
        """Return this trainer's share of the files, a block of neighbours.

        The shares of all trainers contain each file once. The first shares are longer by one if the division
        is uneven.
        """
        identity = self._who("util.get_file_shard")
        if identity.is_server:
            raise UsageError("fleet.util.get_file_shard() was called on a server. Call it on trainers.")
        return get_file_shard(files, identity.index, identity.worker_num)

    def print_on_rank(self, message: object, rank_id: int) -> None:
        """Print a line on one trainer only."""
        identity = self._who("util.print_on_rank")
        if not 0 <= rank_id < identity.worker_num:
            raise UsageError(
                f"fleet.util.print_on_rank rank_id is {rank_id}; this job has trainers 0 to "
                f"{identity.worker_num - 1}"
            )
        if not identity.is_server and identity.index == rank_id:
            sys.stdout.write(f"{message}\n")
            sys.stdout.flush()

    def _gather(self, value: object, call: str, comm_world: str) -> list[Payload]:
        name = call.partition(" ")[0]
        _check_world(comm_world, name)
        runtime = self._ready(f"util.{name}")
        return [unpacked(given) for given in runtime.gather(packed(value, call), f"util.{name}")]


def _beside(value: Any, input: object) -> Any:
    """Return a tensor on the device of the input."""
    if isinstance(value, Tensor) and isinstance(input, Tensor):
        return value.to(input.device)
    return value


def _check_world(comm_world: str, call: str) -> None:
    if comm_world in ("server", "all"):
        raise NotSupportedError(
            f"fleet.util.{call} was called with comm_world={comm_world!r}, but servers cannot take part, "
            'because they only answer trainers. Use comm_world="worker".'
        )
    if comm_world != "worker":
        raise UsageError(f'fleet.util.{call} comm_world is {comm_world!r}; it must be "worker"')
