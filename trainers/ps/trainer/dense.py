"""Dense parameters of a trainer: to blocks on servers and back. Knows slices; leaves sending to `worker`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from trainers.errors import NotSupportedError
from trainers.ps.net.client import Request
from trainers.ps.net.wire import Field, Kind, Message, Part
from trainers.ps.trainer.layout import DenseParameter

_NOTHING = torch.empty(0)


class DenseParameters:
    """All dense parameters of one model."""

    def __init__(self, parameters: Sequence[DenseParameter], servers: int) -> None:
        self._parameters = parameters
        self._all = _wants(parameters, servers)
        self._trained = _wants([each for each in parameters if each.group is not None], servers)

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

    def add_push(self, push: Sequence[list[Part]]) -> None:
        """Append the gradients to each server's push; a parameter without one is left alone, as torch.optim
        does.
        """
        for dense in self._parameters:
            grad = dense.parameter.grad
            if dense.group is None or grad is None:
                continue
            if grad.is_sparse:
                raise NotSupportedError(
                    f"parameter {dense.name!r} has a sparse gradient and is no nn.Embedding(sparse=True); "
                    "only embedding modules are served by rows"
                )
            flat, lr = _flat(grad), float(dense.group["lr"])
            for block in dense.blocks:
                push[block.server].append(Part(block.table, Field.VALUES, flat[block.start : block.stop], lr))

    def pulls(self, step: int, *, trained_only: bool) -> list[Request]:
        """Ask for the values as of `step`."""
        wants = self._trained if trained_only else self._all
        return [
            Request(server=server, kind=Kind.PULL, number=step, parts=parts)
            for server, parts in enumerate(wants)
            if parts
        ]

    def take(self, replies: Iterable[Message]) -> None:
        """Put pulled values into the parameters."""
        values = {part.table: part.data for reply in replies for part in reply.parts}
        for dense in self._parameters:
            blocks = [values[block.table] for block in dense.blocks if block.table in values]
            if blocks:
                dense.parameter.data.copy_(torch.cat(blocks).view_as(dense.parameter))


def _wants(parameters: Sequence[DenseParameter], servers: int) -> list[tuple[Part, ...]]:
    wants: list[list[Part]] = [[] for _ in range(servers)]
    for dense in parameters:
        for block in dense.blocks:
            wants[block.server].append(Part(block.table, Field.WANT, _NOTHING))
    return [tuple(parts) for parts in wants]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).contiguous()
