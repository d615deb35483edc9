"""Define slots, the named parts of an example, and batches of examples as tensors by slot name.

`Layout` defines where each value is stored. The parser reads the text, and the data set finds the values.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetrun.aliases import Strings
from fleetrun.frozen import frozen
from trainers.data.positions import Records
from trainers.errors import UsageError

# ---- Slots and their layout

_TYPES = {
    "float32": "float32",
    torch.float32: "float32",
    "int64": "int64",
    torch.int64: "int64",
}


class Kind(enum.IntEnum):
    """How a slot is stored. The numbers match the parser kernel."""

    DENSE = 0  # float32, fixed length, as columns of one (examples, width) matrix
    IDS = 1  # int64, fixed length, as columns of another matrix
    BAG = 2  # int64, any length
    WEIGHTS = 3  # float32, any length


@runtime_checkable
class TakesSlots(Protocol):
    """An entry of `use_var`, such as a slot or a feed of `trainers.static`, which has slots."""

    @property
    def slots(self) -> tuple[Slot, ...]: ...


UseVar = Sequence[TakesSlots]
"""Slots in the order of the text."""


@frozen
class Slot:
    """One named input of the model.

    `dtype` is "int64" (ids) or "float32". `length` is the number of values of every example, or None if it
    differs between examples (0 included).
    """

    name: str
    dtype: str | torch.dtype = "int64"
    length: int | None = 1

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("A slot has no name. Set a name, by which the model finds the input.")
        if self.dtype not in _TYPES:
            raise UsageError(f"Slot {self.name!r} has dtype {self.dtype!r}; it must be float32 or int64")
        if self.length is not None and (isinstance(self.length, bool) or self.length < 1):
            raise UsageError(
                f"Slot {self.name!r} has length {self.length!r}; it must be at least 1, or None if it varies"
            )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """A tuple of the slot itself."""
        return (self,)

    @property
    def kind(self) -> Kind:
        if _TYPES[self.dtype] == "float32":
            return Kind.WEIGHTS if self.length is None else Kind.DENSE
        return Kind.BAG if self.length is None else Kind.IDS


@frozen
class Place:
    """The position of a slot, columns [start, stop) of its kind's matrix.

    For BAG and WEIGHTS, it is the number among slots of that kind.
    """

    kind: Kind
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """All slots in the order of the text, and their places."""

    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        if not self.slots:
            raise UsageError("use_var is empty. Pass the slots of a line in their order.")
        names = [slot.name for slot in self.slots]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise UsageError(f"use_var has {doubled[0]!r} twice; each slot needs a different name")

    @classmethod
    def of(cls, use_var: UseVar) -> Layout:
        strange = [each for each in use_var if not isinstance(each, TakesSlots)]
        if strange:
            raise UsageError(
                f"use_var contains {strange[0]!r}; it must be a list of trainers.data.slots.Slot"
            )
        return cls(tuple(slot for each in use_var for slot in each.slots))

    @cached_property
    def places(self) -> dict[str, Place]:
        """The place of each slot by name."""
        used = dict.fromkeys(Kind, 0)
        places = {}
        for slot in self.slots:
            start = used[slot.kind]
            used[slot.kind] = start + (slot.length or 1)
            places[slot.name] = Place(slot.kind, start, used[slot.kind])
        return places

    @cached_property
    def widths(self) -> dict[Kind, int]:
        """The columns of each kind's matrix. For BAG and WEIGHTS, the number of such slots."""
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
        """The columns of the count matrix that belong to the slots of any length, by kind."""
        varying = [slot.kind for slot in self.slots if slot.length is None]
        return {
            kind: np.array([i for i, found in enumerate(varying) if found is kind], dtype=np.int64)
            for kind in (Kind.BAG, Kind.WEIGHTS)
        }

    @property
    def varying(self) -> int:
        """The number of slots of any length."""
        return self.widths[Kind.BAG] + self.widths[Kind.WEIGHTS]

    def __str__(self) -> str:
        words = (f"{slot.name}:{_TYPES[slot.dtype]}[{slot.length or 'any'}]" for slot in self.slots)
        return " ".join(words)


# ---- A batch: tensors by slot name


class Bag(NamedTuple):
    """Any number of values per example. Example i has values[offsets[i] : offsets[i + 1]].

    `values` is (n,) int64, or float32 for weights. `offsets` is (examples + 1,) int64.
    `torch.nn.EmbeddingBag(..., include_last_offset=True)` accepts both.
    """

    values: Tensor
    offsets: Tensor

    @property
    def ids(self) -> Tensor:
        """A view (examples, 1) of the values, if every example has exactly one. Otherwise raises
        UsageError.
        """
        examples = len(self.offsets) - 1
        if len(self.values) != examples or not bool((self.offsets.diff() == 1).all()):
            raise UsageError(
                f"{examples} examples have {len(self.values)} values, not one each. Use values and offsets."
            )
        return self.values.view(-1, 1)


@frozen(eq=False)
class Batch:
    """Examples as tensors.

    `dense` (n, D) float32 and `ids` (n, I) int64 hold the slots of fixed length, side by side in slot order.
    `bags` and `weights` hold the slots of any length, one after the other, as one Bag of slots x n.

    `batch[name]` returns one slot, a view (n, length) for a slot of fixed length, or else a Bag. `joined`
    returns several id slots together, for one embedding table over all of them. `records` are the records of
    a stream in this batch.
    """

    layout: Layout
    dense: Tensor
    ids: Tensor
    bags: Bag | None = None
    weights: Bag | None = None
    records: Records | None = None

    def __len__(self) -> int:
        return len(self.dense)

    @property
    def names(self) -> Strings:
        """The slot names, in order."""
        return tuple(self.layout.places)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.places

    def __getitem__(self, name: str) -> Tensor | Bag:
        place = self._place(name)
        if place.kind is Kind.DENSE:
            return self.dense[:, place.start : place.stop]
        if place.kind is Kind.IDS:
            return self.ids[:, place.start : place.stop]
        return self._bags(place.kind, place.start, place.stop)

    def tensor(self, name: str) -> Tensor:
        """Return a slot of fixed length, (n, length). Raises UsageError for a slot of any length."""
        found = self[name]
        if isinstance(found, Bag):
            raise UsageError(f"Slot {name!r} has no fixed length. Use batch.bag({name!r}).")
        return found

    def bag(self, name: str) -> Bag:
        """Return a slot as values and offsets, even if its length is fixed."""
        found = self[name]
        if isinstance(found, Bag):
            return found
        steps = torch.arange(len(self) + 1, device=found.device) * found.shape[1]
        return Bag(found.reshape(-1), steps)

    def joined(self, *names: str) -> Tensor:
        """Return id slots of fixed length side by side, (n, sum of lengths) int64.

        Slots of length 1 give (n, slots). The result is a view if the slots are neighbours in slot order,
        else a copy. Raises UsageError for other slots.
        """
        places = [self._place(name, Kind.IDS) for name in names]
        if _are_neighbours(places):
            return self.ids[:, places[0].start : places[-1].stop]
        columns = [column for place in places for column in range(place.start, place.stop)]
        return self.ids[:, columns]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on another device."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        bags, weights = (
            None if bag is None else Bag(moved(bag.values), moved(bag.offsets))
            for bag in (self.bags, self.weights)
        )
        return Batch(self.layout, moved(self.dense), moved(self.ids), bags, weights, self.records)

    def _place(self, name: str, wanted: Kind | None = None) -> Place:
        place = self.layout.places.get(name)
        if place is None:
            raise UsageError(f"The batch has no slot {name!r}; its slots are {', '.join(self.names)}")
        if wanted is not None and place.kind is not wanted:
            raise UsageError(f"Slot {name!r} is {place.kind.name}; this call needs {wanted.name} slots")
        return place

    def _bags(self, kind: Kind, start: int, stop: int) -> Bag:
        """Return slots [start, stop) of a kind, from the Bag of all its slots."""
        every = self.bags if kind is Kind.BAG else self.weights
        assert every is not None, "the layout has such a slot"
        offsets = every.offsets[start * len(self) : stop * len(self) + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return Bag(every.values[first:last], offsets - first)


def _are_neighbours(places: list[Place]) -> bool:
    if not places:
        raise UsageError("No slot was given. Pass the names of the slots to join.")
    return all(left.stop == right.start for left, right in itertools.pairwise(places))
