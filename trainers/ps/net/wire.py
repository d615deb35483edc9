"""The wire: messages to frames and back. Knows the bytes and checks every length; leaves meaning to server
and client.

A message is one header frame and one frame of raw little-endian bytes for each part:

    header  4s magic "FLPS" | B version | B kind | H code | I rank | I parts
            Q incarnation | Q sequence | Q number | Q checksum
    part    I table | B field | B dtype | H zero | d lr | Q rows | Q cols          (repeated `parts` times)

`cols` is 0 for one-dimensional data. `checksum` is XXH3-64 of every other byte of the message: a flipped
bit in a sequence number or a gradient would otherwise be a valid push. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias, TypeVar

import numpy as np
import torch
import xxhash

MAGIC = b"FLPS"
VERSION = 2
MAX_PARTS = 65_536
MAX_FRAME_BYTES = 256 << 20
MAX_COLS = 512
_LARGEST_RATE = 1e30  # beyond float32 lies an OverflowError

E = TypeVar("E", bound=IntEnum)
Buffer: TypeAlias = bytes | bytearray | memoryview

_HEADER = struct.Struct("<4sBBHIIQQQ")
_CHECKSUM = struct.Struct("<Q")
_HEADER_SIZE = _HEADER.size + _CHECKSUM.size
_PART = struct.Struct("<IBBHdQQ")


class Kind(IntEnum):
    """What a message asks or answers. `number` means: see each."""

    HELLO = 1  # here I am, with these tables; number: restart count. Answer: the step to start from
    ASSIGN = 2  # initial values, from trainer 0
    READY = 3  # all initial values are there
    OPEN = 4  # answer when the tables are ready
    PULL = 5  # values, as of step `number` or later
    PUSH = 6  # gradients of step `number`; applied once for each (rank, incarnation, sequence)
    BARRIER = 7  # answer when every trainer has reached barrier `number`
    FINISH = 8  # no more pushes from me; answer when nobody has any
    LEAVE = 9  # good-bye
    SAVE = (
        10  # write your part of a save, as of step `number`; TEXT: the order. Answer: TEXT, the part's record
    )
    SAVED = 11  # the save that I ordered was committed (number: 1) or given up (0)
    SHRINK = 12  # a day has passed: VALUES, the policy. Answer: number, the rows that went
    DONE = 16  # yes; number: the server's step
    DATA = 17  # yes, and here are the values
    WAIT = 18  # heard; the answer waits for what the text says
    REFUSED = 19  # no; the code and the text say why
    PROBE = 20  # from the server, unasked: finds out whether a connection still stands; not answered


class Field(IntEnum):
    """What a part holds."""

    KEYS = 1  # int64 (n): alone, asks for these rows and makes those that are missing
    ROWS = 2  # float (n, dim): values or gradients of the KEYS part before it
    VALUES = 3  # float (n): values or gradients of a run of dense blocks, the first of which is `table`
    WANT = 4  # int64 (1): asks for the values of that many dense blocks from `table` on
    SPEC = 5  # uint8: an encoded TableSpec
    TEXT = 6  # uint8: UTF-8 for a person
    PEEK = 7  # int64 (n): asks for these rows and makes none
    STATS = 8  # float32 (n, 2): shows and clicks of the rows in the KEYS and ROWS parts before it


class Code(IntEnum):
    """Why a request was refused."""

    NONE = 0
    BAD_MESSAGE = 1
    BAD_VERSION = 2
    UNKNOWN_CLIENT = 3
    UNKNOWN_TABLE = 4
    BAD_SHAPE = 5
    BAD_KEYS = 6
    NOT_READY = 7
    MISMATCH = 8
    TRAINER_LOST = 9
    BAD_STEP = 10
    NOT_FINITE = 11
    FAILED = 12
    STANDSTILL = 13


class WireError(Exception):
    """Bytes that are no message of this protocol. `code` goes back to the sender, if the sender can be
    answered.
    """

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


_DTYPES = {1: torch.float32, 2: torch.int64, 3: torch.uint8, 4: torch.float16, 5: torch.bfloat16}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}
ROW_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FLOATS = frozenset({1, 4, 5})
_FIELD_DTYPES = {
    Field.KEYS: frozenset({2}),
    Field.ROWS: _FLOATS,
    Field.VALUES: _FLOATS,
    Field.WANT: frozenset({2}),
    Field.SPEC: frozenset({3}),
    Field.TEXT: frozenset({3}),
    Field.PEEK: frozenset({2}),
    Field.STATS: frozenset({1}),
}
_TWO_DIMENSIONS = frozenset({Field.ROWS, Field.STATS})


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One tensor of a message: contiguous, on the CPU, with one or two dimensions."""

    table: int
    field: Field
    data: torch.Tensor
    lr: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """A request (with the sender's rank, incarnation and sequence) or the reply to one (with the same
    three).
    """

    kind: Kind
    rank: int = 0
    incarnation: int = 0
    sequence: int = 0
    number: int = 0
    code: Code = Code.NONE
    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        """The TEXT parts, for a person."""
        said = [bytes(part.data.numpy()) for part in self.parts if part.field is Field.TEXT]
        return b" ".join(said).decode("utf-8", "replace")

    def reply(
        self, kind: Kind, *, number: int = 0, code: Code = Code.NONE, parts: tuple[Part, ...] = ()
    ) -> Message:
        return Message(
            kind=kind,
            rank=self.rank,
            incarnation=self.incarnation,
            sequence=self.sequence,
            number=number,
            code=code,
            parts=parts,
        )


def bytes_part(field: Field, content: bytes, table: int = 0) -> Part:
    """A part of raw bytes (SPEC or TEXT)."""
    return Part(table, field, torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8)))


def encode(message: Message) -> list[Buffer]:
    """Frames to send. The part frames share memory with the tensors: leave those alone until the reply.

    Raises WireError for a part that no receiver would take.
    """
    fields = (message.rank, len(message.parts), message.incarnation, message.sequence, message.number)
    header = _HEADER.pack(MAGIC, VERSION, message.kind, message.code, *fields)
    table = b"".join(map(_pack_part, message.parts))
    bodies = [_body(part.data) for part in message.parts]
    if any(len(body) > MAX_FRAME_BYTES for body in bodies):
        raise WireError(Code.BAD_MESSAGE, f"a part of more than {MAX_FRAME_BYTES >> 20} MB")
    return [header + _CHECKSUM.pack(_checksum(header, table, bodies)) + table, *bodies]


def _body(data: torch.Tensor) -> Buffer:
    if not data.numel():
        return b""
    raw = data.view(torch.int16) if data.dtype is torch.bfloat16 else data  # numpy has no bfloat16
    return raw.numpy().data.cast("B")


def _pack_part(part: Part) -> bytes:
    rows, cols = _shape(part.data)
    return _PART.pack(part.table, part.field, _DTYPE_CODES[part.data.dtype], 0, part.lr, rows, cols)


def _checksum(header: bytes, table: bytes, bodies: Iterable[Buffer]) -> int:
    total = xxhash.xxh3_64(header)
    total.update(table)
    for body in bodies:
        total.update(body)
    return total.intdigest()


def _shape(data: torch.Tensor) -> tuple[int, int]:
    return (data.shape[0], data.shape[1]) if data.dim() == 2 else (data.shape[0], 0)


def decode(frames: Sequence[Buffer]) -> Message:
    """The message in these frames. Raises WireError; what it returns has consistent lengths, types and
    shapes.
    """
    if not frames or len(frames[0]) < _HEADER_SIZE:
        raise WireError(Code.BAD_MESSAGE, "no header")
    head = bytes(frames[0])
    magic, version, kind, code, rank, count, incarnation, sequence, number = _HEADER.unpack_from(head)
    if magic != MAGIC:
        raise WireError(Code.BAD_MESSAGE, f"magic is {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError(Code.BAD_VERSION, f"protocol version {version}; this side speaks {VERSION}")
    if count > MAX_PARTS or count != len(frames) - 1 or len(head) != _HEADER_SIZE + count * _PART.size:
        raise WireError(Code.BAD_MESSAGE, f"header announces {count} parts, {len(frames) - 1} frames came")
    (checksum,) = _CHECKSUM.unpack_from(head, _HEADER.size)
    if checksum != _checksum(head[: _HEADER.size], head[_HEADER_SIZE:], frames[1:]):
        raise WireError(Code.BAD_MESSAGE, "the checksum does not fit the content")
    parts = tuple(
        _decode_part(_PART.unpack_from(head, _HEADER_SIZE + index * _PART.size), frames[index + 1])
        for index in range(count)
    )
    return Message(
        kind=_member(Kind, kind),
        rank=rank,
        incarnation=incarnation,
        sequence=sequence,
        number=number,
        code=_member(Code, code),
        parts=parts,
    )


def _member(enum: type[E], value: int) -> E:
    try:
        return enum(value)
    except ValueError:
        raise WireError(Code.BAD_MESSAGE, f"{enum.__name__.lower()} {value} is unknown") from None


def _decode_part(entry: tuple[int, int, int, int, float, int, int], frame: Buffer) -> Part:
    table, field_value, dtype_code, zero, lr, rows, cols = entry
    field = _member(Field, field_value)
    if dtype_code not in _FIELD_DTYPES[field] or zero != 0:
        raise WireError(Code.BAD_MESSAGE, f"field {field.name} with dtype {dtype_code}")
    if (cols > 0) != (field in _TWO_DIMENSIONS):
        raise WireError(Code.BAD_SHAPE, f"field {field.name} of shape {rows} x {cols}")
    if rows > MAX_FRAME_BYTES or cols > MAX_COLS:  # nothing of a row makes any length consistent
        raise WireError(Code.BAD_SHAPE, f"field {field.name} of shape {rows} x {cols}")
    if not abs(lr) <= _LARGEST_RATE:
        raise WireError(Code.BAD_MESSAGE, f"learning rate {lr}")
    dtype = _DTYPES[dtype_code]
    if len(frame) != rows * max(cols, 1) * dtype.itemsize:
        raise WireError(Code.BAD_SHAPE, f"{len(frame)} bytes for {rows} x {cols} of {dtype}")
    data = _tensor(frame, dtype) if rows else torch.empty(0, dtype=dtype)
    return Part(table, field, data.reshape(rows, cols) if cols else data, lr)


def _tensor(frame: Buffer, dtype: torch.dtype) -> torch.Tensor:
    """The frame's own memory where it may be used as it is: small messages come unaligned."""
    array = np.frombuffer(frame, dtype=np.uint8)
    if not array.flags.writeable or array.ctypes.data % dtype.itemsize:
        array = array.copy()
    return torch.from_numpy(array).view(dtype)
