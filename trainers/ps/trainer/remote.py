"""A sparse table seen from a trainer: rows pulled by key, gradients merged by key. Knows which server has a
key; leaves lookups in a forward pass to `embedding` and the moment of a push to `worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from trainers.ps.net.client import Client, Request
from trainers.ps.net.wire import Field, Kind, Part
from trainers.ps.partition import owners
from trainers.ps.server.rounds import merge_rows
from trainers.ps.trainer.layout import SparseParameter

_CHUNK_BYTES = 4 << 20


class RemoteTable:
    """`step` tells as of which step rows are wanted."""

    def __init__(
        self, sparse: SparseParameter, servers: int, client: Client, step: Callable[[], int]
    ) -> None:
        self._sparse = sparse
        self._servers = servers
        self._client = client
        self._step = step
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def has_gradients(self) -> bool:
        return bool(self._gradients)

    def drop_gradients(self) -> None:
        self._gradients.clear()

    def add_gradient(self, keys: torch.Tensor, grad: torch.Tensor) -> None:
        self._gradients.append((keys, grad))

    def pull_rows(self, keys: torch.Tensor) -> torch.Tensor:
        """(n, dim) float32 for (n,) int64 keys, strictly ascending."""
        shares = [(server, share) for server, share in self._shares(keys) if len(share)]
        requests = [
            Request(
                server=server,
                kind=Kind.PULL,
                number=self._step(),
                parts=(Part(self._sparse.table, Field.KEYS, keys[share]),),
            )
            for server, share in shares
        ]
        rows = torch.empty(len(keys), self._sparse.spec.size)
        for (_, share), reply in zip(shares, self._client.ask(requests), strict=True):
            rows[share] = reply.parts[0].data
        return rows

    def pull_all(self) -> torch.Tensor:
        """Every row of the module's table, (num_embeddings, dim) float32."""
        rows = torch.empty(self._sparse.module.num_embeddings, self._sparse.spec.size)
        for keys in self._chunks():
            rows[keys] = self.pull_rows(keys)
        return rows

    def initial(self) -> Iterator[list[Request]]:
        """The module's own weights, some rows at a time."""
        weight = self._sparse.module.weight.detach().cpu()
        for keys in self._chunks():
            yield [
                Request(server=server, kind=Kind.ASSIGN, parts=self._rows(keys[share], weight[keys[share]]))
                for server, share in self._shares(keys)
            ]

    def add_push(self, push: Sequence[list[Part]]) -> None:
        """Append the merged gradient to each server's push: to those without a key too, whose step count
        must go on.

        Nothing when no backward pass has touched the table since the last push.
        """
        if not self._gradients or self._sparse.group is None:
            return
        keys, grad = merge_rows(self._gradients)
        lr = float(self._sparse.group["lr"])
        for server, share in self._shares(keys):
            push[server].extend(self._rows(keys[share], grad[share], lr))

    def _rows(self, keys: torch.Tensor, rows: torch.Tensor, lr: float = 0.0) -> tuple[Part, Part]:
        return Part(self._sparse.table, Field.KEYS, keys), Part(self._sparse.table, Field.ROWS, rows, lr)

    def _shares(self, keys: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """(server, positions of its keys) for every server."""
        homes = owners(keys, self._servers)
        return [(server, (homes == server).nonzero()[:, 0]) for server in range(self._servers)]

    def _chunks(self) -> Iterator[torch.Tensor]:
        rows = max(1, _CHUNK_BYTES // (4 * self._sparse.spec.size))
        total = self._sparse.module.num_embeddings
        for start in range(0, total, rows):
            yield torch.arange(start, min(start + rows, total))
