"""Feeds: what a program is given, declared by name, shape and type, and checked before anything is computed.
Knows values and slots; leaves programs and devices to others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.data.batch import Bag, Batch
from trainers.data.slots import Slot
from trainers.errors import UsageError

Fed = Tensor | Bag
"""The value of a feed; a Bag for one with lod_level=1."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Data:
    """A feed as it was declared: see `data`."""

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    lod_level: int
    joins: tuple[str, ...]

    def __str__(self) -> str:
        kind = "any number of values per example" if self.lod_level else f"shape {_shown(self.shape)}"
        return f"{self.name!r} ({_name(self.dtype)}, {kind})"

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of a data set's line that this feed takes: data sets ask for them in `use_var`.

        Raises UsageError for a feed that no line of text can hold: of another type than int64 and float32, or
        of more than one dimension without a size.
        """
        if any(size is None for size in self.shape[1:]) or self.shape[:1] != (None,):
            raise UsageError(
                f"feed {self} cannot be in a data set: only its first dimension may have any size"
            )
        if self.lod_level:
            return (Slot(self.name, self.dtype, None),)
        if len(self.joins) > 1:
            each = self._width // len(self.joins)
            return tuple(Slot(name, self.dtype, each) for name in self.joins)
        return (Slot(self.joins[0], self.dtype, self._width),)

    @property
    def _width(self) -> int:
        """Values per example."""
        return math.prod(size or 1 for size in self.shape[1:])

    def checked(self, value: Any) -> Fed:
        """A value to feed as tensor: an array or a tensor of the declared type, or numbers, which become it.

        It shares the memory of what was given where torch can. Raises UsageError naming the feed, what was
        given and what was declared.
        """
        if self.lod_level:
            return self._bag(value)
        tensor = _tensor(value, self)
        if tensor.dtype != self.dtype:
            if isinstance(value, Tensor | np.ndarray) or not torch.can_cast(tensor.dtype, self.dtype):
                raise self._unlike(f"{_name(tensor.dtype)}; cast it first")
            whole, tensor = tensor, tensor.to(self.dtype)
            if not self.dtype.is_floating_point and not torch.equal(tensor.to(whole.dtype), whole):
                raise self._unlike(f"numbers from {whole.min()} to {whole.max()}")
        if not _fits(tuple(tensor.shape), self.shape):
            raise self._unlike(f"shape {_shown(tuple(tensor.shape))}")
        return tensor

    def of(self, batch: Batch) -> Fed:
        """This feed's part of a data set's batch, (examples, ...) in the declared shape.

        Raises UsageError when the batch has no such slot, or one of another length or type.
        """
        if self.lod_level:
            return self._bag(batch.bag(self.joins[0]))
        tensor = batch.joined(*self.joins) if len(self.joins) > 1 else batch.tensor(self.joins[0])
        sizes = (len(batch), *(size or -1 for size in self.shape[1:]))
        if -1 not in sizes and tensor.shape[1] == self._width:
            tensor = tensor.reshape(sizes)
        return self.checked(tensor)

    def _bag(self, value: Any) -> Bag:
        if not isinstance(value, Bag):
            raise self._unlike(f"{_kind(value)}; give a trainers.data.batch.Bag of values and offsets")
        if value.values.dtype != self.dtype:
            raise self._unlike(f"values of {_name(value.values.dtype)}")
        return value

    def _unlike(self, what: str) -> UsageError:
        return UsageError(f"feed {self} was given {what}")


def data(
    name: str,
    shape: Sequence[int | None],
    dtype: str | torch.dtype = "float32",
    lod_level: int = 0,
    *,
    joins: Sequence[str] = (),
) -> Data:
    """Declare a feed. `shape`: None (or Paddle's -1) is any size, such as that of the batch. `dtype`: of
    torch, or its name. `lod_level=1`: any number of values per example, as a `Bag`; its shape is [None, 1].
    `joins`: of a data set's batch the feed takes these slots side by side; by default the one slot that has
    its name.

    Raises UsageError for what cannot be declared.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"static.data has name {name!r}; a feed is found by its name")
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in _DTYPES.values():
        raise UsageError(f"feed {name!r} has dtype {dtype!r}; it must be one of {', '.join(_DTYPES)}")
    if isinstance(shape, int | str) or not all(_is_size(size) for size in shape):
        raise UsageError(f"feed {name!r} has shape {shape!r}; give sizes of at least 0, None for any size")
    sizes = tuple(None if size in (None, -1) else size for size in shape)
    if lod_level not in (0, 1):
        raise UsageError(f"feed {name!r} has lod_level {lod_level!r}; 0 is a tensor and 1 a Bag")
    if lod_level and sizes not in ((None,), (None, 1)):
        raise UsageError(f"feed {name!r} has lod_level 1 and shape {_shown(sizes)}; its shape is [None, 1]")
    made = Data(name, sizes, found, lod_level, tuple(joins) or (name,))
    if len(made.joins) > 1 and (len(sizes) != 2 or made._width % len(made.joins)):
        raise UsageError(f"feed {made} joins {len(joins)} slots; its second size must be a multiple of that")
    return made


def _is_size(size: object) -> bool:
    return size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= -1)


def _tensor(value: Any, feed: Data) -> Tensor:
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch has no tensors that may not be written to
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise UsageError(
            f"feed {feed} was given {_kind(value)}, of which torch makes no tensor: {problem}"
        ) from problem


def _fits(found: tuple[int, ...], declared: tuple[int | None, ...]) -> bool:
    same = len(found) == len(declared)
    return same and all(wanted in (None, size) for size, wanted in zip(found, declared, strict=True))


def _shown(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
