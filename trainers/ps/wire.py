"""Messages to frames and back. Every length is checked here; the meaning belongs to server and client.

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
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash

MAGIC = b"FLPS"
VERSION = 4
MAX_PARTS = 65_536
MAX_FRAME_BYTES = 256 << 20
MAX_COLS = 512
_LARGEST_RATE = 1e30  # beyond float32 lies an OverflowError

Buffer: TypeAlias = bytes | bytearray | memoryview

_HEADER = struct.Struct("<4sBBHIIQQQQ")
_UNSUMMED = struct.Struct("<4sBBHIIQQQ")  # the header without its checksum
_PART = struct.Struct("<IBBHdQQ")


class Kind(IntEnum):
    """What a message requests or answers. The meaning of `number` is given with each."""

    HELLO = 1  # join with these tables; number: restart count. Answer: the step to start from
    ASSIGN = 2  # values, from trainer 0; number: INITIAL or LOADED
    READY = 3  # all initial values have been sent
    OPEN = 4  # answer when the tables are ready
    PULL = 5  # values, as of step `number` or later
    PUSH = 6  # gradients of step `number`; applied once for each (rank, incarnation, sequence)
    BARRIER = 7  # answer when every trainer has reached barrier `number`
    FINISH = 8  # the sender pushes no more; answer when no trainer does
    LEAVE = 9  # the sender disconnects for good
    SAVE = 10  # write your part of a save, as of step `number`; TEXT: SaveRequest. Answer: TEXT, its record
    SAVED = 11  # the save that the sender requested was committed (number: 1) or abandoned (0)
    SHRINK = 12  # a day has passed; VALUES: the policy. Answer: number, the rows that were removed
    TRAINERS = 13  # in a server's log only: from here on `number` new trainers; TEXT: of which start
    GATHER = 14  # TEXT: a contribution to gather `number`; 0: any. Answer: TEXTs, all contributions
    TIME = 15  # in a server's log only: it is `number` ms since 1970, for rows that have a time to live
    DONE = 16  # success; number: the server's step
    DATA = 17  # success, with values
    WAIT = 18  # received; the answer waits for what the text says
    REFUSED = 19  # refused; the code and the text say why
    PROBE = 20  # from the server, to find out whether a connection is open; not answered
    SHRUNK = 21  # in a server's log only: the last SHRINK is over, and budgets evict rows again


INITIAL, LOADED = 0, 1
"""Whether an ASSIGN has the first values, or others in their place, which leave optimizer state as it is."""


class Field(IntEnum):
    """What a part holds."""

    KEYS = 1  # int64 (n): alone, requests these rows and inserts missing ones
    ROWS = 2  # float (n, dim): values or gradients of the KEYS part before it
    VALUES = 3  # float (n): values or gradients of a run of dense blocks, the first of which is `table`
    WANT = 4  # int64 (1): requests the values of that many dense blocks from `table` on
    SPEC = 5  # uint8: an encoded TableSpec
    TEXT = 6  # uint8: UTF-8
    PEEK = 7  # int64 (n): requests these rows and inserts none
    STATS = 8  # float32 (n, 2): shows and clicks of the rows in the KEYS and ROWS parts before it
    SPANS = 9  # int64 (g): the KEYS or PEEK part that follows is for g tables, and has so many keys of each


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
    DEADLOCK = 13
    NO_MEMORY = 14


class WireError(Exception):
    """Bytes that are not a message of this protocol. `code` is sent back if the sender can be answered."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


_DTYPES = {1: torch.float32, 2: torch.int64, 3: torch.uint8, 4: torch.float16, 5: torch.bfloat16}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}
ROW_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FLOATS = (1, 4, 5)
_FIELD_DTYPES = {
    Field.KEYS: (2,),
    Field.ROWS: _FLOATS,
    Field.VALUES: _FLOATS,
    Field.WANT: (2,),
    Field.SPEC: (3,),
    Field.TEXT: (3,),
    Field.PEEK: (2,),
    Field.STATS: (1,),
    Field.SPANS: (2,),
}
_TWO_DIMENSIONS = (Field.ROWS, Field.STATS)
_KINDS = {kind.value: kind for kind in Kind}  # used for every message; Kind(value) is slow
_CODES = {code.value: code for code in Code}


class _Form(NamedTuple):
    """How a field with one of its dtypes is encoded. numpy has no bfloat16: its bytes pass as int16."""

    field: Field
    dtype: torch.dtype
    raw: np.dtype[Any]
    two_dimensions: bool


def _raw(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(np.int16 if dtype is torch.bfloat16 else str(dtype).removeprefix("torch."))


_FORMS = {
    (field.value, code): _Form(field, _DTYPES[code], _raw(_DTYPES[code]), field in _TWO_DIMENSIONS)
    for field, codes in _FIELD_DTYPES.items()
    for code in codes
}


class Part(NamedTuple):
    """One tensor of a message: contiguous, on the CPU, with one or two dimensions."""

    table: int
    field: Field
    data: torch.Tensor
    lr: float = 0.0


class Message(NamedTuple):
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
        """The TEXT parts, joined."""
        texts = [bytes(part.data.numpy()) for part in self.parts if part.field is Field.TEXT]
        return b" ".join(texts).decode("utf-8", "replace")

    def reply(
        self, kind: Kind, *, number: int = 0, code: Code = Code.NONE, parts: tuple[Part, ...] = ()
    ) -> Message:
        return Message(kind, self.rank, self.incarnation, self.sequence, number, code, parts)


def bytes_part(field: Field, content: bytes, table: int = 0) -> Part:
    """A part of raw bytes (SPEC or TEXT)."""
    return Part(table, field, torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8)))


def encode(message: Message) -> list[Buffer]:
    """Frames to send. The part frames share memory with the tensors: leave those alone until the reply.

    Raises WireError for a part that no receiver would accept.
    """
    kind, rank, incarnation, sequence, number, code, parts = message
    header = _UNSUMMED.pack(MAGIC, VERSION, kind, code, rank, len(parts), incarnation, sequence, number)
    table = b"".join([_entry(part) for part in parts])
    bodies = [_body(part.data) for part in parts]
    checksum = _checksum(header + table, bodies).to_bytes(8, "little")
    return [header + checksum + table, *bodies]


def _entry(part: Part) -> bytes:
    number, field, data, lr = part
    rows, cols = data.shape if data.dim() == 2 else (data.shape[0], 0)
    return _PART.pack(number, field, _DTYPE_CODES[data.dtype], 0, lr, rows, cols)


def _body(data: torch.Tensor) -> Buffer:
    if data.nbytes > MAX_FRAME_BYTES:
        raise WireError(Code.BAD_MESSAGE, f"a part of more than {MAX_FRAME_BYTES >> 20} MB")
    raw = data.view(torch.int16) if data.dtype is torch.bfloat16 else data
    return raw.numpy().data.cast("B") if data.nbytes else b""


def _checksum(described: bytes, bodies: Iterable[Buffer]) -> int:
    total = xxhash.xxh3_64(described)
    for body in bodies:
        total.update(body)
    return total.intdigest()


def decode(frames: Sequence[Buffer]) -> Message:
    """The message in these frames. Raises WireError; what it returns has consistent lengths, types and
    shapes.
    """
    if not frames or len(frames[0]) < _HEADER.size:
        raise WireError(Code.BAD_MESSAGE, "the header is missing")
    head, bodies = bytes(frames[0]), frames[1:]
    magic, version, kind, code, rank, count, incarnation, sequence, number, checksum = _HEADER.unpack_from(
        head
    )
    if magic != MAGIC:
        raise WireError(Code.BAD_MESSAGE, f"magic is {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError(Code.BAD_VERSION, f"its protocol version is {version}, not {VERSION}")
    if count > MAX_PARTS or count != len(bodies) or len(head) != _HEADER.size + count * _PART.size:
        raise WireError(
            Code.BAD_MESSAGE, f"the header announces {count} parts, but {len(bodies)} frames came"
        )
    table = head[_HEADER.size :]
    if checksum != _checksum(head[: _UNSUMMED.size] + table, bodies):
        raise WireError(Code.BAD_MESSAGE, "the checksum is wrong")
    if kind not in _KINDS or code not in _CODES:
        raise WireError(Code.BAD_MESSAGE, f"kind {kind} or code {code} is unknown")
    parts = tuple(map(_decode_part, _PART.iter_unpack(table), bodies))
    return Message(_KINDS[kind], rank, incarnation, sequence, number, _CODES[code], parts)


def _decode_part(entry: tuple[Any, ...], body: Buffer) -> Part:
    number, field, dtype_code, zero, lr, rows, cols = entry
    form = _FORMS.get((field, dtype_code))
    if form is None or zero:
        raise WireError(Code.BAD_MESSAGE, f"field {field} with dtype {dtype_code}")
    if (cols > 0) is not form.two_dimensions or rows > MAX_FRAME_BYTES or cols > MAX_COLS:
        # Without the bounds, a part without bytes could claim any length.
        raise WireError(Code.BAD_SHAPE, f"field {form.field.name} of shape {rows} x {cols}")
    if not abs(lr) <= _LARGEST_RATE:
        raise WireError(Code.BAD_MESSAGE, f"learning rate {lr}")
    if len(body) != rows * (cols or 1) * form.raw.itemsize:
        raise WireError(Code.BAD_SHAPE, f"{len(body)} bytes for {rows} x {cols} of {form.dtype}")
    return Part(number, form.field, _tensor(body, form, (rows, cols) if cols else (rows,)), lr)


def _tensor(body: Buffer, form: _Form, shape: tuple[int, ...]) -> torch.Tensor:
    """The frame's own memory if it is aligned, which that of small messages is not; a copy otherwise."""
    array = np.ndarray(shape, form.raw, body)
    data = torch.from_numpy(array if array.flags.behaved else array.copy())
    return data.view(form.dtype) if form.dtype is torch.bfloat16 else data
