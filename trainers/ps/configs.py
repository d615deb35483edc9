"""Define and check the settings of parameter-server mode and of single sparse tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType

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
"""The most pushes that one trainer may have in flight. A server remembers the last 4096 applied pushes, to
recognize late repetitions.
"""
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
    """The keys of `strategy.ps_configs`. Times are in seconds."""

    split_method: str = "RoundRobin"
    """How dense blocks are assigned to servers."""
    slice_var_up: bool = True
    """Slice dense parameters of more than 8192 elements."""
    table_mb_per_server: float = 16.0
    """A sparse table of known size uses one server for each so many MB of its values, so a small table is
    whole on one server. With 0, all servers share every table.
    """
    request_timeout_s: float = 60.0
    """A server that is silent for longer is an error."""
    trainer_timeout_s: float = 10.0
    """A trainer that is disconnected for longer is lost."""
    join_timeout_s: float = 600.0
    """How long to wait for processes that have not joined yet."""
    wire_dtype: str = "float32"
    """The type in which rows and their gradients are sent. It does not depend on the type of the table."""
    nonfinite: str = "refuse"
    """Refuse a push with NaN or infinite gradients, or skip the affected rows and blocks."""
    durability: str = "none"
    """The data that a killed server has after its restart. It is empty with "none", has the last snapshot
    with "snapshot", and has every acknowledged push with "log".
    """
    snapshot_interval_s: float = 300.0
    """The time between two snapshots."""
    log_fsync: str = "everysec"
    """When the write-ahead log is synced to the disk. This matters if the node fails, but not if only the
    process fails.
    """
    durability_dir: str = ""
    """The directory for snapshots and the write-ahead log. By default it is a directory for this job inside
    the log directory.
    """
    rows_at_end: str = "all"
    """The trainers whose model receives the rows of embeddings of a known size in `stop_worker`. They are all
    trainers, or the first one. With "none", no trainer receives them, because the servers have saved them.
    """
    max_rows: int | None = None
    """The limit for all tables without a bound of their own together, on all servers."""
    max_bytes: int | None = None
    """The same limit in bytes."""
    evict: str | None = None
    """Which rows leave first when the limit is reached."""
    disk_dir: str = ""
    """A directory on each server's node. Rows of bounded tables move there instead of being removed."""
    server_threads: int = 1
    """The number of threads that a server uses for the rows of one large request."""
    publish: str = ""
    """A directory or URL. The servers write versions of all tables there for serving."""
    publish_interval_s: float = 10.0
    """The time between two versions. A version is only written if something has changed."""
    publish_dtype: str = ""
    """The type of the values of published rows. If empty, each table keeps its type."""
    read_ahead: bool = False
    """Allow every DataLoader to read batches before their turn. By default, this happens only in loops in
    which a script cannot notice the difference.
    """

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            one_of(f"ps_configs {name}", getattr(self, name), choices)
        flag("ps_configs slice_var_up", self.slice_var_up)
        flag("ps_configs read_ahead", self.read_ahead)
        number = self.table_mb_per_server
        if not is_number(number) or not 0 <= number < math.inf:
            raise UsageError(
                f"ps_configs table_mb_per_server is {number!r}; it must be a number of at least 0"
            )
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
        """The bound that all tables without a bound of their own share, or None without such a bound."""
        bound = Bound.of("ps_configs", self.max_rows, self.max_bytes, self.evict, None)
        return None if bound is None else replace(bound, shared=True)


@frozen(kw_only=True)
class AsyncConfigs:
    """The keys of `strategy.a_sync_configs`. Names are Paddle's where Paddle has the option."""

    k_steps: int = 0
    """The number of local steps between exchanges in geo training. 0 means that training is not in geo mode.
    """
    max_merge_var_num: int = 1
    """The number of steps whose gradients are merged into one push. Plain SGD sums them, other rules average
    them.
    """
    send_queue_size: int = 2
    """The number of pushes that may be in flight before a step waits. Dense values may be so many steps old.
    """
    independent_recv_thread: bool = False
    """Pull dense values continuously instead of with every push."""
    min_send_grad_num_before_recv: int = 1
    """Pull dense values only with every n-th push."""
    max_staleness: int | None = None
    """A trainer does not read while another trainer is more than so many steps behind. None means without
    limit.
    """
    overlap: bool = True
    """Run pushes and prefetches while the next step computes. Without overlap, every step waits for its own
    push.
    """

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
                    f"{self.max_merge_var_num}, so trainers would wait for pushes that are still being "
                    f"merged. Set max_staleness to at least {self.max_merge_var_num - 1}."
                )
        flag("a_sync_configs independent_recv_thread", self.independent_recv_thread)
        flag("a_sync_configs overlap", self.overlap)

    @property
    def carries(self) -> bool:
        """True if a push may carry requests for rows. The push must not wait for other trainers, but with
        `max_staleness` such requests wait.
        """
        return self.overlap and self.max_staleness is None

    @property
    def ahead(self) -> int:
        """The number of batches by which to prefetch.

        If pushes carry the requests, this is the number of steps that one push merges, plus one so that the
        rows arrive in time.
        """
        return self.max_merge_var_num + 1 if self.carries else 1

    @property
    def late(self) -> int:
        """The largest age, in steps, of the request for the rows of a batch."""
        return max(1, self.ahead - 1) if self.overlap else 0


_ALIASES = {"independent_recv": "independent_recv_thread"}
_WITHOUT_EFFECT = {
    "thread_pool_size": "a separate libzmq thread sends",
    "send_wait_times": "a push is sent after max_merge_var_num steps are merged",
    "runtime_split_send_recv": "no program exists to split",
    "launch_barrier": "trainers always wait for the servers",
    "heter_worker_device_guard": "set the devices in the model",
    "lr_decay_steps": "learning rates travel with every push; use a torch scheduler",
    "use_ps_gpu": "tables are in host memory",
    "use_gpu_graph": "tables are in host memory",
}


def a_sync_configs(name: str, value: object) -> Fields:
    """Check the mapping and return a read-only copy. Raises UsageError or NotSupportedError."""
    if isinstance(value, Mapping):
        for key in value.keys() & _WITHOUT_EFFECT.keys():
            raise NotSupportedError(
                f"NotSupported: strategy.{name} {key} has no effect here ({_WITHOUT_EFFECT[key]}). Remove it."
            )
        value = {_ALIASES.get(key, key): each for key, each in value.items()}
    return accepted(name, value, AsyncConfigs)


def ps_configs(name: str, value: object) -> Fields:
    """Check the mapping and return a read-only copy. Raises UsageError."""
    return accepted(name, value, PsConfigs)


EVERY_TABLE = "*"
"""Use this key instead of a table's name, for all tables without an entry of their own."""


@frozen(kw_only=True)
class TableConfigs:
    """The keys of `strategy.sparse_table_configs[name]`. With None, the setting of the module or the
    optimizer applies.
    """

    rule: AnyRule | None = None
    """An update rule of trainers.ps (SGD, Adagrad, ...) that replaces the optimizer's rule."""
    lr: float | None = None
    """A learning rate for this table."""
    init: Initializer | None = None
    """The initial values of rows, as for `SparseEmbedding`."""
    entry: Entry | None = None
    """The filter that decides which keys get a row, as for `SparseEmbedding`."""
    low: float = -math.inf
    """The lower bound of every value after an update."""
    high: float = math.inf
    """The upper bound of every value after an update."""
    statistics: bool = False
    """Count shows, clicks and unseen days in each row."""
    dtype: str | None = None
    """The type in which servers keep the values of rows."""
    max_rows: int | None = None
    """The most rows, as for `SparseEmbedding`."""
    max_bytes: int | None = None
    """The most bytes, as for `SparseEmbedding`."""
    evict: str | None = None
    """The rows that leave first, as for `SparseEmbedding`."""
    ttl_s: float | None = None
    """The time to live of rows, as for `SparseEmbedding`."""
    servers: int | None = None
    """The number of servers that share the rows. Set it for a table of unknown size, or for a table with more
    use than others.
    """

    def __post_init__(self) -> None:
        where = "sparse_table_configs"
        if self.rule is not None and not isinstance(self.rule, tuple(RULES.values())):
            raise UsageError(f"{where} rule is {self.rule!r}; use one of trainers.ps: {ON_ROWS}")
        if self.rule is not None and (wrong := wrong_option(self.rule)):
            raise UsageError(f"{where} rule has {wrong}, so {self.rule!r} would divide by zero or give NaN")
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
        """The limit of rows, or None if the module's limit applies."""
        return Bound.of("sparse_table_configs", self.max_rows, self.max_bytes, self.evict, self.ttl_s)


def sparse_table_configs(name: str, value: object) -> Fields:
    """Check the mapping of mappings and return a read-only copy. Raises UsageError."""
    if not isinstance(value, Mapping):
        raise UsageError(f"strategy.{name} is {value!r}; it must be a dict of dicts")
    return MappingProxyType(
        {
            str(table): accepted(f"{name}[{table!r}]", configs, TableConfigs)
            for table, configs in value.items()
        }
    )
