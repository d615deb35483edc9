"""Settings of parameter-server mode and of single sparse tables: names, types and ranges, checked at
construction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from fleetrun.aliases import Fields
from fleetrun.frozen import frozen
from trainers.checks import accepted, flag, is_number, one_of, positive, whole
from trainers.errors import NotSupportedError, UsageError
from trainers.ps.tables.rules import ON_ROWS, RULES, AnyRule, wrong_option
from trainers.ps.tables.spec import Bound, Entry, Initializer

SPLIT_METHODS = ("RoundRobin", "HashName")
WIRE_DTYPES = ("float32", "float16", "bfloat16")
DURABILITIES = ("none", "snapshot", "log")
MAX_IN_FLIGHT = 1024
"""Pushes of one trainer; a server remembers the last 4096 applied ones, to recognize late repetitions."""
LOG_FSYNCS = ("no", "everysec", "always")
_CHOICES = {
    "split_method": SPLIT_METHODS,
    "wire_dtype": WIRE_DTYPES,
    "nonfinite": ("refuse", "skip"),
    "durability": DURABILITIES,
    "log_fsync": LOG_FSYNCS,
    "rows_at_end": ("all", "first", "none"),
    "publish_dtype": ("", *WIRE_DTYPES, "int8"),
}


@frozen(kw_only=True)
class PsConfigs:
    """The keys of `strategy.ps_configs`. Times are seconds.

    `split_method`: which server gets a dense block. `slice_var_up`: dense parameters over 8192 elements are
    sliced. `request_timeout_s`: a server that is silent for so long is an error. `trainer_timeout_s`: a
    trainer that is disconnected for so long is lost. `join_timeout_s`: how long to wait for processes that
    have not joined yet.

    `table_mb_per_server`: a sparse table of known size is shared by one server for each so many MB of its
    values, so that a small one is whole on one server; 0: every table is shared by all servers.

    `wire_dtype`: the type in which rows and their gradients are sent, whatever that of a table. `nonfinite`:
    a push with NaN or infinite gradients is refused, or those rows and blocks are skipped.

    `durability`: what a killed server has after its restart: nothing, the last snapshot, or every
    acknowledged push ("log"). A snapshot is taken every `snapshot_interval_s`. `log_fsync`: when the log is
    written to the disk itself, which matters when the machine fails, not the process. `durability_dir`:
    where; by default a folder for this job in the log directory.

    `rows_at_end`: whose model gets the rows of embeddings of a known size in `stop_worker`: that of every
    trainer, of the first one, or of none, because the servers have saved them.

    `max_rows` or `max_bytes`: how much all tables without a bound of their own may have together, on all
    servers; `evict`: which rows then leave first. `disk_dir`: a folder of each server's machine, to which
    rows of bounded tables are moved instead.

    `server_threads`: how many threads a server has for the rows of one large request.

    `publish`: a folder or URL to which the servers write versions of all tables for serving, one
    every `publish_interval_s` if anything has changed. `publish_dtype`: the type of the values of rows there;
    empty: as their tables have them.

    `read_ahead`: batches of every DataLoader may be read before their turn; else only batches of loops in
    which no script can notice it.
    """

    split_method: str = "RoundRobin"
    slice_var_up: bool = True
    table_mb_per_server: float = 16.0
    request_timeout_s: float = 60.0
    trainer_timeout_s: float = 10.0
    join_timeout_s: float = 600.0
    wire_dtype: str = "float32"
    nonfinite: str = "refuse"
    durability: str = "none"
    snapshot_interval_s: float = 300.0
    log_fsync: str = "everysec"
    durability_dir: str = ""
    rows_at_end: str = "all"
    max_rows: int | None = None
    max_bytes: int | None = None
    evict: str | None = None
    disk_dir: str = ""
    server_threads: int = 1
    publish: str = ""
    publish_interval_s: float = 10.0
    publish_dtype: str = ""
    read_ahead: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            one_of(f"ps_configs {name}", getattr(self, name), choices)
        flag("ps_configs slice_var_up", self.slice_var_up)
        flag("ps_configs read_ahead", self.read_ahead)
        number = self.table_mb_per_server
        if not is_number(number) or not 0 <= number < math.inf:
            raise UsageError(f"ps_configs table_mb_per_server is {number!r}; it must be a number from 0 on")
        for field in fields(self):
            if field.name.endswith("_s"):
                positive(f"ps_configs {field.name}", getattr(self, field.name))
        whole("ps_configs server_threads", self.server_threads, 1)
        for name in ("durability_dir", "disk_dir", "publish"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"ps_configs {name} is {getattr(self, name)!r}; it must be a path")
        _ = self.bound

    @property
    def bound(self) -> Bound | None:
        """Of all tables without one of their own."""
        bound = Bound.of("ps_configs", self.max_rows, self.max_bytes, self.evict, None)
        return None if bound is None else replace(bound, shared=True)


@frozen(kw_only=True)
class AsyncConfigs:
    """The keys of `strategy.a_sync_configs`, as Paddle names them where it has them.

    `k_steps`: above 0, geo training: that many local steps between exchanges. `max_merge_var_num`: gradients
    of so many steps are merged into one push (summed for plain SGD, averaged otherwise). `send_queue_size`:
    how many pushes may be in flight before a step waits, and so how many steps old dense values may be.
    `independent_recv_thread`: dense values are pulled continuously instead of with every push.
    `min_send_grad_num_before_recv`: pull them with every n-th push only. `max_staleness`: no trainer reads
    while another is more than that many steps behind; None: no bound. `overlap`: pushes and prefetches run
    while the next step computes; without it every step waits for its own.
    """

    k_steps: int = 0
    max_merge_var_num: int = 1
    send_queue_size: int = 2
    independent_recv_thread: bool = False
    min_send_grad_num_before_recv: int = 1
    max_staleness: int | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        whole("a_sync_configs k_steps", self.k_steps, 0)
        for name in ("max_merge_var_num", "send_queue_size", "min_send_grad_num_before_recv"):
            whole(f"a_sync_configs {name}", getattr(self, name), 1)
        if self.send_queue_size > MAX_IN_FLIGHT:
            raise UsageError(
                f"a_sync_configs send_queue_size is {self.send_queue_size}; it must be at most "
                f"{MAX_IN_FLIGHT}"
            )
        if self.max_staleness is not None:
            whole("a_sync_configs max_staleness", self.max_staleness, 0)
            if self.max_staleness < self.max_merge_var_num - 1:
                raise UsageError(
                    f"a_sync_configs max_staleness is {self.max_staleness} and max_merge_var_num "
                    f"{self.max_merge_var_num}: trainers would wait for pushes that are still being merged; "
                    f"max_staleness must be at least {self.max_merge_var_num - 1}"
                )
        flag("a_sync_configs independent_recv_thread", self.independent_recv_thread)
        flag("a_sync_configs overlap", self.overlap)

    @property
    def carries(self) -> bool:
        """Whether a push may carry requests for rows: it must not wait for other trainers, as they do."""
        return self.overlap and self.max_staleness is None

    @property
    def ahead(self) -> int:
        """How many batches in advance a batch should be prefetched: where pushes carry the requests, as many
        as one merges, and one more, so that its rows arrive in time.
        """
        return self.max_merge_var_num + 1 if self.carries else 1

    @property
    def late(self) -> int:
        """How many steps older than the current one the request for the rows of a batch may be."""
        return max(1, self.ahead - 1) if self.overlap else 0


_ALIASES = {"independent_recv": "independent_recv_thread"}
_WITHOUT_EFFECT = {
    "thread_pool_size": "libzmq's own thread sends",
    "send_wait_times": "a push goes out when max_merge_var_num steps are merged",
    "runtime_split_send_recv": "there is no program to split",
    "launch_barrier": "trainers always wait for the servers",
    "heter_worker_device_guard": "set the devices in the model",
    "lr_decay_steps": "learning rates travel with every push; use a torch scheduler",
    "use_ps_gpu": "tables are in host memory",
    "use_gpu_graph": "tables are in host memory",
}


def a_sync_configs(name: str, value: Any) -> Fields:
    """The mapping, read-only and checked; raises UsageError or NotSupportedError."""
    if isinstance(value, Mapping):
        for key in value.keys() & _WITHOUT_EFFECT.keys():
            raise NotSupportedError(
                f"NotSupported: strategy.{name} {key} has no effect here ({_WITHOUT_EFFECT[key]}); remove it"
            )
        value = {_ALIASES.get(key, key): each for key, each in value.items()}
    return accepted(name, value, AsyncConfigs)


def ps_configs(name: str, value: Any) -> Fields:
    """The mapping, read-only and checked; raises UsageError."""
    return accepted(name, value, PsConfigs)


EVERY_TABLE = "*"
"""Instead of a table's name: all tables without an entry of their own."""


@frozen(kw_only=True)
class TableConfigs:
    """The keys of `strategy.sparse_table_configs[name]`. None: the setting of the module or the optimizer.

    `rule`: an update rule of trainers.ps (SGD, Adagrad, ...) in place of the optimizer's; `lr`:
    a learning rate of its own. `init`, `entry`: see `SparseEmbedding`; `low`, `high`: bounds of every value
    after an update; `statistics`: rows count shows, clicks and unseen days; `dtype`: the type in which
    servers keep the values of rows; `max_rows`, `max_bytes`, `evict`, `ttl_s`: as for `SparseEmbedding`;
    `servers`: how many servers share the rows, for a table of unknown size or one that is used more than
    others.
    """

    rule: AnyRule | None = None
    lr: float | None = None
    init: Initializer | None = None
    entry: Entry | None = None
    low: float = -math.inf
    high: float = math.inf
    statistics: bool = False
    dtype: str | None = None
    max_rows: int | None = None
    max_bytes: int | None = None
    evict: str | None = None
    ttl_s: float | None = None
    servers: int | None = None

    def __post_init__(self) -> None:
        where = "sparse_table_configs"
        if self.rule is not None and not isinstance(self.rule, tuple(RULES.values())):
            raise UsageError(f"{where} rule is {self.rule!r}; use {ON_ROWS} of trainers.ps")
        if self.rule is not None and (wrong := wrong_option(self.rule)):
            raise UsageError(
                f"{where} rule has {wrong}, with which {self.rule!r} divides by zero or gives NaN"
            )
        if self.lr is not None:
            positive(f"{where} lr", self.lr)
        if self.init is not None and not isinstance(self.init, Initializer):
            raise UsageError(f"{where} init is {self.init!r}; use Uniform, Normal or Constant of trainers.ps")
        if self.entry is not None and not isinstance(self.entry, Entry):
            raise UsageError(
                f"{where} entry is {self.entry!r}; use ProbabilityEntry, CountFilterEntry or ShowClickEntry "
                "of trainers.ps"
            )
        if not self.low < self.high:
            raise UsageError(f"{where} bounds are {self.low!r} and {self.high!r}; low must be below high")
        flag(f"{where} statistics", self.statistics)
        if self.dtype is not None:
            one_of(f"{where} dtype", self.dtype, WIRE_DTYPES)
        if self.servers is not None:
            whole(f"{where} servers", self.servers, 1)
        _ = self.bound

    @property
    def bound(self) -> Bound | None:
        """How many rows there may be; None: as the module says."""
        return Bound.of("sparse_table_configs", self.max_rows, self.max_bytes, self.evict, self.ttl_s)


def sparse_table_configs(name: str, value: Any) -> Fields:
    """The mapping of mappings, read-only and checked; raises UsageError."""
    if not isinstance(value, Mapping):
        raise UsageError(f"strategy.{name} is {value!r}; it must be a dict of dicts")
    return MappingProxyType(
        {
            str(table): accepted(f"{name}[{table!r}]", configs, TableConfigs)
            for table, configs in value.items()
        }
    )
