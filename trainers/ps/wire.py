"""Encode messages as frames, and decode frames. Every length is checked here. Server and client give the
messages their meaning.

A message is a first frame, plus one frame for each large part:

    header  4s magic "FLPS" | B version | B kind | H code | I rank | I parts
            Q incarnation | Q sequence | Q number | Q checksum
    part    I table | B field | B dtype | H zero | d lr | Q rows | Q cols          (repeated `parts` times)
    data    of each part of less than 64 KiB, raw little-endian bytes and zeros up to a multiple of 8

A frame costs both sides as much as many rows. A small message is therefore one frame, and a large part is not
copied. `cols` is 0 for one-dimensional data. `checksum` is the XXH3-64 of all other bytes of the message,
because a flipped bit in a sequence number or a gradient would otherwise be a valid push. Nothing is ever
unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

MAGIC = b"FLPS"
VERSION = 5
MAX_PARTS = 65_536
MAX_FRAME_BYTES = 256 << 20
MAX_PART_BYTES = 8 << 30
"""The most bytes of a part. A part of more than MAX_FRAME_BYTES has several frames."""
MAX_COLS = 512
OWN_FRAME_BYTES = 65_536
"""A part of at least this size has its own frame. pyzmq copies smaller frames in any case."""
_LARGEST_RATE = 1e30  # larger values overflow float32

Buffer = bytes | bytearray | memoryview

_HEADER = struct.Struct("<4sBBHIIQQQQ")
_UNSUMMED = struct.Struct("<4sBBHIIQQQ")  # the header without its checksum
_SUM = struct.Struct("<Q")
_PART = struct.Struct("<IBBHdQQ")


class Kind(IntEnum):
    """The request or the answer that a message stands for. The comment of each kind explains `number`."""

    HELLO = 1  # join with these tables, `number` is the restart count. Answer: the step to start from
    ASSIGN = 2  # values from trainer 0, `number` is INITIAL or LOADED
    READY = 3  # all initial values have been sent
    OPEN = 4  # request an answer when the tables are ready
    PULL = 5  # request values as of step `number` or later
    # Gradients of step `number`, applied once for each (rank, incarnation, sequence). With the code
    # NOT_FINITE, the message contains no gradients because they were not finite. In sync mode, such a step
    # changes nothing.
    PUSH = 6
    BARRIER = 7  # request an answer when every trainer has reached barrier `number`
    FINISH = 8  # the sender has finished its pushes, answer when all trainers have
    LEAVE = 9  # the sender disconnects for good
    # Write your part of saved tables, as of step `number`. TEXT is a SaveRequest. Answer: TEXT, the record of
    # the part.
    SAVE = 10
    SAVED = 11  # the save that the sender requested was committed (`number` 1) or abandoned (0)
    SHRINK = 12  # a day has passed, VALUES is the policy. Answer: `number` is the count of removed rows
    # In a server's write-ahead log only. From here on there are `number` new trainers. TEXT is their start.
    TRAINERS = 13
    GATHER = 14  # TEXT is a contribution to gather `number`, 0 means any. Answer: all contributions as TEXTs
    # In a server's write-ahead log only. The time is `number` ms since 1970, for rows that have a time to
    # live. If the clock was set, TEXT is the number of ms by which the times of rows move first.
    TIME = 15
    DONE = 16  # success, `number` is the server's step
    DATA = 17  # success, with values
    WAIT = 18  # received, the answer waits for the event in the text
    REFUSED = 19  # refused, the code and the text give the reason
    PROBE = 20  # sent by the server to check that a connection is open, without an answer
    SHRUNK = 21  # in a write-ahead log only: the last SHRINK has ended, and budgets evict rows again
    # From the publisher. Cut the tables, in sync mode as of step `number`. TEXT is a SaveRequest. In the
    # answer, `number` is the server's step, which is later if the server has passed the requested step. With
    # the code MISMATCH, the server cannot list the changes. A request without a TEXT only gets the answer.
    # Its `number` is the last committed version. In a server's write-ahead log, the version TEXT was cut.
    PUBLISH = 22
    WRITTEN = 23  # from the publisher: answer when the part TEXT is written. Answer: TEXT, its record
    PUBLISHED = 24  # from the publisher: the version TEXT was committed (`number` 1) or abandoned (0)
    MERGE = 25  # from the publisher: merge your parts of versions, TEXT is a SaveRequest. Answer: as WRITTEN
    # Publish as of step `number` or later. The parts are TEXT and VALUES of each buffer. Answer: the version.
    REFRESH = 26
    # TEXT is a stream. Answer: TEXT lists the pushed positions of each shard, and `number` is the first step
    # in which this server accepts other records from the sender.
    POSITIONS = 27
    # From anyone. Read the entries of KEYS in the table TEXT, and change nothing. Answer: TEXT, JSON.
    LOOK = 28
    # In a server's write-ahead log only. TEXT summarizes the tables, for recovery to compare.
    SUMMARY = 30
    SKIP = 29  # the sender's next push is for step `number`, and no trainer waits for its earlier pushes


NO_TRAINER = (1 << 32) - 1
"""The rank of a sender that is not a trainer."""


def route_of(name: str, incarnation: int) -> bytes:
    """Return the routing id of a sender's connections."""
    return f"{name.replace(' ', '-')}-{incarnation:x}".encode()


INITIAL, LOADED = 0, 1
"""The two uses of an ASSIGN. INITIAL carries the first values. LOADED carries values that replace them and
leave optimizer state as it is.
"""


class Field(IntEnum):
    """The content of a part."""

    KEYS = 1  # int64 (n,): without ROWS, requests these rows and inserts missing ones
    ROWS = 2  # float (n, dim): values or gradients of the KEYS part before it
    VALUES = 3  # float (n,): values or gradients of a run of dense blocks that starts at block `table`
    WANT = 4  # int64 (1,): requests the values of so many dense blocks, from `table` on
    SPEC = 5  # uint8: an encoded TableSpec
    TEXT = 6  # uint8: UTF-8
    PEEK = 7  # int64 (n,): requests these rows and inserts none
    STATS = 8  # float32 (n, 2): shows and clicks of the rows in the KEYS and ROWS parts before it
    SPANS = 9  # int64 (g,): the next KEYS or PEEK part is for g tables, and has so many keys of each table
    RECORDS = 10  # uint8: first in a PUSH, the stream records that produced its gradients
    WRITTEN = 11  # float (n,): like VALUES, in a PUSH, the values to set before its gradients are applied


class Code(IntEnum):
    """The reason for a refused request."""

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


class CodedError(Exception):
    """An error that becomes a REFUSED reply with this code and text."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class WireError(CodedError):
    """An error for bytes that are not a message of this protocol. The sender is told if an answer is
    possible.
    """


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
# For speed, because Kind(value) is slow and every message needs a lookup.
_KINDS = {kind.value: kind for kind in Kind}
_CODES = {code.value: code for code in Code}


class _Form(NamedTuple):
    """The encoding of a field with one of its dtypes. numpy lacks bfloat16, so its bytes pass as int16."""

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
    """One tensor of a message. The tensor is contiguous, on the CPU, with one or two dimensions."""

    table: int
    field: Field
    data: torch.Tensor
    lr: float = 0.0


class Message(NamedTuple):
    """A request with the sender's rank, incarnation and sequence, or the reply with the same three values."""

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
        """Return the answer to this request, with these parts or a TEXT part."""
        if text is not None:
            parts = (text_part(text),)
        return Message(kind, self.rank, self.incarnation, self.sequence, number, code, parts)


def bytes_part(field: Field, content: bytes, table: int = 0) -> Part:
    """Return a part of raw bytes (SPEC, TEXT or RECORDS)."""
    return Part(table, field, torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8)))


def text_part(text: str | bytes) -> Part:
    """Return a TEXT part."""
    return bytes_part(Field.TEXT, text.encode() if isinstance(text, str) else text)


def encode(message: Message, *, stored: bool = False) -> list[Buffer]:
    """Return the frames to send.

    Frames of large parts share memory with the tensors, so leave the tensors unchanged until the reply. With
    `stored`, the frames are for a file, which has no limits. Otherwise raise WireError for a message that
    receivers would refuse.
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
        if size > MAX_PART_BYTES and not stored:
            raise WireError(Code.BAD_MESSAGE, f"a part of more than {MAX_PART_BYTES >> 20} MB")
        if size > MAX_FRAME_BYTES and not stored:
            own += [body[at : at + MAX_FRAME_BYTES] for at in range(0, size, MAX_FRAME_BYTES)]
        elif size >= OWN_FRAME_BYTES:
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
    """Return the message in these frames, with consistent lengths, types and shapes.

    `stored` has the same meaning as in `encode`. Raises WireError for invalid frames.
    """
    if not frames or len(frames[0]) < _HEADER.size:
        raise WireError(Code.BAD_MESSAGE, "the header is missing")
    first = bytearray(frames[0])  # a copy is aligned and writable
    magic, version, kind, code, rank, count, incarnation, sequence, number, checksum = _HEADER.unpack_from(
        first
    )
    if magic != MAGIC:
        raise WireError(Code.BAD_MESSAGE, f"magic is {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError(Code.BAD_VERSION, f"its protocol version is {version}, not {VERSION}")
    if (count > MAX_PARTS and not stored) or _HEADER.size + count * _PART.size > len(first):
        raise WireError(Code.BAD_MESSAGE, f"the header announces {count} parts, but some are missing")
    with memoryview(first) as view:
        if checksum != _checksum(view[: _UNSUMMED.size], view[_HEADER.size :], frames[1:]):
            raise WireError(Code.BAD_MESSAGE, "the checksum is wrong")
    if kind not in _KINDS or code not in _CODES:
        raise WireError(Code.BAD_MESSAGE, f"kind {kind} or code {code} is unknown")
    parts = _decode_parts(first, count, frames[1:], stored)
    return Message(_KINDS[kind], rank, incarnation, sequence, number, _CODES[code], parts)


def _decode_parts(first: bytearray, count: int, own: Sequence[Buffer], stored: bool) -> tuple[Part, ...]:
    """Return the parts that the first frame describes. Their data is in the first frame or in frames of their
    own.
    """
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
            frames = 1 if stored else -(-size // MAX_FRAME_BYTES)
            mine = own[taken : taken + frames]
            if sum(map(len, mine)) != size:
                raise WireError(Code.BAD_SHAPE, f"a part of {size} bytes has no frame")
            parts.append(_part(entry, form, mine[0] if frames == 1 else bytearray().join(mine)))
            taken += frames
    if at != len(first) or taken != len(own):
        raise WireError(Code.BAD_SHAPE, "the message has more bytes than the parts need")
    return tuple(parts)


def _checked(entry: tuple[Any, ...], stored: bool) -> tuple[_Form, int]:
    """Return the form of a part and its size in bytes."""
    _, field, dtype_code, zero, lr, rows, cols = entry
    form = _FORMS.get((field, dtype_code))
    if form is None or zero:
        raise WireError(Code.BAD_MESSAGE, f"field {field} with dtype {dtype_code}")
    if (cols > 0) is not form.two_dimensions or (rows > MAX_FRAME_BYTES and not stored) or cols > MAX_COLS:
        # Without these bounds, a part with zero bytes could claim any length.
        raise WireError(Code.BAD_SHAPE, f"field {form.field.name} of shape {rows} x {cols}")
    if not abs(lr) <= _LARGEST_RATE:
        raise WireError(Code.BAD_MESSAGE, f"learning rate {lr}")
    return form, rows * (cols or 1) * form.itemsize


def _part(entry: tuple[Any, ...], form: _Form, body: Buffer, offset: int = 0) -> Part:
    """Return a part in the frame's own memory if the memory is aligned, else in a copy."""
    number, _, _, _, lr, rows, cols = entry
    array = np.ndarray((rows, cols) if cols else (rows,), form.raw, body, offset)
    data = torch.from_numpy(array if array.flags.behaved else array.copy())
    return Part(number, form.field, data.view(form.dtype) if form.raw_view else data, lr)
