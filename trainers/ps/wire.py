"""Messages to frames and back. Every length is checked here; the meaning belongs to server and client.

A message is a first frame, and one more for each large part:

    header  4s magic "FLPS" | B version | B kind | H code | I rank | I parts
            Q incarnation | Q sequence | Q number | Q checksum
    part    I table | B field | B dtype | H zero | d lr | Q rows | Q cols          (repeated `parts` times)
    data    of each part of less than 64 KiB, raw little-endian bytes and zeros up to a multiple of 8

A frame costs both sides as much as many rows: so a small message is one frame, and a large part is not
copied. `cols` is 0 for one-dimensional data. `checksum` is XXH3-64 of every other byte of the message: a
flipped bit in a sequence number or a gradient would otherwise be a valid push. Nothing is ever unpickled.
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
VERSION = 5
MAX_PARTS = 65_536
MAX_FRAME_BYTES = 256 << 20
MAX_COLS = 512
OWN_FRAME_BYTES = 65_536
"""Parts from this size on have a frame of their own. pyzmq copies smaller ones in any case."""
_LARGEST_RATE = 1e30  # beyond float32 lies an OverflowError

Buffer: TypeAlias = bytes | bytearray | memoryview

_HEADER = struct.Struct("<4sBBHIIQQQQ")
_UNSUMMED = struct.Struct("<4sBBHIIQQQ")  # the header without its checksum
_SUM = struct.Struct("<Q")
_PART = struct.Struct("<IBBHdQQ")


class Kind(IntEnum):
    """What a message requests or answers. The meaning of `number` is given with each."""

    HELLO = 1  # join with these tables; number: restart count. Answer: the step to start from
    ASSIGN = 2  # values, from trainer 0; number: INITIAL or LOADED
    READY = 3  # all initial values have been sent
    OPEN = 4  # answer when the tables are ready
    PULL = 5  # values, as of step `number` or later
    PUSH = 6  # gradients of step `number`, applied once for each (rank, incarnation, sequence); with the
    # code NOT_FINITE it has none, because they were not finite, and in sync the step changes nothing
    BARRIER = 7  # answer when every trainer has reached barrier `number`
    FINISH = 8  # the sender pushes no more; answer when no trainer does
    LEAVE = 9  # the sender disconnects for good
    SAVE = 10  # write your part of a save, as of step `number`; TEXT: SaveRequest. Answer: TEXT, its record
    SAVED = 11  # the save that the sender requested was committed (number: 1) or abandoned (0)
    SHRINK = 12  # a day has passed; VALUES: the policy. Answer: number, the rows that were removed
    TRAINERS = 13  # in a server's log only: from here on `number` new trainers; TEXT: of which start
    GATHER = 14  # TEXT: a contribution to gather `number`; 0: any. Answer: TEXTs, all contributions
    # In a server's log only: it is `number` ms since 1970, for rows that have a time to live. TEXT: the times
    # of rows move by so many ms first, because the clock was set
    TIME = 15
    DONE = 16  # success; number: the server's step
    DATA = 17  # success, with values
    WAIT = 18  # received; the answer waits for what the text says
    REFUSED = 19  # refused; the code and the text say why
    PROBE = 20  # from the server, to find out whether a connection is open; not answered
    SHRUNK = 21  # in a server's log only: the last SHRINK is over, and budgets evict rows again
    # From the publisher: cut the tables, in sync as of step `number`; TEXT: SaveRequest. Answer: number, the
    # server's step, which is later when it has passed that one; with the code MISMATCH it cannot say what has
    # changed. Without a TEXT only the answer. In a server's log: the version TEXT was cut.
    PUBLISH = 22
    WRITTEN = 23  # from the publisher: answer when the part TEXT is written. Answer: TEXT, its record
    PUBLISHED = 24  # from the publisher: the version TEXT was committed (number: 1) or abandoned (0)
    MERGE = 25  # from the publisher: merge your parts of versions; TEXT: SaveRequest. Answer: as WRITTEN
    REFRESH = 26  # publish, as of step `number` or later; TEXT, VALUES of each buffer. Answer: the version
    # TEXT: a stream. Answer: TEXT, what has been pushed of each of its shards; number: the first step in
    # which this server takes other records from the sender
    POSITIONS = 27
    LOOK = 28  # from anyone: what a table, TEXT, has of KEYS; changes nothing. Answer: TEXT, JSON
    SKIP = 29  # the sender's next push is of step `number`; no trainer waits for its pushes before that


NO_TRAINER = (1 << 32) - 1
"""The rank of a sender that is not a trainer."""

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
    RECORDS = 10  # uint8: first in a PUSH, the records of streams that its gradients are of
    WRITTEN = 11  # float (n): as VALUES, in a PUSH: values to set before its gradients are applied


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
    Field.RECORDS: (3,),
    Field.WRITTEN: _FLOATS,
}
_TWO_DIMENSIONS = (Field.ROWS, Field.STATS)
_KINDS = {kind.value: kind for kind in Kind}  # used for every message; Kind(value) is slow
_CODES = {code.value: code for code in Code}


class _Form(NamedTuple):
    """How a field with one of its dtypes is encoded. numpy has no bfloat16: its bytes pass as int16."""

    field: Field
    dtype: torch.dtype
    raw: np.dtype[Any]
    itemsize: int
    raw_view: bool
    two_dimensions: bool


def _raw(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(np.int16 if dtype is torch.bfloat16 else str(dtype).removeprefix("torch."))


_FORMS = {
    (field.value, code): _Form(
        field,
        _DTYPES[code],
        _raw(_DTYPES[code]),
        _DTYPES[code].itemsize,
        _DTYPES[code] is torch.bfloat16,
        field in _TWO_DIMENSIONS,
    )
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
        self,
        kind: Kind,
        *,
        number: int = 0,
        code: Code = Code.NONE,
        parts: tuple[Part, ...] = (),
        text: str | bytes | None = None,
    ) -> Message:
        """Answer this request, with these parts or a TEXT part."""
        if text is not None:
            parts = (text_part(text),)
        return Message(kind, self.rank, self.incarnation, self.sequence, number, code, parts)


def bytes_part(field: Field, content: bytes, table: int = 0) -> Part:
    """A part of raw bytes (SPEC, TEXT or RECORDS)."""
    return Part(table, field, torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8)))


def text_part(text: str | bytes) -> Part:
    """Return a TEXT part."""
    return bytes_part(Field.TEXT, text.encode() if isinstance(text, str) else text)


def encode(message: Message, *, stored: bool = False) -> list[Buffer]:
    """Return the frames to send. Frames of large parts share memory with the tensors: leave the tensors alone
    until the reply.

    `stored`: the frames are for a file, which has no limits. Otherwise raises WireError for a message that no
    receiver would accept.
    """
    kind, rank, incarnation, sequence, number, code, parts = message
    header = _UNSUMMED.pack(MAGIC, VERSION, kind, code, rank, len(parts), incarnation, sequence, number)
    rest: list[Buffer] = [_entry(part) for part in parts]
    own: list[Buffer] = []
    if len(parts) > MAX_PARTS and not stored:
        raise WireError(Code.BAD_MESSAGE, f"{len(parts)} parts; a message has at most {MAX_PARTS}")
    for part in parts:
        body = _body(part.data)
        size = len(body)
        if size > MAX_FRAME_BYTES and not stored:
            raise WireError(Code.BAD_MESSAGE, f"a part of more than {MAX_FRAME_BYTES >> 20} MB")
        if size >= OWN_FRAME_BYTES:
            own.append(body)
        else:
            rest.append(body)
            if size % 8:
                rest.append(bytes(-size % 8))
    described = b"".join(rest)
    if len(described) > MAX_FRAME_BYTES - _HEADER.size and not stored:
        raise WireError(Code.BAD_MESSAGE, f"small parts of more than {MAX_FRAME_BYTES >> 20} MB together")
    return [b"".join((header, _SUM.pack(_checksum(header, described, own)), described)), *own]


def _entry(part: Part) -> bytes:
    number, field, data, lr = part
    rows, cols = data.shape if data.dim() == 2 else (data.shape[0], 0)
    return _PART.pack(number, field, _DTYPE_CODES[data.dtype], 0, lr, rows, cols)


def _body(data: torch.Tensor) -> Buffer:
    raw = data.view(torch.int16) if data.dtype is torch.bfloat16 else data
    return raw.numpy().data.cast("B") if data.nbytes else b""


def _checksum(header: Buffer, rest: Buffer, own: Iterable[Buffer]) -> int:
    total = xxhash.xxh3_64(header)
    total.update(rest)
    for body in own:
        total.update(body)
    return total.intdigest()


def decode(frames: Sequence[Buffer], *, stored: bool = False) -> Message:
    """Return the message in these frames, which has consistent lengths, types and shapes. `stored`: as of
    `encode`. Raises WireError.
    """
    if not frames or len(frames[0]) < _HEADER.size:
        raise WireError(Code.BAD_MESSAGE, "the header is missing")
    first = bytearray(frames[0])  # a copy is aligned, and may be written
    magic, version, kind, code, rank, count, incarnation, sequence, number, checksum = _HEADER.unpack_from(
        first
    )
    if magic != MAGIC:
        raise WireError(Code.BAD_MESSAGE, f"magic is {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError(Code.BAD_VERSION, f"its protocol version is {version}, not {VERSION}")
    if (count > MAX_PARTS and not stored) or _HEADER.size + count * _PART.size > len(first):
        raise WireError(Code.BAD_MESSAGE, f"the header announces {count} parts, which are not all there")
    with memoryview(first) as view:
        if checksum != _checksum(view[: _UNSUMMED.size], view[_HEADER.size :], frames[1:]):
            raise WireError(Code.BAD_MESSAGE, "the checksum is wrong")
    if kind not in _KINDS or code not in _CODES:
        raise WireError(Code.BAD_MESSAGE, f"kind {kind} or code {code} is unknown")
    parts = _decode_parts(first, count, frames[1:], stored)
    return Message(_KINDS[kind], rank, incarnation, sequence, number, _CODES[code], parts)


def _decode_parts(first: bytearray, count: int, own: Sequence[Buffer], stored: bool) -> tuple[Part, ...]:
    """Return the parts that the first frame describes: it has their data, or a frame of their own has."""
    parts, taken, at = [], 0, _HEADER.size + count * _PART.size
    for offset in range(_HEADER.size, at, _PART.size):
        entry = _PART.unpack_from(first, offset)
        form, size = _checked(entry, stored)
        if size < OWN_FRAME_BYTES:
            if at + size > len(first):
                raise WireError(Code.BAD_SHAPE, f"{len(first) - at} bytes for a part of {size}")
            parts.append(_part(entry, form, first, at))
            at += size + -size % 8
        else:
            if taken == len(own) or len(own[taken]) != size:
                raise WireError(Code.BAD_SHAPE, f"there is no frame of {size} bytes for a part")
            parts.append(_part(entry, form, own[taken]))
            taken += 1
    if at != len(first) or taken != len(own):
        raise WireError(Code.BAD_SHAPE, "there are more bytes than the parts need")
    return tuple(parts)


def _checked(entry: tuple[Any, ...], stored: bool) -> tuple[_Form, int]:
    """Return the form of a part, and its bytes."""
    _, field, dtype_code, zero, lr, rows, cols = entry
    form = _FORMS.get((field, dtype_code))
    if form is None or zero:
        raise WireError(Code.BAD_MESSAGE, f"field {field} with dtype {dtype_code}")
    if (cols > 0) is not form.two_dimensions or (rows > MAX_FRAME_BYTES and not stored) or cols > MAX_COLS:
        # Without the bounds, a part without bytes could claim any length.
        raise WireError(Code.BAD_SHAPE, f"field {form.field.name} of shape {rows} x {cols}")
    if not abs(lr) <= _LARGEST_RATE:
        raise WireError(Code.BAD_MESSAGE, f"learning rate {lr}")
    return form, rows * (cols or 1) * form.itemsize


def _part(entry: tuple[Any, ...], form: _Form, body: Buffer, offset: int = 0) -> Part:
    """In the frame's own memory if it is aligned; in a copy otherwise."""
    number, _, _, _, lr, rows, cols = entry
    array = np.ndarray((rows, cols) if cols else (rows,), form.raw, body, offset)
    data = torch.from_numpy(array if array.flags.behaved else array.copy())
    return Part(number, form.field, data.view(form.dtype) if form.raw_view else data, lr)
