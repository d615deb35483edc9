"""The spec of a table and its encoding, which servers hold a table, which rows `shrink` removes,
and the errors of invalid requests.

Imports no kernels: a process without tables imports this too.
"""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from enum import IntEnum
from functools import cache

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

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
    """Bytes that do not describe a table."""


class TableKind(IntEnum):
    DENSE = 1
    SPARSE = 2


class InitKind(IntEnum):
    """How the values of a new row are drawn. Each kind says what `a` and `b` of Initializer are."""

    UNIFORM = 1  # from a up to b
    NORMAL = 2  # mean a, standard deviation b


@frozen
class Initializer:
    """The values of a row as a pure function of (seed, key, column). Zeros: UNIFORM from 0 to 0."""

    kind: InitKind = InitKind.UNIFORM
    a: float = 0.0
    b: float = 0.0
    seed: int = 0


class RowType(IntEnum):
    """The type of a row's values; its optimizer state and statistics are float32."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

    @classmethod
    def of(cls, name: str) -> RowType:
        """By the name of torch's dtype."""
        return cls[name.upper()]

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.name.lower())
        return found


class EntryKind(IntEnum):
    """Which keys get a row. Each kind says what `a` of Entry is."""

    ALL = 0
    PROBABILITY = 1  # a key has a row with probability a: decided once, by (seed, key)
    COUNT = 2  # once a key has been pulled in training a times
    SHOW_CLICK = 3  # as ALL, and pushes bring the shows and clicks of their keys


@frozen
class Entry:
    """An entry filter: a key without a row reads as its initial value, and gradients for it are dropped."""

    kind: EntryKind = EntryKind.ALL
    a: float = 0.0


class EvictionPolicy(IntEnum):
    """Which rows leave a full table first."""

    LRU = 1  # those that were updated least recently
    LFU = 2  # those with the fewest updates, where older ones count less
    SCORE = 3  # as LFU, but updates count as many shows, and ten times as many clicks, as they bring


@frozen(kw_only=True)
class Bound:
    """How much the table may have on one server: rows, or bytes of memory; 0: any number. Rows that were not
    updated for `ttl_s` seconds are removed; 0: never. `shared`: all tables with this bound have it together.
    """

    rows: int = 0
    bytes: int = 0
    policy: EvictionPolicy = EvictionPolicy.LRU
    ttl_s: float = 0.0
    shared: bool = False

    @classmethod
    def of(
        cls,
        where: str,
        max_rows: int | None,
        max_bytes: int | None,
        evict: str | None,
        ttl_s: float | None,
    ) -> Bound | None:
        """From the settings of a user, for all servers together; None: no bound. Raises UsageError, which
        names the settings of `where`.
        """
        if max_rows is None and max_bytes is None and ttl_s is None:
            if evict is not None:
                raise UsageError(f"{where} evict needs max_rows or max_bytes")
            return None
        for name, number in (("max_rows", max_rows), ("max_bytes", max_bytes)):
            if number is not None:
                whole(f"{where} {name}", number, 1)
        if max_rows is not None and max_bytes is not None:
            raise UsageError(f"{where} has max_rows and max_bytes; pass only one of them")
        one_of(f"{where} evict", evict or "lru", EVICTIONS)
        if ttl_s is not None:
            positive(f"{where} ttl_s", ttl_s)
            if evict not in (None, "lru"):
                raise UsageError(
                    f"{where} has ttl_s and evict {evict!r}: a row has one stamp only, which is the time of "
                    "its last update then; use evict 'lru'"
                )
        policy = EvictionPolicy[(evict or "lru").upper()]
        return cls(rows=max_rows or 0, bytes=max_bytes or 0, policy=policy, ttl_s=float(ttl_s or 0))

    def on(self, servers: int) -> Bound:
        """The share of one of so many servers."""
        return replace(self, rows=-(-self.rows // servers), bytes=-(-self.bytes // servers))


EVICTIONS = tuple(policy.name.lower() for policy in EvictionPolicy)


@frozen(kw_only=True)
class RowOptions:
    """What only sparse tables have. `low` and `high` bound every value after an update. `statistics`: each
    row counts shows, clicks and unseen days. `dtype`: the type of the values. `bound`: how many rows there
    may be. `servers`: how many servers share the rows; 0: all of them.
    """

    init: Initializer = Initializer()
    entry: Entry = Entry()
    low: float = -math.inf
    high: float = math.inf
    statistics: bool = False
    dtype: RowType = RowType.FLOAT32
    bound: Bound | None = None
    servers: int = 0


@frozen(kw_only=True)
class TableSpec:
    """`size` is the number of elements of a dense block, or the row length of a sparse table."""

    kind: TableKind
    name: str
    size: int
    rule: AnyRule
    rows: RowOptions = RowOptions()

    @property
    def ages(self) -> bool:
        """Whether a `shrink` changes the table: it has statistics, or candidates that wait for a row."""
        kinds = (EntryKind.SHOW_CLICK, EntryKind.COUNT)
        return self.kind is TableKind.SPARSE and (self.rows.statistics or self.rows.entry.kind in kinds)

    def encode(self) -> bytes:
        """B kind | B rule | H options | Q size | row options | d for each rule option | bound | name, UTF-8.

        Row options: B init kind | B entry kind | B statistics | B row type | Q seed | d init a | d init b |
        d entry a | d low | d high | d twice the servers, and 1 more if there is a bound. Bound: B policy |
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
        """Raises SpecError when the bytes are not exactly what `encode` writes."""
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
        made = rule(*options)  # earlier versions saved fewer options: the others had their defaults
        if wrong := wrong_option(made):
            raise SpecError(f"{rule.__name__} has {wrong}")
        if kind == TableKind.DENSE and (made.row_states or isinstance(made, SparseAdam)):
            raise SpecError(f"{rule.__name__} is for rows, and the table is dense")
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
    """The row options, and whether a bound follows."""
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
    """A short identifier of one start of a job: a hash of its trainers' endpoints."""
    return xxhash.xxh3_64_hexdigest(",".join(trainers).encode())[:8]


def describe_job(
    sync: bool, trainers: int, servers: int, index: int, settings: str = "", *, start: str = ""
) -> str:
    """How both sides describe the job, this server's index, and the settings that both must have."""
    count = f"{trainers} trainers ({start})" if start else f"{trainers} trainers"
    return _description(sync, count, f"server {index} of {servers}", settings)


def describe_kept_job(sync: bool, servers: int, index: int, settings: str = "") -> str:
    """What must not change between starts of a job that keeps its tables."""
    return _description(sync, f"server {index} of {servers}", settings)


def _description(sync: bool, *more: str) -> str:
    return ", ".join(filter(None, ("sync training" if sync else "async training", *more)))


class TableError(ValueError):
    """A request that is invalid for the table."""


class ShapeError(TableError):
    """Values of another shape than the table's."""


class KeysError(TableError):
    """Keys for a dense table, no keys for a sparse one, or keys that are not (n,) int64."""


class NotFiniteError(TableError):
    """NaN or infinity among the gradients."""


class FullError(TableError):
    """No room for more rows."""

    restart_helps = False  # as of a FleetError


@contextlib.contextmanager
def torch_memory() -> Iterator[None]:
    """Raises MemoryError, as Python and numpy do, where torch finds no memory of the host: its own error is a
    RuntimeError that says so.
    """
    try:
        yield
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise MemoryError(str(error).rpartition("Allocator: ")[2]) from error


@frozen(kw_only=True)
class ShrinkPolicy:
    """Each `shrink` is a day: shows and clicks are multiplied by `show_click_decay_rate`, and the unseen
    days of a row (0 after a push) grow by 1. Then a row is removed whose score,

        nonclk_coeff * (show - click) + click_coeff * click,

    is below `delete_threshold`, or which was unseen for more than `delete_after_unseen_days`; and a key that
    an entry filter counts is forgotten when training has not pulled it for so many. Names and defaults are
    those of Paddle's ctr accessor.
    """

    show_click_decay_rate: float = 0.98
    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    delete_threshold: float = 0.8
    delete_after_unseen_days: float = 30.0

    def numbers(self) -> NDArray[np.float32]:
        """In the order of the kernel's arguments."""
        coefficients = self.show_click_decay_rate, self.nonclk_coeff, self.click_coeff
        return np.array([*coefficients, self.delete_threshold, self.delete_after_unseen_days], np.float32)


# ---- Which servers hold the rows of a sparse table, and which server holds which dense block.


def holders(spec: TableSpec, servers: int) -> tuple[int, ...]:
    """The servers, ascending, that share the rows of a sparse table: those with the largest hashes of server
    and name (rendezvous hashing). So the choice does not depend on other tables. A key is on the holder
    number (hash of the key) modulo their number.
    """
    return _holders(spec.name, spec.rows.servers, servers)


@cache
def _holders(name: str, count: int, servers: int) -> tuple[int, ...]:
    if not 0 < count < servers:
        return tuple(range(servers))
    by_hash = sorted(range(servers), key=lambda server: xxhash.xxh3_64_intdigest(f"{server} {name}".encode()))
    return tuple(sorted(by_hash[-count:]))


def servers_for(values: int, mb_per_server: float, servers: int) -> int:
    """How many servers share a table of so many float32 values: see RowOptions.servers."""
    if not mb_per_server:
        return 0
    count = max(1, math.ceil(4 * values / (mb_per_server * 2**20)))
    return count if count < servers else 0


SLICE_ABOVE = 8192
"""Dense parameters with more elements than this are sliced (Paddle's `slice_var_up` with its
`min_block_size`).
"""


def block_slices(
    elements: int, row: int, servers: int, slice_up: bool, largest: int
) -> list[tuple[int, int]]:
    """`[start, stop)` of the blocks of a dense parameter of `elements`, whose rows have `row` elements.

    One block for up to 8192 elements; above, as many as there are servers while each keeps at least 8192
    elements (the rule of Paddle's slice_variable), cut between rows where rows are short enough. No block
    is larger than `largest`.
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
    """The server of each dense block: in turn (RoundRobin), or by a hash of its name (HashName)."""
    if method == "HashName":
        return [zlib.crc32(name.encode()) % servers for name in names]
    return [index % servers for index in range(len(names))]
