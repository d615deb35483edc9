"""Trainers that merge steps or train in geo mode, with the product's own exchange."""

from __future__ import annotations

from typing import Any

import torch

from tests.simulated_ps.model import SPEC, Model, Push
from trainers.ps.client import Client
from trainers.ps.configs import AsyncConfigs
from trainers.ps.tables.rules import SGD
from trainers.ps.trainer.exchange import AsyncExchange, DenseParameters
from trainers.ps.trainer.group import TableGroup
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.trainer.local import CachedGroup, GeoExchange
from trainers.ps.trainer.modules import SparseEmbedding


class Exchanged:
    """The first table of one trainer, which pushes several steps together."""

    def __init__(self, model: Model, client: Client, start: int) -> None:
        plan, servers = model.plan, model.plan.servers
        self._model = model
        self._options: dict[str, Any] = {"lr": 1.0}
        sparse = SparseParameter(
            name=SPEC.name,
            module=SparseEmbedding(SPEC.size),
            group=self._options,
            own_lr=None,
            table=0,
            spec=SPEC,
            rule=SGD(),
        )
        group = TableGroup([sparse], servers, client)
        self._exchange: GeoExchange | AsyncExchange
        if "geo" in plan.on:
            self._group: TableGroup = CachedGroup(group)
            self._exchange = GeoExchange(
                client,
                DenseParameters([], servers, AsyncConfigs(k_steps=plan.merged)),
                [self._group],  # type: ignore[list-item]
                servers,
                k_steps=plan.merged,
                trainers=model.trainers,
                local_step=lambda: None,
            )
        else:
            self._group = group
            configs = AsyncConfigs(
                max_merge_var_num=plan.merged, send_queue_size=plan.queue, overlap=plan.queue > 1
            )
            dense = DenseParameters([], servers, configs)
            self._exchange = AsyncExchange(client, dense, [group], servers, configs)
        self._exchange.start(start)

    def step(self, push: Push) -> None:
        """Make one step, and perhaps send it with others."""
        model, servers = self._model, range(self._model.plan.servers)
        pieces = [model.rows(server, push) for server in servers]
        keys, rows = (torch.cat(each) for each in zip(*pieces, strict=True))
        self._options["lr"] = model.rate(push)
        self._group.tables[0].look_up(keys, insert=True)
        self._group.collected.add(0, keys, rows)
        self._exchange.push()
        self._group.drop_gradients()

    def flush(self) -> None:
        self._exchange.flush()

    @property
    def settled(self) -> bool:
        """True if all steps were acknowledged."""
        if isinstance(self._exchange, GeoExchange):
            return not self._exchange._local_steps
        return not (self._exchange._pushes or self._exchange._merging.steps)
