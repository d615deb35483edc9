"""Layout: how one model becomes tables on servers. Pure: model and optimizer in, numbered tables out; every
trainer of a job computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainers.errors import NotSupportedError, UsageError
from trainers.ps.partition import place, slices
from trainers.ps.tables.rules import AnyRule, Fixed
from trainers.ps.tables.spec import MAX_BLOCK, TableKind, TableSpec
from trainers.ps.trainer.embedding import EmbeddingModule, find
from trainers.ps.trainer.optimizers import rule_for
from trainers.strategy import PsConfigs


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Elements `[start, stop)` of a dense parameter: one table on one server."""

    table: int
    server: int
    start: int
    stop: int
    spec: TableSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseParameter:
    name: str
    parameter: torch.nn.Parameter
    group: Mapping[str, Any] | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseParameter:
    """One table, whose rows are spread over all servers by key."""

    name: str
    module: EmbeddingModule
    group: Mapping[str, Any] | None
    table: int
    spec: TableSpec


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Everything of a model that servers hold. `group` is None for what no optimizer trains."""

    dense: tuple[DenseParameter, ...]
    sparse: tuple[SparseParameter, ...]
    servers: int

    def specs_on(self, server: int) -> list[tuple[int, TableSpec]]:
        """(table, spec) of everything that this server holds."""
        blocks = [block for parameter in self.dense for block in parameter.blocks if block.server == server]
        tables = [(block.table, block.spec) for block in blocks]
        return tables + [(parameter.table, parameter.spec) for parameter in self.sparse]


def plan(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, servers: int, configs: PsConfigs
) -> Layout:
    """Raises UsageError or NotSupportedError for what cannot be served, naming the parameter."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    strangers = groups.keys() - {id(parameter) for parameter in named.values()}
    if strangers:
        raise UsageError(
            f"the optimizer has {len(strangers)} parameters that are not in the model given to "
            "fleet.distributed_model(); make it from that model's parameters()"
        )
    embeddings = {id(module.weight): module for _, module in find(model)}
    dense_names = [name for name, parameter in named.items() if id(parameter) not in embeddings]
    sparse_names = [name for name, parameter in named.items() if id(parameter) in embeddings]
    dense = _plan_dense({name: named[name] for name in dense_names}, groups, optimizer, servers, configs)
    first = sum(len(parameter.blocks) for parameter in dense)
    sparse = []
    for number, name in enumerate(sparse_names, first):
        module = embeddings[id(named[name])]
        group = groups.get(id(named[name]))
        spec = TableSpec(
            kind=TableKind.SPARSE,
            name=name,
            size=module.embedding_dim,
            rule=_rule(optimizer, group, sparse=True, name=name),
        )
        sparse.append(SparseParameter(name=name, module=module, group=group, table=number, spec=spec))
    return Layout(tuple(dense), tuple(sparse), servers)


def _plan_dense(
    named: Mapping[str, torch.nn.Parameter],
    groups: Mapping[int, Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    servers: int,
    configs: PsConfigs,
) -> list[DenseParameter]:
    cuts = {name: _cut(name, parameter, servers, configs) for name, parameter in named.items()}
    names = [f"{name}[{start}:{stop}]" for name, pieces in cuts.items() for start, stop in pieces]
    homes = iter(enumerate(zip(names, place(names, servers, configs.split_method), strict=True)))
    planned = []
    for name, parameter in named.items():
        group = groups.get(id(parameter))
        rule = _rule(optimizer, group, sparse=False, name=name)
        blocks = []
        for start, stop in cuts[name]:
            table, (block_name, server) = next(homes)
            spec = TableSpec(kind=TableKind.DENSE, name=block_name, size=stop - start, rule=rule)
            blocks.append(Block(table=table, server=server, start=start, stop=stop, spec=spec))
        planned.append(DenseParameter(name=name, parameter=parameter, group=group, blocks=tuple(blocks)))
    return planned


def _cut(name: str, parameter: torch.nn.Parameter, servers: int, configs: PsConfigs) -> list[tuple[int, int]]:
    if parameter.dtype != torch.float32:
        raise NotSupportedError(f"parameter {name!r} is {parameter.dtype}; servers keep float32")
    elements = parameter.numel()
    row = elements // parameter.shape[0] if parameter.dim() > 1 and elements else 1
    return slices(elements, row, servers, configs.slice_var_up, MAX_BLOCK)


def _rule(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any] | None, *, sparse: bool, name: str
) -> AnyRule:
    return Fixed() if group is None else rule_for(optimizer, group, sparse=sparse, name=name)
