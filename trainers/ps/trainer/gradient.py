"""The gradient of a group of tables. Backward passes collect it until `zero_grad`, and a push merges it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainers.errors import UsageError
from trainers.kernels.compiled import Floats, Keys, Mask
from trainers.ps.kernels.batch import merge_runs
from trainers.ps.tables.run import NOT_IN, Spans
from trainers.ps.trainer.staging import Arriving, Staging
from trainers.ps.trainer.weight import ServedWeight, without_overrides


@dataclass(slots=True, eq=False)
class GroupGradient:
    """The gradient of a group since the last push, each key once, ordered by server and table."""

    spans: Spans
    """The number of keys of each table on each server, (servers, tables) int64. See `tables.run`."""
    keys: Tensor
    """(n,) int64."""
    rows: Tensor
    """(n, dim) float32."""
    stats: Tensor | None = None
    """Shows and clicks, (n, 2) float32, or None."""

    @property
    def cuts(self) -> list[int]:
        """The limits of servers. The keys of server s are at [cuts[s], cuts[s + 1])."""
        return [0, *np.cumsum(np.maximum(self.spans, 0).sum(axis=1)).tolist()]

    def on_servers(self) -> Iterator[tuple[Spans, slice]]:
        """Yield for each server the spans and the slice of its keys."""
        for spans, (start, stop) in zip(self.spans, pairwise(self.cuts), strict=True):
            yield spans, slice(start, stop)


def merged_rows(gradients: Sequence[GroupGradient], values: Sequence[Tensor]) -> tuple[Spans, Tensor, Tensor]:
    """Merge gradients of all servers together, with these values for their rows. See `merge_runs`."""
    return merge_runs(
        [
            (spans, gradient.keys[some], value[some])
            for gradient, value in zip(gradients, values, strict=True)
            for spans, some in gradient.on_servers()
        ]
    )


_Grad = TypeVar("_Grad")
_Reached = TypeVar("_Reached", bound="_Call")


class _Call(Protocol):
    """A call that a backward pass may reach."""

    @property
    def table(self) -> int: ...


class _Batch(Protocol):
    """The ids of some calls. See `group.Batch`."""

    pushed: tuple[Keys, Spans, Keys]
    made: Keys

    @property
    def dim(self) -> int: ...

    @property
    def every(self) -> Sequence[Any]:
        """All calls of the batch."""

    def keys_of(self, calls: Iterable[Any]) -> Mask: ...

    def as_pushed(self, rows: Tensor) -> Floats: ...


@dataclass(slots=True, eq=False)
class Collected:
    """Gradients of the rows of a batch, from the calls that backward passes have reached."""

    batch: _Batch
    reached: set[_Call]
    rows: Floats | None = None
    """The gradients in the order of a push."""
    there: Tensor | None = None
    """The gradients on a device, in the order of the request."""
    arriving: tuple[Arriving, int] | None = None
    """The tensors on their way from the device, and the number of this one among them."""
    sent: bool = False
    """True if a message has these rows, so they must be copied before they change."""
    whole: bool = False
    """True if all calls of the batch are reached, which `reached` then need not contain."""

    @property
    def tables(self) -> set[int]:
        """The tables of the reached calls."""
        if self.whole:
            return set(np.flatnonzero(self.batch.made).tolist())
        return {each.table for each in self.reached}

    def added(self) -> Floats:
        """Return the rows, for gradients to be added."""
        if self.arriving is not None:
            (arriving, number), self.arriving = self.arriving, None
            arrived = self.batch.as_pushed(arriving.wait()[number])
            self.rows = arrived if self.rows is None else self.rows + arrived
            self.sent = False
        if self.rows is None:
            self.rows = np.zeros((len(self.batch.pushed[2]), self.batch.dim), np.float32)
        elif self.sent:
            self.rows = self.rows.copy()
        self.sent = False
        return self.rows

    def gradient(self, held: Mask) -> GroupGradient:
        """Return the gradient of the reached calls, for the servers that hold each table (`held`, (servers,
        tables)).

        The keys of reached calls have a gradient, and the keys of other calls have none.
        """
        _, spans, keys = self.batch.pushed
        rows = self.added() if self.rows is None or self.arriving is not None else self.rows
        made = self.batch.made
        if not self.whole:
            made = np.bincount([each.table for each in self.reached], minlength=len(made))
        if (made == self.batch.made).all():
            self.sent = True
        else:
            kept = self.batch.keys_of(self.reached)
            of_span = np.repeat(np.arange(spans.size), spans.reshape(-1))[kept]
            spans = np.bincount(of_span, minlength=spans.size).reshape(spans.shape)
            keys, rows = keys[kept], rows[kept]
        spans = np.where((made > 0) & held, spans, NOT_IN)
        return GroupGradient(spans, torch.from_numpy(keys), torch.from_numpy(rows))

    def take(self, table: int) -> tuple[Tensor, Tensor]:
        """Remove the gradient of one table, and return its keys (n,) and rows (n, dim)."""
        if self.whole:
            self.reached, self.whole = set(self.batch.every), False
        calls = {each for each in self.reached if each.table == table}
        self.reached -= calls
        kept, rows = self.batch.keys_of(calls), self.added()
        taken = rows[kept]
        rows[kept] = 0.0
        return torch.from_numpy(self.batch.pushed[2][kept]), torch.from_numpy(taken)


Piece = tuple[int, Tensor, Tensor]
"""A table, keys (n,) and rows (n, width)."""


@dataclass(slots=True, eq=False)
class Gradients:
    """The gradients that a group has collected since the last `zero_grad`, for tables with these `weights`
    and `names`.
    """

    weights: Sequence[torch.nn.Parameter]
    names: Sequence[str]
    bounded: Mask
    """True for tables with a fixed number of rows, (tables,) bool."""
    staging: Staging | None
    trained: bool = field(kw_only=True)
    """True if an optimizer has the tables."""
    everything: Any = field(kw_only=True)
    """A node of autograd that runs in a backward pass, unless the pass has `inputs`."""
    returning: set[int] = field(default_factory=set)
    """Tables whose gradients autograd gets, because hooks need them or no optimizer has the tables."""
    batches: list[Collected] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    stats: list[Piece] = field(default_factory=list)
    own: set[int] = field(default_factory=set)
    """Tables whose weights have a gradient of torch's own, which the script has read or set."""
    events: int = 0
    """The number of times that something was collected."""

    def __post_init__(self) -> None:
        if not self.trained:
            self.returning.update(range(len(self.weights)))

    @property
    def tables(self) -> set[int]:
        """The tables with a gradient."""
        reached = set[int]().union(*(each.tables for each in self.batches))
        # After a hook that raised, or for a weight that was frozen meanwhile, torch has kept no gradient.
        return reached | {table for table, *_ in self.pieces} | {table for table, _ in self._owned()}

    @property
    def state(self) -> tuple[int, ...]:
        """A value that changes whenever a gradient is added, changed or removed."""
        return self.events, *(own._version for _, own in self._owned())

    def of(self, batch: _Batch, calls: Sequence[_Call] | None) -> Collected:
        """Return the object that collects the gradients of these calls of a batch, or of all if `calls` is
        None. Create it if it is missing.
        """
        self.events += 1
        found = next((each for each in self.batches if each.batch is batch), None)
        if found is None:
            found = Collected(batch, set())
            self.batches.append(found)
        found.whole |= calls is None
        found.reached.update(calls or ())
        return found

    @property
    def accumulates(self) -> bool:
        """True if a backward pass collects the gradients of all calls that it reaches."""
        if ServedWeight.wanted or ServedWeight.followed or self.returning:
            return False
        with without_overrides():
            trained = all(weight.requires_grad for weight in self.weights)
        return trained and bool(torch._C._will_engine_execute_node(self.everything))

    def accumulating(
        self, reached: Sequence[tuple[_Reached, _Grad]]
    ) -> tuple[Sequence[tuple[_Reached, _Grad]], Sequence[tuple[_Reached, _Grad]]]:
        """Return the reached calls whose gradients are collected, and the reached calls whose gradients
        autograd gets.

        Other calls have no gradient, because torch.autograd.grad or `inputs` of backward() left their weights
        out.
        """
        if ServedWeight.wanted:
            return [], [each for each in reached if self.bounded[each[0].table]]
        with without_overrides():
            reached = [each for each in reached if self._trains(each[0].table)]
        if not torch._C._will_engine_execute_node(self.everything):
            reached = [each for each in reached if self._is_wanted(each[0].table)]
        if not (self.returning or ServedWeight.followed):
            return reached, []
        own = [each for each in reached if self._returns(each[0].table)]
        return [each for each in reached if not self._returns(each[0].table)], own

    def _returns(self, table: int) -> bool:
        """Return True if autograd gets the gradients of this table."""
        return table in self.returning or (ServedWeight.followed and bool(self.bounded[table]))

    def _trains(self, table: int) -> bool:
        """Return True if a backward pass gives the weight a gradient.

        A weight that was frozen after the forward pass gets none. A gradient without a shape is only useful
        to servers.
        """
        return self.weights[table].requires_grad and (self.trained or bool(self.bounded[table]))

    def _is_wanted(self, table: int) -> bool:
        return bool(torch._C._will_engine_execute_node(leaf_of(self.weights[table])))

    def own_gradient(self, table: int, keys: Tensor, rows: Tensor) -> Tensor:
        """Return a gradient for autograd, which becomes torch's own `grad` of the weight."""
        weight = self.weights[table]
        if not isinstance(weight, ServedWeight):
            raise AssertionError("only the weights of served modules have hooks")
        if not ServedWeight.wanted:
            self.keep(table)
        return weight.sparse(keys, rows)

    def add(self, table: int, keys: Tensor, rows: Tensor) -> None:
        """Collect the gradient of these rows."""
        self.events += 1
        self.pieces.append((table, keys, rows))

    def collect(self, table: int, keys: Tensor, rows: Tensor) -> Tensor | None:
        """Collect or return the gradient. See `RemoteTable.collect`."""
        with without_overrides():
            if not (ServedWeight.wanted or self._trains(table)):
                return None
        if ServedWeight.wanted and not self.bounded[table]:
            return None
        if ServedWeight.wanted or self._returns(table):
            return self.own_gradient(table, keys, rows)
        if torch._C._will_engine_execute_node(self.everything) or self._is_wanted(table):
            self.add(table, keys, rows)
        return None

    def take(self, table: int) -> tuple[Tensor, Tensor] | None:
        """Remove what was collected for one table, and return its keys (n,) and rows (n, dim)."""
        batches = [each for each in self.batches if table in each.tables]
        pieces = [(keys, rows) for place, keys, rows in self.pieces if place == table]
        if not (batches or pieces):
            return None
        if away := [each for each in batches if each.there is not None]:
            begin_copy(away, self.staging)
        found = [each.take(table) for each in batches] + pieces
        self.pieces = [each for each in self.pieces if each[0] != table]
        self.batches = [each for each in self.batches if each.whole or each.reached]
        return torch.cat([keys for keys, _ in found]), torch.cat([rows for _, rows in found])

    def keep(self, table: int) -> None:
        """Record that the weight has a gradient of torch's own."""
        self.own.add(table)
        self.events += 1

    def drop(self, table: int) -> None:
        """Forget the gradient of one table."""
        self.take(table)
        self.own.discard(table)
        self.events += 1
        self.stats = [each for each in self.stats if each[0] != table]

    def unscale(self, scale: float) -> bool:
        """Divide the collected gradients by `scale`. Return True if all of them are finite."""
        some = [each for each in self.batches if each.rows is not None]
        found = [torch.from_numpy(each.added()) for each in some]
        found += [each.there for each in self.batches if each.there is not None]
        # Copy, because a message may have these rows.
        self.pieces = [(table, keys, rows.clone()) for table, keys, rows in self.pieces]
        found += [rows for *_, rows in self.pieces]
        found += [own._values() for _, own in self._owned() if own.is_sparse]
        for rows in found:
            rows.mul_(1 / scale)
        return all(bool(rows.isfinite().all()) for rows in found)

    def clear(self, dim: int, *, set_to_none: bool) -> None:
        """Forget all gradients. Without `set_to_none`, each table that had a gradient gets one without rows,
        (0, dim), which counts as a step of the table.
        """
        emptied = [] if set_to_none else sorted(self.tables)
        for table, _ in self._owned():
            weight = self.weights[table]
            if isinstance(weight, ServedWeight):
                weight.set_own(None)
        self.batches, self.stats, self.own, self.events = [], [], set(), len(emptied)
        empty = torch.empty(0, dtype=torch.int64), torch.empty(0, dim)
        self.pieces = [(table, *empty) for table in emptied]

    def _owned(self) -> Iterator[tuple[int, Tensor]]:
        for table in sorted(self.own):
            weight = self.weights[table]
            if isinstance(weight, ServedWeight) and (own := weight.own) is not None:
                yield table, own

    def own_pieces(self) -> Iterator[Piece]:
        """Yield the gradients of torch's own. Raises UsageError for a gradient that is not sparse."""
        for table, own in self._owned():
            if not own.is_sparse:
                raise UsageError(
                    f"A hook turned the gradient of {self.names[table]!r} into a dense tensor of all rows, "
                    "but servers need a sparse one. Return a sparse tensor from the hook (such as gradient "
                    "* mask), or use sparse=False for the embedding."
                )
            whole = own.detach().coalesce()
            rows = whole.values().to("cpu", torch.float32, copy=True)
            yield table, whole.indices()[0].to("cpu", copy=True), rows


def begin_copy(some: Sequence[Collected], staging: Staging | None) -> None:
    """Start to copy the gradients from a device to this process."""
    assert staging is not None
    for each in some:
        if each.arriving is not None:  # there is already one from an earlier backward pass
            each.added()
    arriving = staging.to_host([each.there for each in some if each.there is not None])
    for number, each in enumerate(some):
        each.there, each.arriving = None, (arriving, number)


def leaf_of(tensor: Tensor) -> Any:
    """Return the node of autograd that adds to the gradient of this leaf."""
    with torch.enable_grad(), without_overrides():
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
