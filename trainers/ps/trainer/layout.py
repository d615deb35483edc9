"""Map one model to tables on servers, from model, optimizer and settings to numbered tables and their update
rules. The mapping is pure, and every trainer of a job computes the same.

Each server numbers its own tables. The sparse tables come first and have the same number on all servers. The
server's dense blocks follow in sequence, so one part of a message can cover several of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fleetrun.aliases import Document, Fields
from fleetrun.frozen import frozen
from trainers.checks import nearest
from trainers.errors import NotSupportedError, UsageError
from trainers.ps.configs import EVERY_TABLE, PsConfigs, TableConfigs
from trainers.ps.tables.rules import SGD, Adagrad, Adam, AnyRule, Fixed, RMSprop, SparseAdam
from trainers.ps.tables.spec import (
    MAX_BLOCK,
    MAX_DIM,
    EntryKind,
    EvictionPolicy,
    RowOptions,
    RowType,
    TableKind,
    TableSpec,
    block_slices,
    holders,
    place_blocks,
    servers_for,
)
from trainers.ps.trainer.modules import EmbeddingModule, find_embeddings, row_limit, rows_of, weight_of
from trainers.ps.trainer.torchrec import (
    ROW_WISE,
    CollectionTable,
    collection_tables,
    find_collections,
    in_backward,
    is_a,
    placeholder_rule,
    row_wise_rule,
)

# ---- Map a torch optimizer to the servers' rules.

_KINDS = tuple(
    getattr(torch.optim, name) for name in ("SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "SparseAdam")
)
# These options only change how torch computes, and have no effect on the result.
_IRRELEVANT = frozenset({"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable"})


def rule_for(optimizer: Optimizer, group: Fields, *, sparse: bool, name: str) -> AnyRule:
    """Return the rule of one parameter. On sparse tables, Adam without further options means
    torch.optim.SparseAdam.

    `maximize` is not part of a rule, because trainers send the negative gradient. Raises NotSupportedError
    with the name of the optimizer or the option.
    """
    if (row_wise := row_wise_rule(optimizer, group, name, sparse=sparse)) is not None:
        return row_wise
    check_supported(optimizer)
    kind = type(optimizer)
    if group.get("differentiable"):
        raise NotSupportedError(
            f"{kind.__name__}(differentiable=True) is not supported on parameter servers. Remove it."
        )
    if kind is torch.optim.SGD:
        return SGD(**_floats(group, "momentum", "dampening", "weight_decay", "nesterov"))
    if kind is torch.optim.Adagrad:
        return Adagrad(**_floats(group, "lr_decay", "weight_decay", "initial_accumulator_value", "eps"))
    if kind is torch.optim.RMSprop:
        return RMSprop(**_floats(group, "alpha", "eps", "weight_decay", "momentum", "centered"))
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
        if sparse and not (decoupled or group["weight_decay"] or group["amsgrad"]):
            return SparseAdam(*_betas(group), eps=float(group["eps"]))
        return Adam(*_betas(group), **_floats(group, "eps", "weight_decay", "amsgrad"), decoupled=decoupled)
    if kind is torch.optim.SparseAdam:
        if not sparse:
            raise NotSupportedError(
                f"SparseAdam cannot train {name!r}, which is dense. Use torch.optim.Adam for dense "
                "parameters. It updates the rows of nn.Embedding(sparse=True) as SparseAdam does."
            )
        return SparseAdam(*_betas(group), eps=float(group["eps"]))
    raise AssertionError(f"{kind.__name__} was checked, and has no rule")


def check_supported(optimizer: Optimizer) -> None:
    """Raise NotSupportedError for an optimizer without a rule. Subclasses have no rule."""
    kind = type(optimizer)
    if kind not in _KINDS and not is_a(optimizer, *ROW_WISE):
        raise NotSupportedError(
            f"{kind.__module__}.{kind.__name__} is not supported on parameter servers. Use one of "
            f"torch.optim: {', '.join(each.__name__ for each in _KINDS)}."
        )


def options_snapshot(optimizer: Optimizer) -> list[Document]:
    """Return the options and parameters of each group that servers keep from the start, to detect later
    changes.

    A scheduler may add its own keys to a group.
    """
    kept = optimizer.defaults.keys() - _IRRELEVANT
    return [
        {"params": [*map(id, group["params"])], **{key: group[key] for key in kept & group.keys()}}
        for group in optimizer.param_groups
    ]


def _floats(group: Fields, *options: str) -> dict[str, float]:
    return {option: float(group[option]) for option in options}


def maximizes(group: Fields | None) -> bool:
    """Return True if trainers send the negative gradients of this group."""
    return group is not None and bool(group.get("maximize"))


def _betas(group: Fields) -> tuple[float, float]:
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


# ---- Map a model to numbered tables.


@frozen(kw_only=True)
class Block:
    """Elements `[start, stop)` of a dense parameter, which are one table on one server."""

    table: int
    server: int
    start: int
    stop: int
    spec: TableSpec


@frozen(kw_only=True, eq=False)
class DenseParameter:
    """A dense parameter and its blocks."""

    name: str
    parameter: Parameter
    group: Fields | None
    rule: AnyRule
    """The update rule of training. In geo training, this is the trainer's rule, not the servers' rule."""
    blocks: tuple[Block, ...]


@frozen(kw_only=True, eq=False)
class SparseParameter:
    """One table, whose rows are distributed over its `holders` by key."""

    name: str
    module: EmbeddingModule
    group: Fields | None
    own_lr: float | None
    """A learning rate that overrides the group's rate, or None."""
    table: int
    spec: TableSpec
    rule: AnyRule
    """The update rule of training. In geo training, this is the trainer's rule, not the servers' rule."""
    config: CollectionTable | None = None
    """The configuration of a table of a collection, or None for other tables."""
    in_backward: bool = False
    """True if apply_optimizer_in_backward gave the rule. The script then never sees a gradient."""

    @property
    def limit(self) -> int | None:
        """The number of ids, or None if any id may have a row."""
        return limit_of(self.module, self.config)

    @property
    def trained(self) -> bool:
        return not isinstance(self.rule, Fixed)

    @property
    def zeros(self) -> int | None:
        """The padding id if its row may be missing, and must read as zeros instead."""
        rows = self.spec.rows
        stays = row_limit(self.module) is not None and rows.bound is None and not rows.statistics
        return None if stays else self.module.padding_idx

    @property
    def alike(self) -> Hashable:
        """A value that is equal for tables that can be handled together. See `group`."""
        rows, lr = self.spec.rows, (id(self.group), self.own_lr)
        kind = rows.dtype, rows.statistics, rows.entry.kind, rows.bound is not None
        return self.spec.size, self.spec.rule, self.rule, lr, *kind

    @property
    def lr(self) -> float:
        """The current learning rate, which schedulers may change."""
        if self.own_lr is not None:
            return self.own_lr
        return float(self.group["lr"]) if self.group is not None else 0.0


def limit_of(module: EmbeddingModule, config: CollectionTable | None) -> int | None:
    """Return the number of ids. A table of a collection has one on the meta device too."""
    return config.limit if config is not None and module.weight.is_meta else row_limit(module)


_ENOUGH_ROWS, _UNEVEN = 100_000, 1.5
"""The number of sent rows that is enough to judge the servers' shares, and the factor by which a server must
exceed the average.
"""


@frozen(eq=False)
class Layout:
    """Everything of a model that servers hold. `group` is None for parameters that no optimizer trains."""

    dense: tuple[DenseParameter, ...]
    sparse: tuple[SparseParameter, ...]
    servers: int
    collections: tuple[Module, ...] = ()
    """TorchRec's collections, whose tables are among `sparse`."""

    def describe(self) -> str:
        """Describe how many whole and how many shared sparse tables each server has."""
        places = [holders(each.spec, self.servers) for each in self.sparse]
        whole = [sum(place == (server,) for place in places) for server in range(self.servers)]
        shared = [
            sum(len(place) > 1 and server in place for place in places) for server in range(self.servers)
        ]
        return (
            f"{len(places)} tables on {self.servers} servers: {sum(whole)} whole ({_listed(whole)}), "
            f"{len(places) - sum(whole)} shared ({_listed(shared)})"
        )

    def uneven(self, rows: NDArray[np.int64]) -> str:
        """Return the settings to change if one server sent much more than the others, or "" otherwise.

        Only tables on few servers are considered. `rows` (servers, tables) int64 holds the number of rows
        that each server sent.
        """
        load = rows * [8 + 4 * each.spec.size for each in self.sparse]
        of_server, mean = load.sum(axis=1), load.sum() / self.servers
        most = int(of_server.argmax())
        if rows.sum() < _ENOUGH_ROWS or of_server[most] < _UNEVEN * mean:
            return ""
        wanted = {
            each: min(self.servers, math.ceil(2 * load[:, each.table].sum() / mean))
            for each in self.sparse
            if load[most, each.table] > mean / 2
        }
        settings = {
            each.name: {"servers": number}
            for each, number in wanted.items()
            if number > len(holders(each.spec, self.servers))
        }
        if not settings:
            return ""
        return (
            f"Server {most} sends {of_server[most] / mean:.1f} times as many bytes of rows as the average "
            f"of {self.servers} servers. To divide the largest tables among more servers, add to the "
            f"settings in strategy.sparse_table_configs: {json.dumps(settings, ensure_ascii=False)}"
        )

    def specs(self) -> list[TableSpec]:
        """Return the specs of all tables."""
        return [spec for server in range(self.servers) for _, spec in self.specs_on(server)]

    def specs_on(self, server: int) -> list[tuple[int, TableSpec]]:
        """Return (table, spec) of everything that this server holds."""
        blocks = [block for parameter in self.dense for block in parameter.blocks if block.server == server]
        return [
            *((parameter.table, parameter.spec) for parameter in self.sparse),
            *((block.table, block.spec) for block in blocks),
        ]


@frozen(kw_only=True)
class LayoutOptions:
    """The settings of the strategy for the layout."""

    configs: PsConfigs = PsConfigs()
    tables: Mapping[str, TableConfigs] = dataclasses.field(default_factory=dict)
    geo: bool = False
    """Trainers train, and servers add up the changes."""
    dense: bool = True
    """Servers hold dense parameters."""


@frozen(eq=False)
class _Trained:
    """The optimizer of a parameter, and the parameter's group."""

    optimizer: Optimizer
    group: Fields


def plan_layout(
    model: Module,
    optimizers: Sequence[Optimizer],
    servers: int,
    options: LayoutOptions,
) -> Layout:
    """Return the layout of a model. Raises UsageError or NotSupportedError for a parameter that cannot be
    served.
    """
    trained = {
        id(parameter): _Trained(optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    named = dict(model.named_parameters())
    foreign = trained.keys() - {id(parameter) for parameter in named.values()}
    if foreign:
        raise UsageError(
            f"The optimizer has {len(foreign)} parameters that are not in the model given to "
            "fleet.distributed_model(). Create the optimizer from that model's parameters()."
        )
    embeddings = {id(module.weight): module for _, module in find_embeddings(model)}
    collected = collection_tables(model)
    sparse_names = [name for name, parameter in named.items() if id(parameter) in embeddings]
    dense_names = [name for name, parameter in named.items() if id(parameter) not in embeddings]
    if stepped := [name for name in dense_names if hasattr(named[name], "_in_backward_optimizers")]:
        raise NotSupportedError(
            f"Parameter {stepped[0]!r} is dense, and has an optimizer that steps during the backward pass "
            "(apply_optimizer_in_backward), so each trainer would train a separate copy. Give this "
            "optimizer to fleet.distributed_optimizer() instead, or use sparse=True for an embedding."
        )
    known = {*sparse_names, EVERY_TABLE}
    for name in options.tables:
        if name not in known:
            raise UsageError(
                f"strategy.sparse_table_configs has the key {name!r}, which is not a sparse embedding of the "
                f"model{nearest(name, sparse_names)}"
            )
    sparse = _in_groups(
        [
            _plan_sparse(
                name,
                embeddings[id(named[name])],
                collected.get(embeddings[id(named[name])]),
                trained.get(id(named[name])),
                servers,
                options,
            )
            for name in sparse_names
        ],
        servers,
    )
    if options.configs.disk_dir and all(each.spec.rows.bound is None for each in sparse):
        raise UsageError(
            "ps_configs has disk_dir, but no table has a bound. Set max_rows or max_bytes to the part that "
            "stays in memory."
        )
    dense = []
    if options.dense:
        dense = _plan_dense({name: named[name] for name in dense_names}, trained, servers, options)
    first = len(sparse)
    collections = tuple(each for _, each in find_collections(model))
    return Layout(tuple(_numbered(dense, servers, first)), tuple(sparse), servers, collections)


def _listed(counts: Sequence[int]) -> str:
    """Return a number for each server. For many servers, return only the least and the most."""
    if len(counts) > 16:
        return f"{min(counts)} to {max(counts)} each"
    return ", ".join(map(str, counts))


def dense_of(model: Module) -> tuple[list[Parameter], list[torch.Tensor]]:
    """Return the trained parameters outside sparse embeddings, and the other parameters with the buffers."""
    sparse = {id(module.weight) for _, module in find_embeddings(model)}
    dense = [each for each in model.parameters() if id(each) not in sparse]
    frozen = [each.data for each in dense if not each.requires_grad]
    return [each for each in dense if each.requires_grad], [*frozen, *model.buffers()]


def _in_groups(tables: Iterable[SparseParameter], servers: int) -> list[SparseParameter]:
    """Number the tables so that tables of a group follow each other, and within a group tables of the same
    servers.

    Otherwise the order of the model stays.
    """
    groups: dict[Hashable, list[SparseParameter]] = {}
    for each in tables:
        groups.setdefault(each.alike, []).append(each)
    for some in groups.values():
        places = {each.name: holders(each.spec, servers) for each in some}
        some.sort(key=lambda each: (-len(places[each.name]), places[each.name]))
    ordered = [each for some in groups.values() for each in some]
    return [dataclasses.replace(each, table=number) for number, each in enumerate(ordered)]


def _plan_sparse(
    name: str,
    module: EmbeddingModule,
    config: CollectionTable | None,
    trained_by: _Trained | None,
    servers: int,
    options: LayoutOptions,
) -> SparseParameter:
    if module.embedding_dim > MAX_DIM:
        raise NotSupportedError(
            f"Embedding {name!r} has rows of {module.embedding_dim} values; at most {MAX_DIM} are supported"
        )
    stepped = _rule_in_backward(name, weight_of(module))
    if stepped is not None:
        trained_by = None  # torch's other optimizers find no gradient
    in_optimizer = trained_by is not None or stepped is not None
    own = options.tables.get(name) or _of_every_table(options.tables, trained=in_optimizer)
    rule, lr = stepped or (own.rule or _rule(trained_by, sparse=True, name=name), None)
    rule, lr = own.rule or rule, lr if own.lr is None else own.lr
    if own.rule is not None and lr is None and trained_by is None:
        raise UsageError(
            f"sparse_table_configs[{name!r}] has a rule without lr, and the optimizer has no rate for this "
            "table. Add lr to the rule."
        )
    trained = not isinstance(rule, Fixed)
    rows = _rows(name, module, config, own, servers, options.configs)
    if options.geo and rows.statistics:
        raise NotSupportedError(
            f"Embedding {name!r} has statistics, which geo training does not support. Remove statistics."
        )
    if rows.bound is not None:
        if options.geo:
            raise NotSupportedError(
                f"Embedding {name!r} has a bound, which geo training does not support, because its trainers "
                "keep every row that they trained. Remove the bound."
            )
        if rows.bound.policy is EvictionPolicy.SCORE and not rows.statistics:
            raise UsageError(
                f"Embedding {name!r} has evict 'score' but no statistics. Set statistics=True, or use 'lfu'."
            )
        sharing = servers if rows.bound.shared else rows.servers or servers
        rows = dataclasses.replace(rows, bound=rows.bound.on(sharing))
    spec = TableSpec(
        kind=TableKind.SPARSE,
        name=name,
        size=module.embedding_dim,
        # servers add the changes, by SGD with a learning rate of -1
        rule=SGD() if options.geo and trained else rule,
        rows=rows,
    )
    planned = SparseParameter(
        name=name,
        module=module,
        group=trained_by.group if trained_by else None,
        own_lr=lr,
        table=-1,
        spec=spec,
        rule=rule,
        config=config,
        in_backward=stepped is not None,
    )
    zeros = planned.zeros
    if zeros is not None and row_limit(module) is not None and bool(weight_of(module)[zeros].any()):
        raise NotSupportedError(
            f"Embedding {name!r} has a padding row (id {zeros}) that is not zero. The servers may evict "
            "rows of this table, and an evicted padding row reads as zeros. Set it to zeros, or use no "
            "bound and no statistics."
        )
    return planned


def _of_every_table(tables: Mapping[str, TableConfigs], *, trained: bool) -> TableConfigs:
    """Return the settings of a table without its own entry. A table that is in no optimizer stays
    untrained.
    """
    found = tables.get(EVERY_TABLE, TableConfigs())
    return found if trained else dataclasses.replace(found, rule=None, lr=None)


def _rule_in_backward(name: str, weight: Parameter) -> tuple[AnyRule, float] | None:
    """Return the rule and the learning rate of apply_optimizer_in_backward, or None."""
    found = in_backward(name, weight)
    if found is None:
        return None
    optimizer, kind, options = found
    if (placeholder := placeholder_rule(kind, options, name)) is not None:
        return placeholder
    (group,) = optimizer.param_groups
    ignored = sorted(options.keys() - optimizer.defaults.keys())
    if ignored or maximizes(group):
        raise NotSupportedError(
            f"{kind.__name__} of {name!r} has {ignored[0] if ignored else 'maximize'}, which servers do not "
            "support in apply_optimizer_in_backward. Remove it."
        )
    return rule_for(optimizer, group, sparse=True, name=name), float(group["lr"])


def _rows(
    name: str,
    module: EmbeddingModule,
    config: CollectionTable | None,
    own: TableConfigs,
    servers: int,
    configs: PsConfigs,
) -> RowOptions:
    rows, limit = rows_of(module), limit_of(module, config)
    entry = own.entry or rows.entry
    bound = own.bound or rows.bound or configs.bound
    if bound is not None and configs.bound is not None and not (bound.rows or bound.bytes):
        raise UsageError(
            f"Embedding {name!r} has ttl_s, which replaces the job's bound for this table. Set max_rows or "
            "max_bytes for the table too."
        )
    statistics = own.statistics or rows.statistics or entry.kind is EntryKind.SHOW_CLICK
    if bound is not None and configs.disk_dir and (statistics or bound.ttl_s):
        raise UsageError(
            f"Embedding {name!r} has {'ttl_s' if bound.ttl_s else 'statistics'}, and the job has disk_dir, "
            "but rows on disk do not age. Remove one of the two."
        )
    if own.servers is not None:
        shared = own.servers if own.servers < servers else 0
    else:
        values = 0 if limit is None else limit * module.embedding_dim
        shared = 0 if limit is None else servers_for(values, configs.table_mb_per_server, servers)
    init, dtype = own.init or (rows.init if config is None else config.init(name)), rows.dtype
    if config is not None:
        dtype = config.dtype
        if init is None and (module.weight.is_meta or bound is not None or statistics):
            raise NotSupportedError(
                f"Table {name!r} has init_fn {config.config.init_fn!r}, but servers make its rows when they "
                "are used, and know only uniform_, normal_, constant_, zeros_ and ones_ of torch.nn.init. "
                f"Set strategy.sparse_table_configs = {{{name!r}: {{'init': Uniform(-0.01, 0.01)}}}}, or "
                "build the collection on a real device."
            )
    return RowOptions(
        init=init or rows.init,
        entry=entry,
        low=max(own.low, rows.low),
        high=min(own.high, rows.high),
        statistics=statistics,
        dtype=dtype if own.dtype is None else RowType.of(own.dtype),
        bound=bound,
        servers=shared,
    )


def _plan_dense(
    named: Mapping[str, Parameter],
    trained: Mapping[int, _Trained],
    servers: int,
    options: LayoutOptions,
) -> list[DenseParameter]:
    cuts = {name: _cut(name, parameter, servers, options.configs) for name, parameter in named.items()}
    names = [f"{name}[{start}:{stop}]" for name, pieces in cuts.items() for start, stop in pieces]
    places = iter(zip(names, place_blocks(names, servers, options.configs.split_method), strict=True))
    planned = []
    for name, parameter in named.items():
        trained_by = trained.get(id(parameter))
        rule = _rule(trained_by, sparse=False, name=name)
        served = SGD() if options.geo and not isinstance(rule, Fixed) else rule
        blocks = []
        for start, stop in cuts[name]:
            block_name, server = next(places)
            spec = TableSpec(kind=TableKind.DENSE, name=block_name, size=stop - start, rule=served)
            blocks.append(Block(table=-1, server=server, start=start, stop=stop, spec=spec))
        planned.append(
            DenseParameter(
                name=name,
                parameter=parameter,
                group=trained_by.group if trained_by else None,
                rule=rule,
                blocks=tuple(blocks),
            )
        )
    return planned


def _numbered(dense: list[DenseParameter], servers: int, first: int) -> list[DenseParameter]:
    """Return the same parameters, with the blocks of each server numbered in sequence."""
    following = [first] * servers
    numbered = []
    for parameter in dense:
        blocks = []
        for block in parameter.blocks:
            blocks.append(dataclasses.replace(block, table=following[block.server]))
            following[block.server] += 1
        numbered.append(dataclasses.replace(parameter, blocks=tuple(blocks)))
    return numbered


def _cut(name: str, parameter: Parameter, servers: int, configs: PsConfigs) -> list[tuple[int, int]]:
    if parameter.dtype != torch.float32:
        raise NotSupportedError(f"Parameter {name!r} is {parameter.dtype}; servers support only float32")
    elements = parameter.numel()
    row = elements // parameter.shape[0] if parameter.dim() > 1 and elements else 1
    return block_slices(elements, row, servers, configs.slice_var_up, MAX_BLOCK)


def _rule(trained_by: _Trained | None, *, sparse: bool, name: str) -> AnyRule:
    if trained_by is None:
        return Fixed()
    return rule_for(trained_by.optimizer, trained_by.group, sparse=sparse, name=name)
