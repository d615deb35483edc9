"""Define the spec of a table and its encoding, the servers that hold a table, the rows that `shrink` removes,
and the errors of invalid requests.

This module imports no kernels, because processes without tables import it too.
"""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields, replace
from enum import IntEnum
from functools import cache

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from fleetrun.aliases import Integers
from fleetrun.frozen import frozen
from trainers.checks import one_of, positive, whole
from trainers.errors import UsageError
from trainers.ps.tables.rules import RULES, AnyRule, SparseAdam, options_of, wrong_option

MAX_BLOCK = 1 << 24
MAX_DIM = 512
MAX_SERVERS = 65_536

_HEAD = struct.Struct("<BBHQ")
_ROWS = struct.Struct("<BBBBQdddddd")
_BOUND = struct.Struct("<BBHIQQd")


class SpecError(ValueError):
    """An error for bytes that do not describe a table."""


class TableKind(IntEnum):
    """The kind of a table, dense blocks or sparse rows."""

    DENSE = 1
    SPARSE = 2


class InitKind(IntEnum):
    """The distribution of the values of a new row. Each kind explains `a` and `b` of Initializer."""

    UNIFORM = 1  # uniform from a up to b
    NORMAL = 2  # normal with mean a and standard deviation b


@frozen
class Initializer:
    """The values of a row as a pure function of (seed, key, column). For zeros, use UNIFORM from 0 to 0."""

    kind: InitKind = InitKind.UNIFORM
    a: float = 0.0
    b: float = 0.0
    seed: int = 0


class RowType(IntEnum):
    """The type of a row's values. Optimizer state and statistics are float32."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

    @classmethod
    def of(cls, name: str) -> RowType:
        """Return the type with this name of a torch dtype."""
        return cls[name.upper()]

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.name.lower())
        return found


class EntryKind(IntEnum):
    """The keys that get a row. Each kind explains `a` of Entry."""

    ALL = 0
    PROBABILITY = 1  # a key has a row with probability a, decided once by (seed, key)
    COUNT = 2  # a key gets a row after a pulls in training
    SHOW_CLICK = 3  # like ALL, and pushes contain the shows and clicks of their keys


@frozen
class Entry:
    """An entry filter. A key without a row reads as its initial value, and gradients for it are dropped."""

    kind: EntryKind = EntryKind.ALL
    a: float = 0.0


class EvictionPolicy(IntEnum):
    """The rows that leave a full table first."""

    LRU = 1  # the least recently updated rows
    LFU = 2  # rows with the fewest updates, where older updates count less
    SCORE = 3  # like LFU, but an update counts its shows, and a show with a click counts ten times


@frozen(kw_only=True)
class Bound:
    """The limit of a table on one server."""

    rows: int = 0
    """The most rows, or 0 for any number."""
    bytes: int = 0
    """The most bytes of memory, or 0 for any number."""
    policy: EvictionPolicy = EvictionPolicy.LRU
    ttl_s: float = 0.0
    """Rows without an update for so many seconds are removed. 0 means never."""
    shared: bool = False
    """All tables with this bound share the limit."""

    @classmethod
    def of(
        cls,
        where: str,
        max_rows: int | None,
        max_bytes: int | None,
        evict: str | None,
        ttl_s: float | None,
    ) -> Bound | None:
        """Return the bound from a user's settings for all servers together, or None without a bound.

        Raises UsageError for wrong settings. The message names the settings of `where`.
        """
        if max_rows is None and max_bytes is None and ttl_s is None:
            if evict is not None:
                raise UsageError(f"{where} evict needs max_rows or max_bytes")
            return None
        for name, number in (("max_rows", max_rows), ("max_bytes", max_bytes)):
            if number is not None:
                whole(f"{where} {name}", number, 1)
        if max_rows is not None and max_bytes is not None:
            raise UsageError(f"{where} has both max_rows and max_bytes; remove one of them")
        one_of(f"{where} evict", evict or "lru", EVICTIONS)
        if ttl_s is not None:
            positive(f"{where} ttl_s", ttl_s)
            if evict not in (None, "lru"):
                raise UsageError(
                    f"{where} has ttl_s and evict {evict!r}, but each row has only one stamp, and ttl_s "
                    "needs it for the time of the last update. Use evict 'lru', or remove ttl_s"
                )
        policy = EvictionPolicy[(evict or "lru").upper()]
        return cls(rows=max_rows or 0, bytes=max_bytes or 0, policy=policy, ttl_s=float(ttl_s or 0))

    def on(self, servers: int) -> Bound:
        """Return the share of one of so many servers."""
        return replace(self, rows=-(-self.rows // servers), bytes=-(-self.bytes // servers))


EVICTIONS = tuple(policy.name.lower() for policy in EvictionPolicy)


@frozen(kw_only=True)
class RowOptions:
    """The options that only sparse tables have."""

    init: Initializer = Initializer()
    entry: Entry = Entry()
    low: float = -math.inf
    """The lower bound of every value after an update."""
    high: float = math.inf
    """The upper bound of every value after an update."""
    statistics: bool = False
    """Each row counts shows, clicks and unseen days."""
    dtype: RowType = RowType.FLOAT32
    """The type of the values."""
    bound: Bound | None = None
    """The limit of rows."""
    servers: int = 0
    """The number of servers that share the rows, or 0 for all servers."""


@frozen(kw_only=True)
class TableSpec:
    """The description of a table."""

    kind: TableKind
    name: str
    size: int
    """The number of elements of a dense block, or the row length of a sparse table."""
    rule: AnyRule
    rows: RowOptions = RowOptions()

    @property
    def ages(self) -> bool:
        """True if a `shrink` changes the table, because it has statistics or candidates that wait for a
        row.
        """
        kinds = (EntryKind.SHOW_CLICK, EntryKind.COUNT)
        return self.kind is TableKind.SPARSE and (self.rows.statistics or self.rows.entry.kind in kinds)

    @property
    def seen(self) -> int:
        """The number of statistics of a row (show, click and unseen days)."""
        counted = self.rows.statistics or self.rows.entry.kind is EntryKind.SHOW_CLICK
        return 3 if counted else 0

    @property
    def statistics(self) -> int:
        """The number of statistics of a row, with the stamp of a bounded table."""
        return self.seen + (self.rows.bound is not None) if self.kind is TableKind.SPARSE else 0

    def encode(self) -> bytes:
        """Return the encoded spec.

            B kind | B rule | H options | Q size | row options | d for each rule option | bound | name, UTF-8

        Row options are B init kind | B entry kind | B statistics | B row type | Q seed | d init a | d init b
        | d entry a | d low | d high | d twice the servers, plus 1 if there is a bound. A bound is B policy |
        B shared | H, I zero | Q rows | Q bytes | d seconds to live.
        """
        options = options_of(self.rule)
        head = _HEAD.pack(self.kind, self.rule.code, len(options), self.size)
        rows, init, entry, bound = self.rows, self.rows.init, self.rows.entry, self.rows.bound
        numbers = (init.a, init.b, entry.a, rows.low, rows.high, 2 * rows.servers + (bound is not None))
        shape = _ROWS.pack(init.kind, entry.kind, rows.statistics, rows.dtype, init.seed, *numbers)
        tail = b"" if bound is None else _encoded(bound)
        return head + shape + struct.pack(f"<{len(options)}d", *options) + tail + self.name.encode()

    @classmethod
    def decode(cls, content: bytes) -> TableSpec:
        """Return the spec. Raises SpecError if the bytes are not exactly what `encode` writes."""
        if len(content) < _HEAD.size + _ROWS.size:
            raise SpecError(f"a table spec has only {len(content)} bytes")
        kind, rule_code, count, size = _HEAD.unpack_from(content)
        rule = RULES.get(rule_code)
        if kind not in (TableKind.DENSE, TableKind.SPARSE) or rule is None or count > len(fields(rule)):
            raise SpecError(f"the table has kind {kind}, rule {rule_code} and {count} options")
        if not 0 < size <= (MAX_BLOCK if kind == TableKind.DENSE else MAX_DIM):
            raise SpecError(f"the table has size {size}")
        rows, bounded = _decode_rows(content)
        end = _HEAD.size + _ROWS.size + 8 * count
        if len(content) < end + bounded * _BOUND.size:
            raise SpecError("the table spec ends too early")
        if bounded:
            rows = replace(rows, bound=_decode_bound(content, end))
        options = struct.unpack_from(f"<{count}d", content, _HEAD.size + _ROWS.size)
        try:
            name = content[end + bounded * _BOUND.size :].decode()
        except UnicodeDecodeError:
            raise SpecError("the table name is not UTF-8") from None
        made = rule(*options)  # earlier versions saved fewer options, and the others had their defaults
        if wrong := wrong_option(made):
            raise SpecError(f"{rule.__name__} has {wrong}")
        if kind == TableKind.DENSE and (made.row_states or isinstance(made, SparseAdam)):
            raise SpecError(f"{rule.__name__} is for rows, but the table is dense")
        return cls(kind=TableKind(kind), name=name, size=size, rule=made, rows=rows)


def _encoded(bound: Bound) -> bytes:
    return _BOUND.pack(bound.policy, bound.shared, 0, 0, bound.rows, bound.bytes, bound.ttl_s)


def _decode_bound(content: bytes, start: int) -> Bound:
    policy, shared, zero, zeros, rows, size, ttl_s = _BOUND.unpack_from(content, start)
    known = policy in tuple(EvictionPolicy) and shared <= 1 and not (zero or zeros)
    mixed = ttl_s and policy != EvictionPolicy.LRU
    if not known or mixed or not 0 <= ttl_s < math.inf or not (rows or size or ttl_s):
        raise SpecError(f"the bound has policy {policy}, {rows} rows, {size} bytes and {ttl_s} seconds")
    return Bound(rows=rows, bytes=size, policy=EvictionPolicy(policy), ttl_s=ttl_s, shared=bool(shared))


def _decode_rows(content: bytes) -> tuple[RowOptions, bool]:
    """Return the row options, and True if a bound follows."""
    init, entry, statistics, dtype, seed, a, b, filter_a, low, high, last = _ROWS.unpack_from(
        content, _HEAD.size
    )
    known = init in tuple(InitKind) and entry in tuple(EntryKind) and dtype in tuple(RowType)
    if not known or statistics > 1:
        raise SpecError(
            f"the row options have init {init}, entry {entry}, statistics {statistics}, type {dtype}"
        )
    if not all(map(math.isfinite, (a, b, filter_a))) or not low <= high:
        raise SpecError(f"the row options have initializer {a}, {b}, entry {filter_a}, bounds {low}, {high}")
    if not (0 <= last < 2 * MAX_SERVERS + 2 and last.is_integer()):
        raise SpecError(f"the row options end with {last}")
    servers, bounded = divmod(int(last), 2)
    options = RowOptions(
        init=Initializer(InitKind(init), a, b, seed),
        entry=Entry(EntryKind(entry), filter_a),
        low=low,
        high=high,
        statistics=bool(statistics),
        dtype=RowType(dtype),
        servers=servers,
    )
    return options, bool(bounded)


def start_of(trainers: Sequence[str]) -> str:
    """Return a short identifier of one start of a job, a hash of its trainers' endpoints."""
    return xxhash.xxh3_64_hexdigest(",".join(trainers).encode())[:8]


def describe_job(
    sync: bool, trainers: int, servers: int, index: int, settings: str = "", *, start: str = ""
) -> str:
    """Return the description of the job with this server's index and the settings that both sides must
    share.
    """
    count = f"{trainers} trainers ({start})" if start else f"{trainers} trainers"
    return _description(sync, count, f"server {index} of {servers}", settings)


def describe_kept_job(sync: bool, servers: int, index: int, settings: str) -> str:
    """Return the settings that must not change between starts of a job that keeps its tables."""
    return _description(sync, f"server {index} of {servers}", settings)


def _description(sync: bool, *more: str) -> str:
    return ", ".join(filter(None, ("sync training" if sync else "async training", *more)))


class TableError(ValueError):
    """An error for a request that is invalid for the table."""


class ShapeError(TableError):
    """An error for values whose shape differs from the table's shape."""


class KeysError(TableError):
    """An error for keys of a dense table, missing keys of a sparse table, or keys that are not (n,) int64."""


class NotFiniteError(TableError):
    """An error for NaN or infinity among the gradients."""


class FullError(TableError):
    """An error for missing memory for more rows."""

    restart_helps = False  # like the attribute of a FleetError


@contextlib.contextmanager
def torch_memory() -> Iterator[None]:
    """Raise MemoryError, as Python and numpy do, if torch finds no host memory.

    torch itself raises a RuntimeError whose text gives the reason.
    """
    try:
        yield
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise MemoryError(str(error).rpartition("Allocator: ")[2]) from error


@frozen(kw_only=True)
class ShrinkPolicy:
    """The policy of `shrink`. Each call is a day.

    Shows and clicks are multiplied by `show_click_decay_rate`, and the unseen days of a row (0 after a push)
    grow by 1. A row is then removed if its score

        nonclk_coeff * (show - click) + click_coeff * click

    is below `delete_threshold`, or if it was unseen for more than `delete_after_unseen_days`. A key that an
    entry filter counts is forgotten after so many days without a pull in training. Names and defaults are the
    same as in Paddle's ctr accessor.
    """

    show_click_decay_rate: float = 0.98
    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    delete_threshold: float = 0.8
    delete_after_unseen_days: float = 30.0

    def numbers(self) -> NDArray[np.float32]:
        """Return the numbers in the order of the kernel's arguments, (5,) float32."""
        return np.array(astuple(self), np.float32)


# ---- Assign the rows of sparse tables and the dense blocks to servers.


def holders(spec: TableSpec, servers: int) -> Integers:
    """Return the servers, ascending, that share the rows of a sparse table.

    They have the largest hashes of server and name (rendezvous hashing), so the choice does not depend on
    other tables. A key is on the holder with the number (hash of the key) modulo (number of holders).
    """
    return _holders(spec.name, spec.rows.servers, servers)


@cache
def _holders(name: str, count: int, servers: int) -> Integers:
    if not 0 < count < servers:
        return tuple(range(servers))
    by_hash = sorted(range(servers), key=lambda server: xxhash.xxh3_64_intdigest(f"{server} {name}".encode()))
    return tuple(sorted(by_hash[-count:]))


def servers_for(values: int, mb_per_server: float, servers: int) -> int:
    """Return the number of servers that share a table of so many float32 values. See RowOptions.servers."""
    if not mb_per_server:
        return 0
    count = max(1, math.ceil(4 * values / (mb_per_server * 2**20)))
    return count if count < servers else 0


SLICE_ABOVE = 8192
"""Dense parameters with more elements are sliced (Paddle's `slice_var_up` with its `min_block_size`)."""


def block_slices(
    elements: int, row: int, servers: int, slice_up: bool, largest: int
) -> list[tuple[int, int]]:
    """Return the ranges `[start, stop)` of the blocks of a dense parameter of `elements`, with rows of `row`
    elements.

    There is one block for up to 8192 elements. Larger parameters have one block per server, as long as each
    block keeps at least 8192 elements (the rule of Paddle's slice_variable). Cuts are between rows if rows
    are short enough. Blocks have at most `largest` elements.
    """
    if not elements:
        return []
    count = min(servers, elements // SLICE_ABOVE) if slice_up and elements > SLICE_ABOVE else 1
    block = -(-elements // max(count, 1))
    if row <= block:
        block = -(-block // row) * row
    block = min(block, largest)
    return [(start, min(start + block, elements)) for start in range(0, elements, block)]


def place_blocks(names: Sequence[str], servers: int, method: str) -> list[int]:
    """Return the server of each dense block, in turn (RoundRobin) or by a hash of its name (HashName)."""
    if method == "HashName":
        return [zlib.crc32(name.encode()) % servers for name in names]
    return [index % servers for index in range(len(names))]
