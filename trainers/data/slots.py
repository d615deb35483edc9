"""Slots: what one example of a data set consists of, and where each value is kept. Knows names, types and
lengths; leaves text to the parser and tensors to the batch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from trainers.errors import UsageError

_TYPES = {
    "float32": "float32",
    torch.float32: "float32",
    "int64": "int64",
    torch.int64: "int64",
}


class Kind(enum.IntEnum):
    """How a slot is kept; the numbers are the parser kernel's."""

    DENSE = 0  # float32, fixed length: columns of one (examples, width) matrix
    IDS = 1  # int64, fixed length: columns of another
    BAG = 2  # int64, any length
    WEIGHTS = 3  # float32, any length


@runtime_checkable
class TakesSlots(Protocol):
    """What `use_var` holds: slots, and other things that take slots, as the feeds of `trainers.static`."""

    @property
    def slots(self) -> tuple[Slot, ...]: ...


UseVar: TypeAlias = Sequence[TakesSlots]
"""Slots in the order of the text."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One named input of the model.

    `dtype` is "int64" (ids) or "float32"; `length` the number of values that every example has, or None
    when it differs from example to example (0 included).
    """

    name: str
    dtype: str | torch.dtype = "int64"
    length: int | None = 1

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a slot has no name; the model finds its input by it")
        if self.dtype not in _TYPES:
            raise UsageError(f"slot {self.name!r} has dtype {self.dtype!r}; it must be float32 or int64")
        if self.length is not None and (isinstance(self.length, bool) or self.length < 1):
            raise UsageError(
                f"slot {self.name!r} has length {self.length!r}; it must be at least 1, or None if it varies"
            )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Itself."""
        return (self,)

    @property
    def kind(self) -> Kind:
        if _TYPES[self.dtype] == "float32":
            return Kind.WEIGHTS if self.length is None else Kind.DENSE
        return Kind.BAG if self.length is None else Kind.IDS


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot is: columns [start, stop) of its kind's matrix; for BAG and WEIGHTS the number among
    slots of that kind.
    """

    kind: Kind
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """All slots in the order of the text, and their places. Pure."""

    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        if not self.slots:
            raise UsageError("use_var is empty; give the slots of a line, in their order")
        names = [slot.name for slot in self.slots]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise UsageError(f"use_var has {doubled[0]!r} twice; every slot needs a name of its own")

    @classmethod
    def of(cls, use_var: UseVar) -> Layout:
        strange = [each for each in use_var if not isinstance(each, TakesSlots)]
        if strange:
            raise UsageError(f"use_var holds {strange[0]!r}; it is a list of trainers.data.slots.Slot")
        return cls(tuple(slot for each in use_var for slot in each.slots))

    @cached_property
    def places(self) -> dict[str, Place]:
        """Name -> place."""
        used = dict.fromkeys(Kind, 0)
        places = {}
        for slot in self.slots:
            start = used[slot.kind]
            used[slot.kind] = start + (slot.length or 1)
            places[slot.name] = Place(slot.kind, start, used[slot.kind])
        return places

    @cached_property
    def widths(self) -> dict[Kind, int]:
        """Columns of each kind's matrix; for BAG and WEIGHTS the number of such slots."""
        places = self.places.values()
        return {kind: max((p.stop for p in places if p.kind is kind), default=0) for kind in Kind}

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """Each slot's kind, in order."""
        return np.array([int(slot.kind) for slot in self.slots], dtype=np.int64)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Each slot's fixed length, or -1."""
        return np.array([-1 if slot.length is None else slot.length for slot in self.slots], dtype=np.int64)

    @cached_property
    def counted(self) -> dict[Kind, NDArray[np.int64]]:
        """Which columns of the matrix of counts belong to the slots of any length, by kind."""
        varying = [slot.kind for slot in self.slots if slot.length is None]
        return {
            kind: np.array([i for i, found in enumerate(varying) if found is kind], dtype=np.int64)
            for kind in (Kind.BAG, Kind.WEIGHTS)
        }

    @property
    def varying(self) -> int:
        """Slots of any length."""
        return self.widths[Kind.BAG] + self.widths[Kind.WEIGHTS]

    def __str__(self) -> str:
        words = (f"{slot.name}:{_TYPES[slot.dtype]}[{slot.length or 'any'}]" for slot in self.slots)
        return " ".join(words)
