"""Table: a dense block or sparse rows, with update rule and optimizer state. Knows memory; leaves the
network, averaging over trainers and the choice of a server to others.

A call that is refused (TableError) leaves the table as it was. `keys` is None for a dense block; for a
sparse table it is (n,) int64, strictly ascending, and values or gradients are (n, dim) float32.
"""

from __future__ import annotations

from typing import Protocol

import torch

from trainers.ps.tables.index import KeyIndex
from trainers.ps.tables.rules import Fixed
from trainers.ps.tables.spec import TableKind, TableSpec


class TableError(ValueError):
    """A request that does not fit the table."""


class ShapeError(TableError):
    """Values of another shape than the table's."""


class KeysError(TableError):
    """Keys that are unknown, or not strictly ascending."""


class Table(Protocol):
    """The same verbs for dense blocks and sparse rows. `check` refuses what `apply` would, `fits` what
    `assign` would.
    """

    spec: TableSpec

    def fits(self, keys: torch.Tensor | None, values: torch.Tensor) -> None: ...

    def assign(self, keys: torch.Tensor | None, values: torch.Tensor) -> None: ...

    def pull(self, keys: torch.Tensor | None) -> torch.Tensor: ...

    def check(self, keys: torch.Tensor | None, grad: torch.Tensor) -> None: ...

    def apply(self, keys: torch.Tensor | None, grad: torch.Tensor, lr: float) -> None: ...


def make_table(spec: TableSpec) -> Table:
    return DenseTable(spec) if spec.kind is TableKind.DENSE else SparseTable(spec)


class DenseTable:
    """A block of a dense parameter: (size,) float32."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self._step = 0
        self._values = torch.zeros(spec.size)
        self._state = [torch.full((spec.size,), spec.rule.initial_state) for _ in range(spec.rule.states)]

    def assign(self, keys: torch.Tensor | None, values: torch.Tensor) -> None:
        self.fits(keys, values)
        self._values.copy_(values)

    def pull(self, keys: torch.Tensor | None) -> torch.Tensor:
        if keys is not None:
            raise KeysError(f"table {self.spec.name!r} is dense and has no keys")
        return self._values.clone()  # a reply may still be on its way when the next update comes

    def check(self, keys: torch.Tensor | None, grad: torch.Tensor) -> None:
        self.fits(keys, grad)
        _check_trained(self.spec)

    def apply(self, keys: torch.Tensor | None, grad: torch.Tensor, lr: float) -> None:
        self._step += 1
        self.spec.rule.update(self._values, grad, self._state, self._step, lr)

    def fits(self, keys: torch.Tensor | None, values: torch.Tensor) -> None:
        if keys is not None:
            raise KeysError(f"table {self.spec.name!r} is dense and has no keys")
        if values.shape != (self.spec.size,):
            raise ShapeError(
                f"table {self.spec.name!r} has {self.spec.size} elements, not {list(values.shape)}"
            )


class SparseTable:
    """Rows of (size,) float32 by int64 key. A row exists once it was assigned."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self._step = 0
        self._index = KeyIndex()
        self._values = torch.empty(0, spec.size)
        self._state = [torch.empty(0, spec.size) for _ in range(spec.rule.states)]

    def assign(self, keys: torch.Tensor | None, values: torch.Tensor) -> None:
        self.fits(keys, values)
        slots = self._index.insert(self._ascending(keys))
        self._grow(len(self._index))
        self._values[slots] = values

    def pull(self, keys: torch.Tensor | None) -> torch.Tensor:
        return self._values[self._slots(self._ascending(keys))]

    def check(self, keys: torch.Tensor | None, grad: torch.Tensor) -> None:
        self.fits(keys, grad)
        self._slots(self._ascending(keys))
        _check_trained(self.spec)

    def apply(self, keys: torch.Tensor | None, grad: torch.Tensor, lr: float) -> None:
        self._step += 1  # even for no keys: torch counts the steps of the whole table, wherever its rows live
        slots = self._slots(self._ascending(keys))
        if not len(slots):
            return
        rows = self._values[slots]
        state = [tensor[slots] for tensor in self._state]
        self.spec.rule.update(rows, grad, state, self._step, lr)
        self._values[slots] = rows
        for tensor, part in zip(self._state, state, strict=True):
            tensor[slots] = part

    def _ascending(self, keys: torch.Tensor | None) -> torch.Tensor:
        if keys is None:
            raise KeysError(f"table {self.spec.name!r} is sparse; a request needs keys")
        if len(keys) > 1 and not bool((keys[1:] > keys[:-1]).all()):
            raise KeysError(f"keys of table {self.spec.name!r} must be strictly ascending")
        return keys

    def fits(self, keys: torch.Tensor | None, values: torch.Tensor) -> None:
        wanted = [len(self._ascending(keys)), self.spec.size]
        if list(values.shape) != wanted:
            raise ShapeError(
                f"table {self.spec.name!r} wants rows of shape {wanted}, not {list(values.shape)}"
            )

    def _slots(self, keys: torch.Tensor) -> torch.Tensor:
        slots = self._index.lookup(keys)
        if len(slots) and int(slots.min()) < 0:
            raise KeysError(f"table {self.spec.name!r} has no row for key {int(keys[slots < 0][0])}")
        return slots

    def _grow(self, rows: int) -> None:
        if rows <= len(self._values):
            return
        capacity = max(rows, 2 * len(self._values))
        self._values = _enlarged(self._values, capacity, 0.0)
        self._state = [_enlarged(state, capacity, self.spec.rule.initial_state) for state in self._state]


def _enlarged(tensor: torch.Tensor, capacity: int, fill: float) -> torch.Tensor:
    bigger = torch.full((capacity, tensor.shape[1]), fill)
    bigger[: len(tensor)] = tensor
    return bigger


def _check_trained(spec: TableSpec) -> None:
    if isinstance(spec.rule, Fixed):
        raise TableError(f"table {spec.name!r} is not trained: its parameter is in no optimizer")
