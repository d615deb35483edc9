"""The ids of a KeyedJaggedTensor, for a collection of TorchRec whose tables are on servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trainers.kernels.compiled import Keys
from trainers.ps.kernels.bags import KEY, are_bounds
from trainers.ps.kernels.batch import array_of
from trainers.ps.trainer.group import Batch, TableGroup
from trainers.ps.trainer.remote import same_ids, version_of
from trainers.ps.trainer.staging import flat_ids, staging_of


@dataclass(slots=True, eq=False)
class Jagged:
    """The ids of a KeyedJaggedTensor."""

    keys: tuple[str, ...]
    bags: int
    """The number of bags of each key."""
    ids: Tensor
    given: Tensor
    """The lengths or the limits of bags, from which `bounds` is made."""
    bounds: Keys
    """The limits of the bags of all keys, see `kernels.bags`."""
    flat: Tensor = field(init=False)
    """The ids as int64 in this process's memory."""
    version: bytes | int = field(init=False)
    starts: Keys = field(init=False)
    """The first id of each key, and the number of ids."""

    def __post_init__(self) -> None:
        (self.flat,) = flat_ids([self.ids], staging_of(self.ids.device))
        self.version = version_of(self.ids)
        self.starts = self.bounds[np.arange(len(self.keys) + 1) * self.bags]

    def is_of(self, keys: Sequence[str], ids: Tensor, given: Tensor) -> bool:
        """Return True for the same tensors, unless they have changed since."""
        return (
            same_ids(self.ids, ids)
            and same_ids(self.given, given)
            and self.keys == tuple(keys)
            and self.version == version_of(ids)
            and are_bounds(as_keys(given), len(given) < len(self.bounds), self.bounds)
        )


class JaggedBatch(Batch):
    """The ids of the features of a collection in one group. `of` (features, 6) describes them for the
    kernels.
    """

    def __init__(self, features: Features, jagged: Jagged, *, insert: bool) -> None:
        self.features, self.jagged = features, jagged
        keys = features.keys_among(jagged.keys)
        begins, sizes = jagged.starts[keys], jagged.starts[keys + 1] - jagged.starts[keys]
        addresses = jagged.flat.data_ptr() + 8 * begins
        self._find(features.group, features.tables, addresses, sizes, insert=insert)
        self.firsts = self.ends[features.tables]
        self.of = np.stack(
            [keys, begins - self.starts[:-1], self.firsts, np.full(len(keys), -1), *features.columns], axis=1
        )

    def _ids(self) -> Sequence[Tensor]:
        found = self.jagged.flat.tensor_split(self.jagged.starts[1:-1].tolist())
        return [found[key] for key in self.of[:, KEY].tolist()]

    def check_ids(self) -> None:
        """Raise IndexError for an id that its table cannot have."""
        for table in np.flatnonzero(self.outside >= 0).tolist():
            for call, name in zip(self.every, self.features.names, strict=True):
                if call.table == table and (self.place[call.start : call.stop] == self.outside[table]).any():
                    key = int(self.keys[self.ends[table] + self.outside[table]])
                    self._group.refuse(table, key, f" for the feature {name!r}")


class Features:
    """The features of a collection whose tables are in one group, in the order of the tables. `columns` has
    for each feature its first column in the output, and whether the output is a mean.
    """

    def __init__(
        self, group: TableGroup, names: Sequence[str], tables: Sequence[int], columns: Sequence[Sequence[int]]
    ) -> None:
        self.group, self.names = group, names
        self.tables, self.columns = np.array(tables, np.int64), np.array(columns, np.int64)
        seen = [
            table for table in np.unique(self.tables).tolist() if not group.tables[table].sparse.in_backward
        ]
        self.weights = {table: group.weights[table] for table in seen}
        """The weights that autograd must know, by table. Gradients of other tables are never seen."""
        self.trains = True
        """True if the last call was in training, with gradients."""
        self._known: tuple[tuple[str, ...], Keys] = (), self.tables

    def keys_among(self, keys: tuple[str, ...]) -> Keys:
        """Return the number of each feature's key. Raises KeyError for a missing key."""
        if self._known[0] != keys:
            number = {key: place for place, key in enumerate(keys)}
            self._known = keys, np.array([number[name] for name in self.names], np.int64)
        return self._known[1]

    def batch(self, jagged: Jagged) -> JaggedBatch:
        """Return a new batch, in training or not as the last call."""
        return JaggedBatch(self, jagged, insert=self.trains)

    def take(self, keys: Sequence[str], ids: Tensor, given: Tensor) -> JaggedBatch | None:
        """Return the batch that was prepared for these tensors, if its rows are recent."""
        group = self.group
        for place, batch in enumerate(group.prepared):
            if (
                isinstance(batch, JaggedBatch)
                and batch.features is self
                and batch.jagged.is_of(keys, ids, given)
            ):
                del group.prepared[place]
                request = batch.request
                late = request.as_of is None or group.as_of - request.as_of > group.late
                return None if late or request.insert is not self.trains else batch
        return None


def as_keys(tensor: Tensor) -> Keys:
    """Return the numbers of a tensor as an int64 array."""
    return array_of(tensor.detach().to("cpu", torch.int64))
