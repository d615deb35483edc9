"""Hold blocks of dense parameters with their optimizer state. Runs of adjacent blocks receive their gradients
as one tensor. This module also selects the kernels of the update rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from trainers.kernels.compiled import Floats, Keys
from trainers.ps.kernels import runs, updates
from trainers.ps.kernels.batch import all_finite, array_of
from trainers.ps.kernels.index import Index
from trainers.ps.kernels.rows import Rows
from trainers.ps.tables.rules import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AnyRule,
    Fixed,
    RMSprop,
    RowWiseAdagrad,
    RowWiseAdam,
    SparseAdam,
    ftrl_lr,
)
from trainers.ps.tables.spec import KeysError, NotFiniteError, ShapeError, TableError, TableSpec
from trainers.ps.tables.storage import DenseCut, DenseRows

# ---- Select the kernel of a rule, and the numbers that the kernel needs.

Kernel = Callable[[Index, Rows, Keys, Floats, Floats, Keys], int]
BlockKernel = Callable[..., None]

_STEPS: dict[type[AnyRule], Callable[..., None]] = {
    SGD: updates.sgd,
    Adagrad: updates.adagrad,
    Adam: updates.adam,
    SparseAdam: updates.sparse_adam,
    FTRL: updates.ftrl,
    RMSprop: updates.rmsprop,
    RowWiseAdagrad: updates.row_wise_adagrad,
    RowWiseAdam: updates.row_wise_adam,
}


def kernel_of(rule: AnyRule) -> Kernel | None:
    """Return the kernel of a rule on rows, or None for Fixed."""
    step = updates.momentum if isinstance(rule, SGD) and rule.momentum else _STEPS.get(type(rule))
    return None if step is None else updates.on_rows(step)


def run_kernel_of(rule: AnyRule) -> Callable[..., int] | None:
    """Return the kernel of a rule over a run of tables, or None for Fixed."""
    kernel = kernel_of(rule)
    return None if kernel is None else runs.run_of(kernel)


def numbers_of(rule: AnyRule, step: int, lr: float) -> tuple[float, ...]:
    """Return the arguments of a rule's kernel after the bounds, at the step-th update of the table."""
    match rule:
        case SGD(momentum=0.0):
            return lr, rule.weight_decay
        case SGD():
            return _momentum_numbers(rule, step, lr)
        case Adam():
            return *_adam_numbers(rule, step, lr), rule.amsgrad
        case RowWiseAdam():
            return _adam_numbers(rule, step, lr)
        case RowWiseAdagrad():
            rate = lr / (1 + (step - 1) * rule.lr_decay)
            return rate, *_decays(rule, rate), rule.eps
        case RMSprop():
            shares = (rule.alpha, 1 - rule.alpha)
            return -lr, rule.weight_decay, *shares, rule.eps, rule.momentum, rule.centered
        case Adagrad():
            return lr / (1 + (step - 1) * rule.lr_decay), rule.weight_decay, rule.eps
        case SparseAdam():
            size = lr * math.sqrt(1 - rule.beta2**step) / (1 - rule.beta1**step)
            return size, 1 - rule.beta1, 1 - rule.beta2, rule.eps
        case FTRL():
            return ftrl_lr(lr), rule.l1, rule.l2, -rule.lr_power, rule.beta
        case _:
            raise AssertionError(f"{rule} has no kernel on rows")


def block_kernel_of(rule: AnyRule) -> BlockKernel | None:
    """Return the kernel of a rule on a dense block, or None to use torch's operations.

    Call the kernel with values, gradient, each state and `block_numbers_of`.
    """
    match rule:
        case SGD(momentum=0.0, weight_decay=0.0):
            return None  # one torch operation starts faster than a kernel
        case SGD(momentum=0.0):
            return updates.sgd_block
        case SGD():
            return updates.momentum_block
        case Adagrad():
            return updates.adagrad_block
        case Adam(amsgrad=0.0):
            return updates.adam_block
        case FTRL(lr_power=-0.5):
            return updates.ftrl_block
        case _:
            return None


def block_numbers_of(rule: AnyRule, step: int, lr: float) -> Floats:
    """Return the last argument of a rule's kernel, at the step-th update of the block."""
    numbers: tuple[float, ...]
    match rule:
        case Adam():
            numbers = _adam_numbers(rule, step, lr)
        case Adagrad():
            numbers = (-lr / (1 + (step - 1) * rule.lr_decay), rule.weight_decay, rule.eps)
        case FTRL():
            numbers = (ftrl_lr(lr), rule.l1, 2 * rule.l2, rule.beta)
        case SGD(momentum=0.0):
            numbers = (-lr, rule.weight_decay)
        case SGD():
            numbers = _momentum_numbers(rule, step, lr)
        case _:
            raise AssertionError(f"{rule} has no kernel on blocks")
    return np.array(numbers, np.float32)


def _momentum_numbers(rule: SGD, step: int, lr: float) -> tuple[float, ...]:
    # torch initializes the buffer with the whole gradient.
    moving = (0.0, 1.0) if step == 1 else (rule.momentum, 1 - rule.dampening)
    used = (rule.momentum, 1.0) if rule.nesterov else (1.0, 0.0)
    return -lr, rule.weight_decay, *moving, *used


def _decays(rule: Adam | RowWiseAdam | RowWiseAdagrad, lr: float) -> tuple[float, float]:
    """Return the share of a value that decoupled weight decay keeps, and the other weight decay."""
    return (1 - lr * rule.weight_decay, 0.0) if rule.decoupled else (1.0, rule.weight_decay)


def _adam_numbers(rule: Adam | RowWiseAdam, step: int, lr: float) -> tuple[float, ...]:
    corrected, root = -lr / (1 - rule.beta1**step), math.sqrt(1 - rule.beta2**step)
    return corrected, *_decays(rule, lr), 1 - rule.beta1, rule.beta2, 1 - rule.beta2, root, rule.eps


class DenseMemory:
    """Values and optimizer state of one dense block or of adjacent ones.

    `values` and each of `state` are (n,) float32.
    """

    def __init__(self, rule: AnyRule, values: Tensor, state: Sequence[Tensor]) -> None:
        self.rule, self.values, self.state = rule, values, state
        self._kernel = block_kernel_of(rule)
        self._arrays = [tensor.numpy() for tensor in (values, *state)]

    @classmethod
    def fresh(cls, rule: AnyRule, size: int) -> DenseMemory:
        """Return `size` zeros with the initial state of the rule."""
        state = [torch.full((size,), rule.initial_state) for _ in range(rule.states)]
        return cls(rule, torch.zeros(size), state)

    def split(self, sizes: Sequence[int]) -> list[DenseMemory]:
        """Return the memory of blocks with these sizes, which must add up to the whole."""
        shares = zip(
            *[tensor.split_with_sizes(list(sizes)) for tensor in (self.values, *self.state)], strict=True
        )
        return [DenseMemory(self.rule, values, state) for values, *state in shares]

    @classmethod
    def joined(cls, parts: Sequence[DenseMemory]) -> DenseMemory | None:
        """Return the memory of adjacent parts, or None if they are not adjacent or have different rules."""
        first, size = parts[0], sum(len(each.values) for each in parts)
        if any(each.rule != first.rule for each in parts):
            return None
        whole = []
        for tensors in zip(*[(each.values, *each.state) for each in parts], strict=True):
            memory, at = tensors[0].untyped_storage().data_ptr(), tensors[0].storage_offset()
            for tensor in tensors:
                if (tensor.untyped_storage().data_ptr(), tensor.storage_offset()) != (memory, at):
                    return None
                at += len(tensor)
            whole.append(tensors[0].as_strided((size,), (1,)))
        return cls(first.rule, whole[0], whole[1:])

    def update(self, grad: Floats, step: int, lr: float) -> None:
        """Make the step-th update with an aligned, contiguous gradient, (n,) float32."""
        if self._kernel is None:
            assert isinstance(self.rule, SGD | Adam | RMSprop | FTRL), self.rule
            self.rule.update(self.values, torch.from_numpy(grad), list(self.state), step, lr)
        else:
            self._kernel(self._arrays[0], grad, *self._arrays[1:], block_numbers_of(self.rule, step, lr))


class DenseTable:
    """A block of (size,) float32 that starts with zeros. See `make_dense` for `memory`. Methods that
    SparseTable has too take None as `keys`.
    """

    def __init__(self, spec: TableSpec, memory: DenseMemory | None = None) -> None:
        self.spec = spec
        self.step = 0
        self.memory = memory or DenseMemory.fresh(spec.rule, spec.size)

    def __len__(self) -> int:
        return self.spec.size

    def check_assign(self, keys: Tensor | None, values: Tensor) -> None:
        if keys is not None:
            raise KeysError(f"table {self.spec.name!r} is dense and has no keys")
        if values.shape != (self.spec.size,):
            raise ShapeError(
                f"table {self.spec.name!r} has {self.spec.size} elements, but was given {list(values.shape)}"
            )

    def assign(self, keys: Tensor | None, values: Tensor) -> None:
        """Set new values. The optimizer state stays."""
        self.check_assign(keys, values)
        self.values.copy_(values)

    revise = assign

    @property
    def values(self) -> Tensor:
        """The values themselves, which the next update changes."""
        return self.memory.values

    @property
    def state(self) -> Sequence[Tensor]:
        """The optimizer state itself."""
        return self.memory.state

    def check(self, grad: Tensor) -> None:
        """Raise TableError for arguments that `apply` would refuse, and for NaN or infinity."""
        self.check_assign(None, grad)
        if isinstance(self.spec.rule, Fixed):
            raise TableError(f"table {self.spec.name!r} is not trained: its parameter is in no optimizer")
        if not all_finite(grad):
            raise NotFiniteError(f"a gradient for table {self.spec.name!r} contains NaN or infinity")

    def apply(self, grad: Tensor, lr: float) -> None:
        """Update the block once."""
        self.memory.update(array_of(grad), self.step + 1, lr)
        self.step += 1

    def cut(self) -> DenseCut:
        """Return a copy of values, state and step."""
        rows = DenseRows(self.values.clone(), tuple(state.clone() for state in self.state))
        return DenseCut(rows, self.step)

    def load(self, rows: DenseRows) -> None:
        """Set values and state from a cut. The step is set separately."""
        self.check_assign(None, rows.values)
        if [tuple(state.shape) for state in rows.state] != [(self.spec.size,)] * len(self.state):
            raise ShapeError(f"table {self.spec.name!r} has {len(self.state)} states of {self.spec.size}")
        self.values.copy_(rows.values)
        for mine, theirs in zip(self.state, rows.state, strict=True):
            mine.copy_(theirs)


def make_dense(specs: Mapping[int, TableSpec]) -> dict[int, DenseTable]:
    """Return blocks by number.

    Blocks with the same rule and consecutive numbers have adjacent memory, so a run of blocks is updated
    together.
    """
    made: dict[int, DenseTable] = {}
    numbers = sorted(specs)
    for _, some in groupby(enumerate(numbers), key=lambda at: (at[1] - at[0], specs[at[1]].rule)):
        run = [number for _, number in some]
        sizes = [specs[number].size for number in run]
        shares = DenseMemory.fresh(specs[run[0]].rule, sum(sizes)).split(sizes)
        made |= {number: DenseTable(specs[number], share) for number, share in zip(run, shares, strict=True)}
    return made


class DenseRun:
    """Adjacent blocks whose gradients come as one tensor of (sum of `sizes`,) float32."""

    def __init__(self, blocks: Sequence[DenseTable]) -> None:
        self._blocks = blocks
        self._trained = not any(isinstance(block.spec.rule, Fixed) for block in blocks)
        self._memory = DenseMemory.joined([block.memory for block in blocks])
        self.sizes = [block.spec.size for block in blocks]

    def check(self, grad: Tensor) -> None:
        """Raise TableError if a block would raise it."""
        if self._trained and all_finite(grad):
            return
        for block, share in zip(self._blocks, grad.split_with_sizes(self.sizes), strict=True):
            block.check(share)

    def apply(self, grad: Tensor, lr: float) -> None:
        """Update every block once."""
        first = self._blocks[0].step
        if self._memory is None or any(block.step != first for block in self._blocks):
            for block, share in zip(self._blocks, grad.split_with_sizes(self.sizes), strict=True):
                block.apply(share, lr)
            return
        self._memory.update(array_of(grad), first + 1, lr)
        for block in self._blocks:
            block.step += 1

    def values(self) -> Tensor:
        """Return a copy of all values, because a reply may still be in flight at the next update."""
        if self._memory is not None:
            return self._memory.values.clone()
        return torch.cat([block.values for block in self._blocks])
