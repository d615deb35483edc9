"""TableSpec: what a table is, before there is one; its form on the wire. Leaves memory to `table`."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields
from enum import IntEnum

from trainers.ps.tables.rules import RULES, AnyRule, options_of

MAX_BLOCK = 1 << 24
MAX_DIM = 1 << 20

_HEAD = struct.Struct("<BBHQ")


class SpecError(ValueError):
    """Bytes that describe no table."""


class TableKind(IntEnum):
    DENSE = 1
    SPARSE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """`size` is the number of elements of a dense block, or the row length of a sparse table."""

    kind: TableKind
    name: str
    size: int
    rule: AnyRule

    def encode(self) -> bytes:
        """B kind | B rule | H options | Q size | d for each option | name in UTF-8."""
        options = options_of(self.rule)
        head = _HEAD.pack(self.kind, self.rule.code, len(options), self.size)
        return head + struct.pack(f"<{len(options)}d", *options) + self.name.encode()

    @classmethod
    def decode(cls, content: bytes) -> TableSpec:
        """Raises SpecError when the bytes are not exactly what `encode` writes."""
        if len(content) < _HEAD.size:
            raise SpecError(f"a table spec of {len(content)} bytes")
        kind, rule_code, count, size = _HEAD.unpack_from(content)
        rule = RULES.get(rule_code)
        if kind not in (TableKind.DENSE, TableKind.SPARSE) or rule is None or count != len(fields(rule)):
            raise SpecError(f"a table of kind {kind} with rule {rule_code} and {count} options")
        if not 0 < size <= (MAX_BLOCK if kind == TableKind.DENSE else MAX_DIM):
            raise SpecError(f"a table of size {size}")
        end = _HEAD.size + 8 * count
        if len(content) < end:
            raise SpecError("a table spec that ends too early")
        options = struct.unpack_from(f"<{count}d", content, _HEAD.size)
        if not all(map(math.isfinite, options)):
            raise SpecError(f"rule options {options}")
        try:
            name = content[end:].decode()
        except UnicodeDecodeError:
            raise SpecError("a table name that is not UTF-8") from None
        return cls(kind=TableKind(kind), name=name, size=size, rule=rule(*options))


def job_words(sync: bool, trainers: int, servers: int, index: int) -> str:
    """How both sides describe the job and this server's place in it."""
    return f"{'sync' if sync else 'async'} training, {trainers} trainers, server {index} of {servers}"
