"""Dense parameters of a trainer: to blocks on servers and back. Knows slices; leaves sending to others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from trainers.errors import NotSupportedError
from trainers.ps.net.client import Request
from trainers.ps.net.wire import Field, Kind, Message, Part
from trainers.ps.tables.rules import AnyRule
from trainers.ps.trainer.layout import Block, DenseParameter

_LONGEST_RUN = 1 << 25
"""Elements of one part: 128 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """One block and the parameter that it is cut from."""

    block: Block
    dense: DenseParameter

    @property
    def size(self) -> int:
        return self.block.stop - self.block.start

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.block.start : self.block.stop]


class DenseParameters:
    """All dense parameters of one model. A run is some blocks of one server with consecutive numbers."""

    def __init__(self, parameters: Sequence[DenseParameter], servers: int) -> None:
        self._parameters = parameters
        self._rules = {dense.name: dense.rule for dense in parameters}
        self._pieces: list[list[_Piece]] = [[] for _ in range(servers)]
        for dense in parameters:
            for block in dense.blocks:
                self._pieces[block.server].append(_Piece(block, dense))
        self._by_table = [{piece.block.table: piece for piece in pieces} for pieces in self._pieces]
        self._all = [_wants(pieces) for pieces in self._pieces]
        self.trained_wants = [
            _wants([piece for piece in pieces if piece.dense.group is not None]) for pieces in self._pieces
        ]
        """For each server the parts that ask for every trained value."""

    def rule(self, name: str) -> AnyRule:
        """The update rule of this parameter."""
        return self._rules[name]

    def initial(self) -> Iterator[list[Request]]:
        """The initial values, a parameter at a time."""
        for dense in self._parameters:
            flat = _flat(dense.parameter)
            yield [
                Request(
                    server=block.server,
                    kind=Kind.ASSIGN,
                    parts=(Part(block.table, Field.VALUES, flat[block.start : block.stop]),),
                )
                for block in dense.blocks
            ]

    def gradients(self) -> dict[str, torch.Tensor]:
        """By name, flat and float32; a parameter without a gradient is left alone, as torch.optim does."""
        return {
            dense.name: _flat(dense.parameter.grad)
            for dense in self._parameters
            if dense.group is not None and _has_gradient(dense)
        }

    def values(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name, flat copies."""
        return {
            dense.name: _flat(dense.parameter).clone()
            for dense in self._parameters
            if dense.group is not None
        }

    def add_push(
        self, push: Sequence[list[Part]], flats: dict[str, torch.Tensor], lr: float | None = None
    ) -> None:
        """Append gradients (or, with a learning rate for all, other values) to each server's push."""
        for parts, pieces in zip(push, self._pieces, strict=True):
            with_gradient = [piece for piece in pieces if piece.dense.name in flats]
            for rate, run in _runs(with_gradient, lr):
                # A copy, of one piece too: the message may be sent again when the gradient has changed.
                joined = torch.cat([piece.of(flats[piece.dense.name]) for piece in run])
                parts.append(Part(run[0].block.table, Field.VALUES, joined, rate))

    def pulls(self, step: int, *, trained_only: bool) -> list[Request]:
        """Ask for the values as of `step`."""
        wants = self.trained_wants if trained_only else self._all
        return [
            Request(server=server, kind=Kind.PULL, number=step, parts=parts)
            for server, parts in enumerate(wants)
            if parts
        ]

    def take(self, answers: Iterable[tuple[int, Message]]) -> None:
        """Put values into the parameters: (server, its answer)."""
        found = self.read(answers)
        for dense in self._parameters:
            if dense.name in found:
                dense.parameter.data.copy_(found[dense.name].view_as(dense.parameter))

    def read(self, answers: Iterable[tuple[int, Message]]) -> dict[str, torch.Tensor]:
        """The values in answers, flat, of the parameters that are complete in them."""
        blocks: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for server, reply in answers:
            by_table = self._by_table[server]
            for part in reply.parts:
                if part.field is not Field.VALUES:
                    continue
                at, table = 0, part.table
                while at < len(part.data):
                    piece = by_table[table]
                    value = part.data[at : at + piece.size]
                    blocks.setdefault(piece.dense.name, []).append((piece.block.start, value))
                    at, table = at + piece.size, table + 1
        return {name: _joined(pieces) for name, pieces in blocks.items()}


def _joined(pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    if len(pieces) == 1:
        return pieces[0][1]
    return torch.cat([value for _, value in sorted(pieces, key=lambda piece: piece[0])])


def _has_gradient(dense: DenseParameter) -> bool:
    grad = dense.parameter.grad
    if grad is not None and grad.is_sparse:
        raise NotSupportedError(
            f"parameter {dense.name!r} has a sparse gradient and is no nn.Embedding(sparse=True); "
            "only embedding modules are served by rows"
        )
    return grad is not None


def _runs(pieces: Sequence[_Piece], lr: float | None) -> Iterator[tuple[float, list[_Piece]]]:
    """Consecutive pieces with the same learning rate, up to the largest run."""
    run: list[_Piece] = []
    rate, total = 0.0, 0
    for piece in pieces:
        own = lr if lr is not None else float(piece.dense.group["lr"]) if piece.dense.group else 0.0
        follows = run and piece.block.table == run[-1].block.table + 1 and own == rate
        if run and not (follows and total + piece.size <= _LONGEST_RUN):
            yield rate, run
            run, total = [], 0
        run.append(piece)
        rate, total = own, total + piece.size
    if run:
        yield rate, run


def _wants(pieces: Sequence[_Piece]) -> tuple[Part, ...]:
    return tuple(
        Part(run[0].block.table, Field.WANT, torch.tensor([len(run)])) for _, run in _runs(pieces, 0.0)
    )


def _flat(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise AssertionError("no gradient")
    return tensor.detach().cpu().reshape(-1).contiguous()
