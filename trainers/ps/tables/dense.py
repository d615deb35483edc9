"""DenseTable: a block of a dense parameter with its optimizer state. Knows memory; leaves the network and
averaging over trainers to others.
"""

from __future__ import annotations

import torch

from trainers.ps.kernels.arrays import array_of
from trainers.ps.kernels.finite import all_finite
from trainers.ps.tables.cut import DenseCut, DenseRows
from trainers.ps.tables.errors import KeysError, NotFiniteError, ShapeError, TableError
from trainers.ps.tables.rules import Fixed
from trainers.ps.tables.spec import TableSpec
from trainers.ps.tables.updates import Floats, block_kernel_of, block_numbers_of


class DenseTable:
    """(size,) float32, zeros at first. The verbs of SparseTable; `keys` and `stats` are None."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.step = 0
        self._values = torch.zeros(spec.size)
        self.state = [torch.full((spec.size,), spec.rule.initial_state) for _ in range(spec.rule.states)]
        self._kernel = block_kernel_of(spec.rule)
        self._shared = [tensor.numpy() for tensor in (self._values, *self.state)]

    def __len__(self) -> int:
        return self.spec.size

    def fits(self, keys: torch.Tensor | None, values: torch.Tensor) -> None:
        if keys is not None:
            raise KeysError(f"table {self.spec.name!r} is dense and has no keys")
        if values.shape != (self.spec.size,):
            raise ShapeError(
                f"table {self.spec.name!r} has {self.spec.size} elements, not {list(values.shape)}"
            )

    def assign(self, keys: torch.Tensor | None, values: torch.Tensor) -> None:
        """New values; the optimizer state stays."""
        self.fits(keys, values)
        self._values.copy_(values)

    def pull(self, keys: torch.Tensor | None = None, *, insert: bool = True) -> torch.Tensor:
        """A copy: a reply may still be on its way when the next update comes."""
        if keys is not None:
            raise KeysError(f"table {self.spec.name!r} is dense and has no keys")
        return self._values.clone()

    @property
    def values(self) -> torch.Tensor:
        """What the next update will change; to be read only."""
        return self._values

    def check(self, keys: torch.Tensor | None, grad: torch.Tensor, stats: torch.Tensor | None = None) -> None:
        """Raises TableError for what `apply` would not take, and for NaN or infinity."""
        self.fits(keys, grad)
        if stats is not None:
            raise ShapeError(f"table {self.spec.name!r} is dense and keeps no statistics")
        if isinstance(self.spec.rule, Fixed):
            raise TableError(f"table {self.spec.name!r} is not trained: its parameter is in no optimizer")
        if not all_finite(grad):
            raise NotFiniteError(f"a gradient for table {self.spec.name!r} has NaN or infinity")

    def apply(
        self, keys: torch.Tensor | None, grad: torch.Tensor, lr: float, stats: torch.Tensor | None = None
    ) -> None:
        self.update(array_of(grad), lr)

    def update(self, grad: Floats, lr: float) -> None:
        """`apply` with an array that lies as kernels want it."""
        self.step += 1
        if self._kernel is None:
            self.spec.rule.update(self._values, torch.from_numpy(grad), self.state, self.step, lr)
        else:
            numbers = block_numbers_of(self.spec.rule, self.step, lr)
            self._kernel(self._shared[0], grad, *self._shared[1:], numbers)

    def cut(self) -> DenseCut:
        """A copy of everything as of now."""
        rows = DenseRows(self._values.clone(), tuple(state.clone() for state in self.state))
        return DenseCut(rows, self.step)

    def load(self, rows: DenseRows) -> None:
        """Values and state, as a cut gave them. The step is set apart from this."""
        self.fits(None, rows.values)
        if [tuple(state.shape) for state in rows.state] != [(self.spec.size,)] * len(self.state):
            raise ShapeError(f"table {self.spec.name!r} has {len(self.state)} states of {self.spec.size}")
        self._values.copy_(rows.values)
        for mine, theirs in zip(self.state, rows.state, strict=True):
            mine.copy_(theirs)
